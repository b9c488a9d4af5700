"""The objectives as modules: each holds its settings and calls its function in `fmicl.functional`."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import Tensor, nn

from fmicl.divergences import Divergence
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import require_curved
from fmicl.losses import functional
from fmicl.losses.functional import Terms
from fmicl.losses.pairing import Options, check_options, options_words
from fmicl.losses.similarities import Similarity
from fmicl.utils.validation import Negatives, require_mode, require_positive, require_power, require_shift

__all__ = ["AlignUniformLoss", "FMICLLoss", "InfoNCELoss", "SpectralContrastiveLoss"]


class FMICLLoss(nn.Module):
    """f-MICL: contrastive learning with any f-divergence. See `fmicl.functional.fmicl_loss` for the formula.

    Which divergence? KL does well on images and on text, in the paper and here (docs/reproduction.md has both), and
    with `shift="optimal"` it needs no alpha. A pair of views that are far apart costs the least with Pearson, Tsallis
    and VLC, whose scores are bounded below, and of the paper's six the most with squared Hellinger. Reverse KL and
    Neyman are there to be compared with, and fail (`fmicl.theory.uniformity` says why).

    The same input gives the same bits of loss and gradient (`fmicl.kernels`). Within torch.func's transforms (grad,
    hessian, vmap) "auto" is the dense kernel "reference", the only one that they go through; `shift="optimal"` goes
    with KL alone there. In a function that torch.compile compiles, a loss runs as it is written, between two graphs;
    with "reference" it is compiled too, `shift="optimal"` again with KL alone, and fullgraph=True needs that.

    Args:
        divergence: a name of `fmicl.list_divergences()` or a `Divergence`.
        alpha: weight of the negative term; 40 for images and 409600 for text in the paper. Explicit negatives
            without a gradient, such as a queue, take less (`fmicl.theory.push`). For KL with the optimal shift alpha
            and mu are constants of the loss, without a part in its gradient.
        gamma: inverse width of the Gaussian kernel; for the cosine similarity, temperature = 1 / (2 gamma).
        mu: scale of the density ratio, or "normalised" for the one that makes it a density ratio.
        similarity: "gaussian", "cosine", or a `Similarity`.
        negatives: "anchor" (the paper's), "both" or "cross"; explicit ones are given at the call.
        shift: "optimal" to maximise over the Donsker-Varadhan shift; divergences other than KL take several times as
            long with it.
        options: how it is computed: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.Options`).

    Example:
        >>> import torch, fmicl
        >>> x = torch.randn(8, 16, requires_grad=True)
        >>> y = torch.randn(8, 16, requires_grad=True)
        >>> loss = fmicl.FMICLLoss("js", alpha=40.0, gamma=1.0)
        >>> loss(x, y).backward()
        >>> queue = torch.randn(100, 16)
        >>> loss(x, y, negatives=queue).shape
        torch.Size([])
    """

    def __init__(
        self,
        divergence: str | Divergence,
        alpha: float = 40.0,
        gamma: float = 1.0,
        mu: float | Literal["normalised"] = 1.0,
        similarity: str | Similarity = "gaussian",
        negatives: Negatives = "anchor",
        shift: Literal["optimal"] | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        check_options(**options)
        require_positive("alpha", alpha)
        require_mode(negatives)
        require_shift(shift)
        functional.make_similarity(similarity, gamma, mu)
        self.divergence = make_divergence(divergence)
        require_curved(self.divergence)
        self.alpha = alpha
        self.gamma = gamma
        self.mu = mu
        self.similarity = similarity
        self.negatives = negatives
        self.shift = shift
        self.options = options

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of two views x, y: (N, d), against explicit negatives (M, d) if given."""
        return functional.sum_terms(self.terms(x, y, negatives))

    def terms(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Terms:
        """Alignment and uniformity apart; their sum is the loss."""
        return functional.fmicl_terms(
            x,
            y,
            self.divergence,
            alpha=self.alpha,
            gamma=self.gamma,
            mu=self.mu,
            similarity=self.similarity,
            negatives=self.negatives if negatives is None else negatives,
            shift=self.shift,
            **self.options,
        )

    def extra_repr(self) -> str:
        """The settings."""
        return (
            f"{self.divergence}, alpha={self.alpha:g}, gamma={self.gamma:g}, mu={self.mu}, "
            f"similarity={self.similarity}, negatives={self.negatives}, shift={self.shift}"
            f"{options_words(**self.options)}"
        )


class InfoNCELoss(nn.Module):
    """InfoNCE: SimCLR's NT-Xent by default, MoCo's with explicit negatives. See `functional.infonce_loss`.

    Related: `FMICLLoss("kl", shift="optimal")` moves the mean over anchors into the logarithm and, as an objective, is
    never above this one with `decoupled=True` plus the log of the number of negatives; `FMICLLoss("kl")` drops the
    logarithm.

    Args:
        temperature: SimCLR takes 0.5 on CIFAR-10, MoCo 0.07, SimCSE 0.05.
        negatives: "both" (SimCLR), "cross" or "anchor"; explicit ones are given at the call (MoCo).
        decoupled: leave the positive out of the denominator.
        options: how it is computed: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.Options`).

    Example:
        >>> import torch, fmicl
        >>> loss = fmicl.InfoNCELoss(temperature=0.5)
        >>> loss(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    def __init__(
        self,
        temperature: float = 0.5,
        negatives: Negatives = "both",
        *,
        decoupled: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        check_options(**options)
        require_positive("temperature", temperature)
        require_mode(negatives)
        self.temperature = temperature
        self.negatives = negatives
        self.decoupled = decoupled
        self.options = options

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of two views x, y: (N, d), against explicit negatives (M, d) if given."""
        return functional.infonce_loss(
            x,
            y,
            temperature=self.temperature,
            negatives=self.negatives if negatives is None else negatives,
            decoupled=self.decoupled,
            **self.options,
        )

    def extra_repr(self) -> str:
        """The settings."""
        return (
            f"temperature={self.temperature:g}, negatives={self.negatives}, decoupled={self.decoupled}"
            f"{options_words(**self.options)}"
        )


class AlignUniformLoss(nn.Module):
    """Alignment and uniformity of Wang and Isola. See `functional.align_uniform_loss`.

    Related: with `weight=1 / gamma` and `power=2` it is `FMICLLoss("kl", gamma=gamma, shift="optimal")` up to a factor
    and a constant.

    Args:
        gamma: inverse width of the Gaussian kernel (their t).
        power: of the distance in the alignment term.
        weight: of the uniformity term.
        negatives: "anchor", "both" or "cross"; explicit ones are given at the call.
        options: how it is computed: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.Options`).

    Example:
        >>> import torch, fmicl
        >>> fmicl.AlignUniformLoss()(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    def __init__(
        self,
        gamma: float = 2.0,
        power: float = 2.0,
        weight: float = 1.0,
        negatives: Negatives = "anchor",
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        check_options(**options)
        require_positive("gamma", gamma)
        require_power(power)
        require_positive("weight", weight)
        require_mode(negatives)
        self.gamma = gamma
        self.power = power
        self.weight = weight
        self.negatives = negatives
        self.options = options

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of two views x, y: (N, d), against explicit negatives (M, d) if given."""
        return functional.align_uniform_loss(
            x,
            y,
            gamma=self.gamma,
            power=self.power,
            weight=self.weight,
            negatives=self.negatives if negatives is None else negatives,
            **self.options,
        )

    def extra_repr(self) -> str:
        """The settings."""
        return (
            f"gamma={self.gamma:g}, power={self.power:g}, weight={self.weight:g}, negatives={self.negatives}"
            f"{options_words(**self.options)}"
        )


class SpectralContrastiveLoss(nn.Module):
    """The spectral contrastive loss of HaoChen et al. See `functional.spectral_contrastive_loss`.

    Related: `FMICLLoss("pearson")` is the same with a Gaussian kernel in place of the inner product.

    Args:
        mu: squared radius of the sphere that the embeddings are scaled to.
        negatives: "cross" (theirs), "anchor" or "both"; explicit ones are given at the call.
        options: how it is computed: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.Options`).

    Example:
        >>> import torch, fmicl
        >>> fmicl.SpectralContrastiveLoss(mu=3.0)(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    def __init__(self, mu: float = 1.0, negatives: Negatives = "cross", **options: Unpack[Options]) -> None:
        super().__init__()
        check_options(**options)
        require_positive("mu", mu)
        require_mode(negatives)
        self.mu = mu
        self.negatives = negatives
        self.options = options

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of two views x, y: (N, d), against explicit negatives (M, d) if given."""
        return functional.spectral_contrastive_loss(
            x,
            y,
            mu=self.mu,
            negatives=self.negatives if negatives is None else negatives,
            **self.options,
        )

    def extra_repr(self) -> str:
        """The settings."""
        return f"mu={self.mu:g}, negatives={self.negatives}{options_words(**self.options)}"
