"""Sums over all pairs of embeddings: the one heavy computation of a contrastive loss."""

from fmicl.kernels.contract import PairFunction
from fmicl.kernels.reference import pair_sum, row_logsumexp

__all__ = ["PairFunction", "pair_sum", "row_logsumexp"]
