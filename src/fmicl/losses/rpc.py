"""Relative predictive coding (Tsai et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Unpack

from torch import nn

from fmicl.losses import functional
from fmicl.losses.base import ContrastiveLoss
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import ObjectiveContext, ObjectiveOptions, register_objective
from fmicl.utils.learnable import Scalar
from fmicl.utils.options import option
from fmicl.utils.validation import Negatives


class RPCLoss(ContrastiveLoss):
    """RPC: a chi-square bound with relative parameters, of bounded variance. See `functional.rpc_loss`.

    Related: with beta = 0 it is `FMICLLoss("pearson", similarity="cosine")` up to a factor, and with
    alpha = beta = gamma = 1 Vincze-Le Cam's bound with a free critic.

    Args:
        alpha: weight of the negatives' critic.
        beta: weight of the positives' squared critic.
        gamma: weight of the negatives' squared critic.
        temperature: divides the inner product.
        similarity: "product" of the embeddings as they are, as in the paper, or "cosine".
        negatives: "both" (theirs), "cross" or "anchor"; pass explicit ones to the call.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch, fmicl
        >>> fmicl.RPCLoss(alpha=1.0, beta=0.005, gamma=1.0)(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    function = staticmethod(functional.rpc_loss)
    arguments = ("alpha", "beta", "gamma", "temperature", "similarity", "negatives")

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 0.005,
        gamma: float = 1.0,
        temperature: Scalar = 128.0,
        similarity: Literal["product", "cosine"] = "product",
        negatives: Negatives = "both",
        **options: Unpack[ComputeOptions],
    ) -> None:
        super().__init__(negatives, **options)
        functional.check_rpc(alpha, beta, gamma, temperature, similarity)
        self.alpha, self.beta, self.gamma = alpha, beta, gamma
        self.temperature, self.similarity = temperature, similarity


@register_objective("rpc", summary="Relative predictive coding: a relative chi-square bound (Tsai et al., 2021).")
@dataclass(frozen=True)
class RPCOptions(ObjectiveOptions):
    """Options of RPC."""

    usual_negatives = "both"  # all views of the batch, as in its paper
    collapse_hint = "Change --rpc-temperature, or lower --learning-rate."

    rpc_alpha: float = option(1.0, "Weight of the negatives' critic.", at_least=0)
    rpc_beta: float = option(0.005, "Weight of the positives' squared critic.", at_least=0)
    rpc_gamma: float = option(1.0, "Weight of the negatives' squared critic.", above=0)
    rpc_temperature: float = option(128.0, "Divides the inner product of two embeddings.", above=0)
    rpc_similarity: Literal["product", "cosine"] = option(
        "product", "Inner product of the embeddings as they are, or their cosine (take a temperature below 1)."
    )

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module.

        Raises:
            ValueError: the method has a queue, whose keys are of unit length, and the similarity is "product".
        """
        if context.explicit_negatives and self.rpc_similarity == "product":
            raise ValueError(
                f"the keys in the queue of method {context.method} have unit length, but rpc compares embeddings as "
                "they are: take --rpc-similarity cosine with a --rpc-temperature such as 0.5"
            )
        return RPCLoss(
            self.rpc_alpha,
            self.rpc_beta,
            self.rpc_gamma,
            self.rpc_temperature,
            self.rpc_similarity,
            **self.common(context),
        )
