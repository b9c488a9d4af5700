"""The f-MICL loss: contrastive learning with any f-divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import require_curved
from fmicl.losses import functional
from fmicl.losses.base import LabelledLoss
from fmicl.losses.functional import Terms
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import DivergenceOptions, LabelOptions, MuOptions, ObjectiveContext, register_objective
from fmicl.losses.similarities import Gaussian, Similarity, make_similarity
from fmicl.losses.targets import LabelNegatives
from fmicl.theory import push, uniformity
from fmicl.utils.learnable import Scalar, format_scalar, leaf_tensors, require_positive_scalar
from fmicl.utils.live_objects import remember
from fmicl.utils.options import option, require_positive_fields
from fmicl.utils.validation import Negatives, require_shift

__all__ = ["LARGEST_PUSH", "FMICLLoss", "FMICLOptions"]

LARGEST_PUSH = 1.5
"""A push (`fmicl.theory.push`) above which negatives without a gradient have made runs collapse."""
_LARGEST_LOG = 700.0  # its exponential is still a float


class FMICLLoss(LabelledLoss):
    """f-MICL: contrastive learning with any f-divergence. See `fmicl.functional.fmicl_loss` for the formula.

    Which divergence? KL does well on images and on text, in the paper and here (docs/reproduction.md has both), and
    with `shift="optimal"` it needs no alpha. Positive pairs that are far apart cost least with Pearson, Tsallis and
    VLC, whose scores are bounded below, and most, of the paper's six, with squared Hellinger. Reverse KL and Neyman
    are there for comparison, and fail (`fmicl.theory.uniformity` says why).

    The same input gives the same bits of loss and gradient (`fmicl.kernels`). Within torch.func's transforms (grad,
    hessian, vmap) "auto" is the dense kernel "reference", the only one that they support; `shift="optimal"` is
    supported with KL alone there. torch.compile takes a loss into its graph as one operator
    (`fmicl.losses.operator`), or traces it with "reference"; only a learned divergence breaks the graph.

    Args:
        divergence: a name of `fmicl.list_divergences()` or a `Divergence`.
        alpha: weight of the negative term; 40 for images and 409600 for text in the paper. Explicit negatives
            without a gradient, such as a queue, need less (`fmicl.theory.push`). For KL with the optimal shift alpha
            and mu are constants of the loss and don't change its gradient.
        gamma: inverse width of the Gaussian kernel; for the cosine similarity, temperature = 1 / (2 gamma).
        mu: scale of the density ratio, or "normalised" for the one that makes it a density ratio.
            alpha, gamma and mu may be tensors: an `nn.Parameter` is a parameter of this module, and is trained with the
            encoder. So are the parameters that the divergence depends on (`learned`), such as Tsallis's order or those
            that a function of yours captures; a copy of this module shares the latter.
        similarity: "gaussian", "cosine", "cosine_identity" (the paper's Table 4; see `Cosine`), or a `Similarity`.
        negatives: "anchor" (the paper's), "both" or "cross"; pass explicit ones to the call.
        shift: "optimal" to maximise over the Donsker-Varadhan shift; divergences other than KL take several times as
            long with it.
        label_negatives: in calls with labels, "all" other samples are negatives, or "other_classes" only.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch, fmicl
        >>> x = torch.randn(8, 16, requires_grad=True)
        >>> y = torch.randn(8, 16, requires_grad=True)
        >>> loss = fmicl.FMICLLoss("js", alpha=40.0, gamma=1.0)
        >>> loss(x, y).backward()
        >>> queue = torch.randn(100, 16)
        >>> loss(x, y, negatives=queue).shape
        torch.Size([])
        >>> loss(x, y, labels=torch.tensor([0, 0, 1, 1, 2, 2, -1, -1])).shape      # the last two are unknown
        torch.Size([])
        >>> learned = fmicl.FMICLLoss("js", gamma=torch.nn.Parameter(torch.tensor(2.0)))
        >>> learned(x, y).backward()
        >>> learned.gamma.grad is not None, list(learned.state_dict())
        (True, ['gamma'])
    """

    def __init__(
        self,
        divergence: DivergenceName | Divergence,
        alpha: Scalar = 40.0,
        gamma: Scalar = 1.0,
        mu: Scalar | Literal["normalised"] = 1.0,
        similarity: str | Similarity = "gaussian",
        negatives: Negatives = "anchor",
        shift: Literal["optimal"] | None = None,
        label_negatives: LabelNegatives = "all",
        **options: Unpack[ComputeOptions],
    ) -> None:
        super().__init__(negatives, label_negatives, **options)
        require_positive_scalar("alpha", alpha)
        require_shift(shift)
        make_similarity(similarity, gamma, mu)  # checks all three
        self.divergence = remember(make_divergence(divergence))
        require_curved(self.divergence)
        self.alpha = alpha
        self.gamma = gamma
        self.mu = mu
        self.similarity = similarity if isinstance(similarity, str) else remember(similarity)
        self.shift = shift
        learned = _parameters(self.divergence, similarity)
        if learned:
            self.learned = nn.ParameterList(learned)

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        negatives: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """The loss of two views x, y: (N, d), against explicit negatives (M, d) if given.

        Labels (N,) or (N, K), or targets (N, N), say which samples are positives of each other.
        """
        return functional.fmicl_loss(x, y, self.divergence, **self._settings(negatives, labels, targets))

    def terms(
        self,
        x: Tensor,
        y: Tensor,
        negatives: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Terms:
        """Alignment and uniformity separately; their sum is the loss."""
        return functional.fmicl_terms(x, y, self.divergence, **self._settings(negatives, labels, targets))

    def _settings(self, negatives: Tensor | None, labels: Tensor | None, targets: Tensor | None) -> dict[str, Any]:
        return {
            "alpha": self.alpha,
            "gamma": self.gamma,
            "mu": self.mu,
            "similarity": self.similarity,
            "shift": self.shift,
            **self.labelled(negatives, labels, targets),
        }

    def settings(self) -> str:
        """The settings of this loss, for `repr`."""
        return (
            f"{self.divergence}, alpha={format_scalar(self.alpha)}, gamma={format_scalar(self.gamma)}, "
            f"mu={format_scalar(self.mu)}, similarity={self.similarity}, negatives={self.negatives}, shift={self.shift}"
        )


def _parameters(divergence: Divergence, similarity: str | Similarity) -> list[nn.Parameter]:
    """The parameters that a divergence depends on, and those of a similarity."""
    own = [] if isinstance(similarity, str) else list(vars(similarity).values())
    fields = [value for value in vars(divergence).values() if isinstance(value, Tensor)]
    probe = torch.zeros(1, device=fields[0].device if fields else None)
    found = leaf_tensors(lambda r: divergence.score(r) + divergence.penalty(r), probe)
    return [value for value in (*own, *found) if isinstance(value, nn.Parameter)]


@register_objective("fmicl", summary="f-MICL: a lower bound of any f-mutual information between the views.")
@dataclass(frozen=True)
class FMICLOptions(LabelOptions, DivergenceOptions, MuOptions):
    """Options of f-MICL."""

    alpha: float = option(40.0, "Weight of the negatives.")
    gamma: float = option(
        1.0,
        "Inverse width of the Gaussian kernel exp(-gamma |x - y|^2); the cosine's temperature is 1 / (2 gamma).",
    )
    similarity: Literal["gaussian", "cosine", "cosine_identity"] = option(
        "gaussian",
        "Similarity of two embeddings; cosine_identity is the paper's cosine, without an activation (T = x.y at "
        "--gamma 0.5), and fails for some divergences.",
    )
    shift: Literal["optimal"] | None = option(None, "Maximise the bound over the Donsker-Varadhan shift as well.")

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        require_positive_fields(self, "alpha", "gamma")

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module.

        Raises:
            ValueError: there is no such divergence, or the cosine similarity has a mu.

        Example:
            >>> FMICLOptions(divergence="tsallis").build(ObjectiveContext(divergence_parameters={"order": 2.0}))
            FMICLLoss(Tsallis(order=2.0), alpha=40, gamma=1, mu=1, similarity=gaussian, negatives=anchor, shift=None)
        """
        return FMICLLoss(
            self.information_divergence(context),
            alpha=self.alpha,
            gamma=self.gamma,
            mu=self.mu,
            similarity=self.similarity,
            shift=self.shift,
            label_negatives=self.label_negatives,
            **self.common(context),
        )

    def why_unused(self) -> dict[str, str]:
        """Alpha and mu are constants of KL's loss with the optimal shift."""
        constant = self.divergence == "kl" and self.shift == "optimal"
        return dict.fromkeys(("alpha", "mu"), "kl with the optimal shift doesn't depend on it") if constant else {}

    def warnings(self, context: ObjectiveContext) -> list[str]:
        """Warn of negatives without a gradient that repel too strongly, and say which alpha balances them.

        The keys of a momentum encoder don't move away. If queries are driven away from them more strongly than towards
        their own key, they run past all keys to the far side of the sphere, and the keys follow: both collapse. With
        negatives that have a gradient the same weight only spreads the embeddings more. The optimal shift weighs the
        negatives by a normaliser, so it needs no warning.

        Example:
            >>> print(*FMICLOptions().warnings(ObjectiveContext(method="moco", detached={"anchor": 1.0})))
            the negatives of moco have no gradient, and at alpha=40 they push 5.4 times as hard as a positive pair \
pulls: the embeddings may collapse. --alpha 7.4 balances the two; --shift optimal needs no alpha
            >>> FMICLOptions().warnings(ObjectiveContext())
            []
        """
        mu = self._mu(context)
        if mu is None or self.shift is not None:
            return []
        hardness = push(self.information_divergence(context), self.alpha, self.gamma, mu) * self.detached_share(context)
        if not LARGEST_PUSH < hardness < math.inf:
            return []
        return [
            f"the negatives of {context.method} have no gradient, and at alpha={self.alpha:g} they push {hardness:.2g} "
            f"times as hard as a positive pair pulls: the embeddings may collapse. --alpha {self.alpha / hardness:.2g} "
            "balances the two; --shift optimal needs no alpha"
        ]

    def collapse_advice(self, context: ObjectiveContext) -> str:
        """What may help a run whose embeddings have collapsed; first, whether theory expected it to.

        Example:
            >>> FMICLOptions().collapse_advice(ObjectiveContext())
            'Raise --alpha, lower --learning-rate, or take another divergence.'
            >>> FMICLOptions(divergence="neyman").collapse_advice(ObjectiveContext()).split(". ")[0]
            'The penalty of neyman is not convex at gamma=1, mu=1, so no theorem guarantees uniformity'
        """
        if "alpha" in self.why_unused():
            change = "Change --gamma"
        else:
            # negatives that have a gradient spread out more the harder they are repelled; others don't move
            change = f"{'Lower' if self.detached_share(context) else 'Raise'} --alpha"
        return f"{self._doubt(context)}{change}, lower --learning-rate, or take another divergence."

    def _doubt(self, context: ObjectiveContext) -> str:
        """That the divergence isn't certified to spread the embeddings; "" if it is."""
        mu = self._mu(context)
        if mu is None:
            return ""
        kind = uniformity(self.information_divergence(context), self.gamma, mu).kind
        if kind == "strictly convex":
            return ""
        word = "convex but not strictly convex" if kind == "convex" else kind
        return (
            f"The penalty of {self.divergence} is {word} at gamma={self.gamma:g}, mu={mu:g}, so no theorem guarantees "
            "uniformity. "
        )

    def _mu(self, context: ObjectiveContext) -> float | None:
        """The scale of the density ratio; None if theory doesn't apply (cosine), or it is too large for a float."""
        if self.similarity != "gaussian":
            return None
        log_mu = Gaussian(self.gamma, self.mu).log_mu(context.dim)
        return math.exp(log_mu) if log_mu < _LARGEST_LOG else None
