"""The f-MICL loss for sentence-transformers.

Importing this module doesn't import sentence-transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fmicl
from fmicl.divergences import Divergence, DivergenceName
from fmicl.kernels import world_of
from fmicl.losses.functional import fmicl_terms_of_pairs
from fmicl.losses.pairing import Block, Pairs
from fmicl.losses.similarities import Similarity, make_similarity
from fmicl.utils.numerics import normalise
from fmicl.utils.validation import Negatives

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class FMICLLoss(nn.Module):
    r"""Contrastive learning with any f-divergence, for ``loss=`` of a ``SentenceTransformerTrainer``.

    Given (anchor, positive) pairs, (anchor, positive, negative_1, ..., negative_n) tuples, or single sentences, it
    maximises a lower bound of the f-mutual information between anchor and positive:

    .. math::
        L = -\Big( \mathrm{mean}_i\, f'(u(x_i, y_i)) - \alpha\, \mathrm{mean}_{neg}\, f^*(f'(u)) \Big), \quad
        u(x, y) = \mu\, e^{-\gamma |x - y|^2}

    on embeddings of unit length (the loss normalises them; the model need not). With x the anchors, y the positives and
    n_k the k-th of K columns of negatives, N rows each, the negative pairs are

    ============  ==============================================  =========================================
    negatives     in the batch, for all i and j != i              explicit, for all i, j and k
    ============  ==============================================  =========================================
    ``anchor``    (x_i, x_j):  N (N - 1)                          (x_i, n_kj):  K N^2
    ``cross``     (x_i, y_j):  N (N - 1)                          (x_i, n_kj):  K N^2
    ``both``      x or y_i with x or y_j, in both orders:         (x_i, n_kj) and (y_i, n_kj):  2 K N^2
                  4 N (N - 1)
    ============  ==============================================  =========================================

    so an anchor is compared with its own hard negatives and those of every other row. The mean is over all of these
    pairs, each with the same weight: alpha needs no change for explicit negatives. With one column of them and
    ``anchor`` or ``cross``, about half of the pairs are explicit. Explicit negatives are never compared with each
    other. A batch of one pair (the last of an epoch) has no negatives in the batch: the loss is the alignment term, and
    that of explicit negatives if there are some.

    Single sentences (one column) go through the model twice in one batch, so that x and y are the same sentences under
    different dropout masks (unsupervised SimCSE). Without dropout, as in evaluation, the two are the same vector.

    With several processes, negatives come from all of them, and the gradient after averaging over processes is that of
    one process on the joined batch.

    Which divergence? ``kl`` first: the paper's best on text, and closest to InfoNCE. ``pearson`` and ``vlc`` are close
    to it on images; on text the paper has Pearson just below KL, and Vincze-Le Cam far below. ``js`` and
    ``squared_hellinger`` have bounded scores and are robust to wrong pairs, for noisy data. ``tsallis`` (order 3)
    repels the closest negatives most strongly. ``reverse_kl`` and ``neyman`` are there for comparison, and fail
    (``fmicl.theory.uniformity`` says why). ``fmicl.Divergence.from_generator`` makes a divergence of any convex f.

    Args:
        model: the SentenceTransformer to train.
        divergence: a name of ``fmicl.list_divergences()`` or a ``fmicl.Divergence``.
        alpha: weight of the negative term. The paper's for text is large, since at gamma = 20 negatives have almost no
            weight: orthogonal ones have :math:`u = e^{-40}`.
        gamma: inverse width of the Gaussian kernel (None: 20, the paper's for text); for the cosine similarity,
            temperature = 1 / (2 gamma).
        mu: scale of the density ratio, or "normalised" for the one that makes it a density ratio on the sphere.
        similarity: "gaussian" (the paper's), "cosine", "cosine_identity", or a ``fmicl.Similarity``, which has its own
            gamma and mu.
        negatives: which pairs of the batch are negatives: "anchor" (the paper's), "cross" or "both".
        shift: "optimal" to maximise the bound over the Donsker-Varadhan shift too; for KL, alpha and mu are then
            constants.
        gather_across_devices: with several processes, take negatives from all of them.

    Raises:
        ValueError: a setting is invalid; or, at the call, there is no column, or one of labels.

    References:
        * f-MICL: Understanding and Generalizing InfoNCE-based Contrastive Learning:
          https://openreview.net/forum?id=ZD03VUZmRx
        * SimCSE: Simple Contrastive Learning of Sentence Embeddings: https://arxiv.org/abs/2104.08821

    Requirements:
        1. (anchor, positive[, negatives]) tuples, or single sentences and a model with dropout.

    Inputs:
        +-------------------------------------------------+--------+
        | Inputs                                          | Labels |
        +=================================================+========+
        | single sentences                                | none   |
        +-------------------------------------------------+--------+
        | (anchor, positive) pairs                        | none   |
        +-------------------------------------------------+--------+
        | (anchor, positive, negative_1, ..., negative_n) | none   |
        +-------------------------------------------------+--------+

    Recommendations:
        - Use ``BatchSamplers.NO_DUPLICATES``, so that no negative of an anchor is its positive.
        - Larger batches estimate the negative term better; alpha need not change with them.

    Relations:
        - ``MultipleNegativesRankingLoss`` (InfoNCE) has a softmax for each anchor where this has one mean over all
          negatives. KL with ``shift="optimal"`` moves that mean into the logarithm, KL alone drops the logarithm.
        - ``fmicl.FMICLLoss`` is the same on embeddings, without a model.

    Example:
        ::

            from datasets import Dataset
            from fmicl.integrations.sentence_transformers import FMICLLoss
            from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer

            model = SentenceTransformer("microsoft/mpnet-base")
            train_dataset = Dataset.from_dict({
                "anchor": ["It's nice weather outside today.", "He drove to work."],
                "positive": ["It's so sunny.", "He took the car to the office."],
            })
            loss = FMICLLoss(model, "kl")
            trainer = SentenceTransformerTrainer(model=model, train_dataset=train_dataset, loss=loss)
            trainer.train()
    """

    def __init__(
        self,
        model: SentenceTransformer,
        divergence: DivergenceName | Divergence = "kl",
        alpha: float | Literal["auto"] = 409600.0,
        gamma: float | None = None,
        mu: float | Literal["normalised"] = 1.0,
        similarity: Literal["gaussian", "cosine", "cosine_identity"] | Similarity = "gaussian",
        negatives: Negatives = "anchor",
        shift: Literal["optimal"] | None = None,
        gather_across_devices: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        if gamma is None:
            gamma = 1.0 if isinstance(similarity, Similarity) else 20.0  # a similarity has its own
        # At gamma = 20, rounding an inner product to bfloat16 would change u by several percent.
        self.objective = fmicl.FMICLLoss(
            divergence, alpha, gamma, mu, similarity, negatives, shift, gather=gather_across_devices, precision="high"
        )

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of one batch: a dictionary of tokens for each column.

        Raises:
            ValueError: there are labels.
        """
        _refuse_labels(labels)
        columns = list(sentence_features)
        if len(columns) == 1:
            embeddings = _embed_twice(self.model, columns[0])
        else:
            embeddings = [self.model(features)["sentence_embedding"] for features in columns]
        return self.compute_loss_from_embeddings(embeddings, labels)

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of embeddings (N, d) of anchors, positives and each column of negatives.

        Raises:
            ValueError: there are labels, or fewer than two columns.
        """
        _refuse_labels(labels)
        if len(embeddings) < 2:
            wrong = ValueError(f"the loss needs anchors and positives, but there are {len(embeddings)} columns")
            world_of(torch.empty(0, 0), self.objective.options["gather"], wrong)  # raises it on all processes
        x, y, *given = embeddings
        if given:
            with torch.autocast(x.device.type, enabled=False):
                return self._with_columns(x, y, given)
        if self._alone(x):
            alignment: Tensor = self.objective.terms(x, y, y).alignment
            return alignment
        loss: Tensor = self.objective(x, y)
        return loss

    def _alone(self, x: Tensor) -> bool:
        """Whether this is the only row of all processes, without communication."""
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return len(x) == 1 and (processes == 1 or not self.objective.options["gather"])

    def _with_columns(self, x: Tensor, y: Tensor, given: Sequence[Tensor]) -> Tensor:
        """The loss with explicit negatives, in addition to those of the batch."""
        o = self.objective
        alone = self._alone(x)
        pairs = Pairs.prepare(x, y, y if alone else o.negatives, given, **o.options)
        anchors = (pairs.x, pairs.y) if o.negatives == "both" else (pairs.x,)
        blocks = () if alone else pairs.blocks
        for column in given:
            other = normalise(column.to(pairs.x.dtype))
            blocks += tuple(Block(rows, other, None, 1, pairs.world.total**2, pairs.world) for rows in anchors)
        pairs = dataclasses.replace(pairs, blocks=blocks)
        critic = make_similarity(o.similarity, o.gamma, o.mu).critic(o.divergence.frozen(), x.shape[1])
        loss = fmicl_terms_of_pairs(pairs, critic, o.alpha, o.shift).total()
        return o.with_criterion(loss, x, y, y if alone else None)

    def get_config_dict(self) -> dict[str, Any]:
        """The settings, for the model card."""
        o = self.objective
        name = o.divergence.name
        known = name in fmicl.list_divergences() and fmicl.divergence(name) == o.divergence
        own = isinstance(o.similarity, Similarity)
        return {
            "divergence": name if known else repr(o.divergence),
            "alpha": o.alpha,
            **({} if own else {"gamma": o.gamma, "mu": o.mu}),
            "similarity": repr(o.similarity) if own else o.similarity,
            "negatives": o.negatives,
            "shift": o.shift,
            "gather_across_devices": o.options["gather"],
        }

    @property
    def citation(self) -> str:
        """The paper, for the model card."""
        return """
@article{lu2023fmicl,
    title={f-{MICL}: Understanding and Generalizing Info{NCE}-based Contrastive Learning},
    author={Yiwei Lu and Guojun Zhang and Sun Sun and Hongyu Guo and Yaoliang Yu},
    journal={Transactions on Machine Learning Research},
    year={2023},
    url={https://openreview.net/forum?id=ZD03VUZmRx}
}
"""


def _refuse_labels(labels: Tensor | None) -> None:
    if labels is not None:
        raise ValueError(
            f"the dataset has a column of labels or scores ({len(labels)} in this batch), which this loss has no use "
            'for: every row is a positive pair. Remove the column: dataset.remove_columns("label")'
        )


def _embed_twice(model: nn.Module, features: dict[str, Any]) -> Sequence[Tensor]:
    """Two embeddings of each sentence with different dropout, from one batch that has each sentence twice.

    Batches without a row for each sentence (packed sequences) take two passes instead.
    """
    tokens = features.get("input_ids", features.get("attention_mask"))
    rows = len(tokens) if isinstance(tokens, Tensor) and tokens.ndim >= 2 and "cu_seq_lens_q" not in features else None
    # The length of the prompt is one number for the batch, and may be a tensor.
    tensors = {key: value for key, value in features.items() if isinstance(value, Tensor) and key != "prompt_length"}
    if rows is None or any(value.ndim == 0 or len(value) != rows for value in tensors.values()):
        return [model(dict(features))["sentence_embedding"] for _ in range(2)]
    doubled = {**features, **{key: torch.cat([value, value]) for key, value in tensors.items()}}
    embeddings: Tensor = model(doubled)["sentence_embedding"]
    return embeddings.chunk(2)
