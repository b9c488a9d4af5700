"""The f-MICL loss: contrastive learning with any f-divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import require_curved
from fmicl.losses import functional
from fmicl.losses.balance import require_alpha
from fmicl.losses.base import LabelledLoss
from fmicl.losses.deflection import deflection
from fmicl.losses.functional import Terms
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import DivergenceOptions, LabelOptions, MuOptions, ObjectiveContext, register_objective
from fmicl.losses.similarities import Fitted, Gaussian, Similarity, make_similarity
from fmicl.losses.targets import LabelNegatives
from fmicl.theory import push, uniformity
from fmicl.utils.learnable import Scalar, leaf_tensors
from fmicl.utils.live_objects import remember
from fmicl.utils.options import option
from fmicl.utils.validation import Negatives

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
            and mu are constants of the loss and don't change its gradient. "auto" takes the weight at which the
            negatives of a batch push as hard as its positives pull (`fmicl.losses.balance`).
        gamma: inverse width of the Gaussian kernel; for the cosine similarity, temperature = 1 / (2 gamma).
        mu: scale of the density ratio, or "normalised" for the one that makes it a density ratio.
            alpha, gamma and mu may be tensors: an `nn.Parameter` is a parameter of this module, and is trained with the
            encoder. So are the parameters that the divergence depends on (`learned`), such as Tsallis's order or those
            that a function of yours captures; a copy of this module shares the latter. The weights of the divergence
            "learned" maximise the deflection of its score instead of the bound (`fmicl.losses.deflection`).
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

    function = staticmethod(functional.fmicl_loss)
    arguments = ("divergence", "alpha", "gamma", "mu", "similarity", "negatives", "shift")

    def __init__(
        self,
        divergence: DivergenceName | Divergence,
        alpha: Scalar | Literal["auto"] = 40.0,
        gamma: Scalar = 1.0,
        mu: Scalar | Literal["normalised"] = 1.0,
        similarity: str | Similarity = "gaussian",
        negatives: Negatives = "anchor",
        shift: Literal["optimal"] | None = None,
        label_negatives: LabelNegatives = "all",
        **options: Unpack[ComputeOptions],
    ) -> None:
        super().__init__(negatives, label_negatives, **options)
        require_alpha(alpha, shift)
        made = make_similarity(similarity, gamma, mu)  # checks all three
        self.divergence = remember(make_divergence(divergence))
        require_curved(self.divergence)
        if self.divergence.learned and made.critic(self.divergence, 2).direct:
            raise ValueError(
                f"divergence 'learned' is trained by its score, which with similarity={similarity!r} is the cosine, "
                "whatever f is: take similarity='gaussian'"
            )
        self.alpha, self.gamma, self.mu = alpha, gamma, mu
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
        """The loss of two views, explicit negatives, labels and targets, as `LabelledLoss.forward` takes them."""
        if self.divergence.learned:
            return self.terms(x, y, negatives, labels, targets).total()
        return super().forward(x, y, negatives, labels, targets)

    def terms(
        self,
        x: Tensor,
        y: Tensor,
        negatives: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Terms:
        """Alignment and uniformity separately; their sum is the loss.

        For a learned divergence alignment has a term of value 0, whose gradient trains its weights.
        """
        arguments = {**self.labelled(negatives, labels, targets), "divergence": self.divergence.frozen()}
        alignment, uniformity = functional.fmicl_terms(x, y, **arguments)
        return Terms(self.with_criterion(alignment, x, y, negatives), uniformity)

    def with_criterion(self, loss: Tensor, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss plus a term of value 0 whose gradient trains a learned divergence, if this is one.

        The gradient is minus that of the deflection in the weights, over its absolute value if that is above 1, and 0
        in everything else.
        """
        if not (self.divergence.learned and torch.is_grad_enabled()):
            return loss
        gain = deflection(
            x.detach(),
            y.detach(),
            self.divergence,
            gamma=_constant(self.gamma),
            mu=_constant(self.mu),
            similarity=_constant(self.similarity),
            **self.common(None if negatives is None else negatives.detach()),
        )
        return loss + (gain.detach() - gain) / gain.detach().abs().clamp(min=1.0)


def _constant(value: Any) -> Any:
    """A scalar or a similarity without gradients."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Similarity) and is_dataclass(value):
        return replace(value, **{field.name: _constant(getattr(value, field.name)) for field in fields(value)})
    return value


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

    alpha: float | Literal["auto"] = option(
        40.0,
        "Weight of the negatives; auto: in each batch that at which they push as hard as positive pairs pull.",
        above=0,
    )
    gamma: float = option(
        1.0,
        "Inverse width of the Gaussian kernel exp(-gamma |x - y|^2); the cosine's temperature is 1 / (2 gamma).",
        above=0,
    )
    similarity: Literal["gaussian", "cosine", "cosine_identity", "fitted"] = option(
        "gaussian",
        "Similarity of two embeddings; cosine_identity is the paper's cosine, without an activation (T = x.y at "
        "--gamma 0.5), and fails for some divergences; fitted is an increasing function of the cosine, of "
        "--similarity-from.",
    )
    similarity_from: Path | None = option(
        None, "The assumption.json of `fmicl check-assumption`, to whose density ratio --similarity fitted is fitted."
    )
    shift: Literal["optimal"] | None = option(None, "Maximise the bound over the Donsker-Varadhan shift as well.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_alpha(self.alpha, self.shift)
        if self.similarity == "fitted":
            if self.similarity_from is None:
                raise ValueError("similarity fitted needs similarity_from, the assumption.json that it is fitted to")
            if self.shift is not None or self.alpha == "auto":
                given = f"alpha={self.alpha}, shift={self.shift}"
                raise ValueError(f"similarity fitted takes a number as alpha and no shift, got {given}")
            if self.mu != 1.0:
                raise ValueError(f"similarity fitted has its own scale, got mu={self.mu}: leave it out")

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module.

        Raises:
            ValueError: there is no such divergence, or the cosine similarity has a mu.
            FileNotFoundError: the file that a similarity is fitted to is missing.

        Example:
            >>> FMICLOptions(divergence="tsallis").build(ObjectiveContext(divergence_parameters={"order": 2.0}))
            FMICLLoss(Tsallis(order=2.0), alpha=40, gamma=1, mu=1, similarity=gaussian, negatives=anchor, shift=None)
        """
        fitted = self.similarity == "fitted"
        return FMICLLoss(
            self.information_divergence(context),
            alpha=self.alpha,
            gamma=1.0 if fitted else self.gamma,
            mu=self.mu,
            similarity=Fitted.read(self.similarity_from) if fitted and self.similarity_from else self.similarity,
            shift=self.shift,
            label_negatives=self.label_negatives,
            **self.common(context),
        )

    def why_unused(self) -> dict[str, str]:
        """Alpha and mu are constants of KL's loss with the optimal shift; a fitted similarity has no gamma and mu."""
        if self.similarity == "fitted":
            return dict.fromkeys(("gamma", "mu"), "similarity fitted has its own")
        constant = self.divergence == "kl" and not self.skew and self.shift == "optimal"
        found = dict.fromkeys(("alpha", "mu"), "kl with the optimal shift doesn't depend on it") if constant else {}
        return {**found, "similarity_from": "only similarity fitted takes it"}

    def warnings(self, context: ObjectiveContext) -> list[str]:
        """Warn of negatives without a gradient that repel too strongly, and say which alpha balances them.

        The keys of a momentum encoder don't move away. If queries are driven away from them more strongly than towards
        their own key, they run past all keys to the far side of the sphere, and the keys follow: both collapse. With
        negatives that have a gradient the same weight only spreads the embeddings more. The optimal shift weighs the
        negatives by a normaliser, and alpha "auto" balances them, so neither needs a warning.

        Example:
            >>> print(*FMICLOptions().warnings(ObjectiveContext(method="moco", detached={"anchor": 1.0})))
            the negatives of moco have no gradient, and at alpha=40 they push 5.4 times as hard as a positive pair \
pulls: the embeddings may collapse. --alpha 7.4 balances the two; --alpha auto does so in each batch
            >>> FMICLOptions().warnings(ObjectiveContext())
            []
        """
        mu = self._mu(context)
        if mu is None or self.shift is not None or isinstance(self.alpha, str):
            return []
        hardness = push(self.information_divergence(context), self.alpha, self.gamma, mu) * self.detached_share(context)
        if not LARGEST_PUSH < hardness < math.inf:
            return []
        return [
            f"the negatives of {context.method} have no gradient, and at alpha={self.alpha:g} they push {hardness:.2g} "
            f"times as hard as a positive pair pulls: the embeddings may collapse. --alpha {self.alpha / hardness:.2g} "
            "balances the two; --alpha auto does so in each batch"
        ]

    def collapse_advice(self, context: ObjectiveContext) -> str:
        """What may help a run whose embeddings have collapsed; first, whether theory expected it to.

        Example:
            >>> FMICLOptions().collapse_advice(ObjectiveContext())
            'Raise --alpha, lower --learning-rate, or take another divergence.'
            >>> FMICLOptions(divergence="neyman").collapse_advice(ObjectiveContext()).split(". ")[0]
            'The penalty of neyman is not convex at gamma=1, mu=1, so no theorem guarantees uniformity'
        """
        if "alpha" in self.why_unused() or self.alpha == "auto":
            change = "Change --gamma"
        else:
            # negatives that have a gradient spread out more the harder they are repelled; others don't move
            change = f"{'Lower' if self.detached_share(context) else 'Raise'} --alpha"
        return f"{self._uniformity_caveat(context)}{change}, lower --learning-rate, or take another divergence."

    def _uniformity_caveat(self, context: ObjectiveContext) -> str:
        """That the divergence isn't certified to spread the embeddings; "" if it is."""
        mu = self._mu(context)
        if mu is None:
            return ""
        divergence = self.information_divergence(context)
        kind = uniformity(divergence, self.gamma, mu).kind
        if kind == "strictly convex":
            return ""
        word = "convex but not strictly convex" if kind == "convex" else kind
        return (
            f"The penalty of {divergence.name} is {word} at gamma={self.gamma:g}, mu={mu:g}, so no theorem guarantees "
            "uniformity. "
        )

    def _mu(self, context: ObjectiveContext) -> float | None:
        """The scale of the density ratio; None if theory doesn't apply (cosine), or it is too large for a float."""
        if self.similarity != "gaussian":
            return None
        log_mu = Gaussian(self.gamma, self.mu).log_mu(context.dim)
        return math.exp(log_mu) if log_mu < _LARGEST_LOG else None
