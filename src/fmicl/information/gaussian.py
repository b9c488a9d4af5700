r"""Gaussian copulas: canonical correlations, the log density ratio, and exact f-mutual information.

For jointly Gaussian x and y with canonical correlations :math:`\rho_k` and canonical variables a_k, b_k,

.. math:: \log \frac{p(x, y)}{p(x) p(y)} = \sum_k \Big[-\tfrac12 \log(1 - \rho_k^2)
    + \frac{2 \rho_k a_k b_k - \rho_k^2 (a_k^2 + b_k^2)}{2 (1 - \rho_k^2)}\Big],

a sum of independent terms. With s = (a + b) / sqrt 2 and t = (a - b) / sqrt 2 a term is a weighted sum of two
chi-squares of one degree of freedom, under the joint and under the independent distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fmicl.divergences import (
    KL,
    Divergence,
    DivergenceName,
    Jeffrey,
    Neyman,
    Pearson,
    ReverseKL,
    SquaredHellinger,
    Tsallis,
)
from fmicl.divergences import divergence as make_divergence

LARGEST = 1 - 1e-6
"""Canonical correlations of samples are at most this."""


@dataclass(frozen=True)
class GaussianCopula:
    """A Gaussian model of x and y: means, maps to canonical variables, canonical correlations.

    Attributes:
        x_mean: (D,).
        y_mean: (E,).
        x_map: (D, K), to canonical variables a = (x - mean) x_map.
        y_map: (E, K).
        correlations: (K,), in [0, 1).
    """

    x_mean: Tensor
    y_mean: Tensor
    x_map: Tensor
    y_map: Tensor
    correlations: Tensor

    @classmethod
    def fit(cls, x: Tensor, y: Tensor) -> GaussianCopula:
        r"""Canonical correlation analysis, with the correlations' bias in high dimension removed.

        Of N samples of independent x and y of D and E columns, the largest sample correlation tends to the edge of a
        bulk, not to 0. With c = D/N and e = E/N a sample correlation r above the edge belongs to the rho that solves
        :math:`r^2 = \rho^2 (1 - c + c/\rho^2)(1 - e + e/\rho^2)`; those below the edge are set to 0 (Bao, Hu, Pan and
        Zhou, 2019).

        Args:
            x: (N, D).
            y: (N, E).

        Example:
            >>> x = torch.randn(2000, 1, generator=torch.Generator().manual_seed(0))
            >>> noise = torch.randn(2000, 1, generator=torch.Generator().manual_seed(1))
            >>> GaussianCopula.fit(x, 0.6 * x + 0.8 * noise).correlations.round(decimals=1)
            tensor([0.6000])
        """
        x64, y64 = x.double(), y.double()
        n = len(x64)
        x_mean, y_mean = x64.mean(dim=0), y64.mean(dim=0)
        x_root, y_root = _inverse_root(x64 - x_mean), _inverse_root(y64 - y_mean)
        cross = ((x64 - x_mean) @ x_root).T @ ((y64 - y_mean) @ y_root) / n
        left, sample, right = torch.linalg.svd(cross, full_matrices=False)
        rho = _unbiased(sample, x_root.shape[1] / n, y_root.shape[1] / n)
        keep = rho > 0
        return cls(
            x_mean.to(x), y_mean.to(y), (x_root @ left)[:, keep].to(x), (y_root @ right.T)[:, keep].to(y),
            rho[keep].to(x),
        )  # fmt: skip

    def canonical(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Canonical variables (N, k) of x and y, those of the largest correlation first."""
        return (x - self.x_mean) @ self.x_map, (y - self.y_mean) @ self.y_map

    def log_ratio(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density ratios of N pairs, (N,)."""
        a, b = self.canonical(x, y)
        return self._constant() + self._own(a) + self._own(b) + a * b @ self._cross()

    def all_pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density ratios of all pairs, (N, M)."""
        a, b = self.canonical(x, y)
        return self._constant() + self._own(a).unsqueeze(1) + self._own(b) + (a * self._cross()) @ b.T

    def information(self, divergence: DivergenceName | Divergence = "kl") -> float:
        """The model's own f-mutual information, by :func:`gaussian_information`."""
        return gaussian_information(self.correlations.double().tolist(), divergence)

    def _cross(self) -> Tensor:
        return self.correlations / (1 - self.correlations.square())

    def _own(self, canonical: Tensor) -> Tensor:
        squared = self.correlations.square()
        return -canonical.square() @ (squared / (2 * (1 - squared)))

    def _constant(self) -> Tensor:
        return -0.5 * torch.log1p(-self.correlations.square()).sum()


def _inverse_root(centred: Tensor) -> Tensor:
    """W with W' C W = 1 for the covariance C, on the span of its non-zero eigenvalues."""
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
    keep = values > values.max().clamp(min=1e-300) * 1e-10
    scores: Tensor = vectors[:, keep] / values[keep].sqrt()
    return scores


def _unbiased(sample: Tensor, c: float, e: float) -> Tensor:
    """Correlations from sample correlations, by the limit for dimensions in proportion to the number of samples."""
    if c + e >= 1:  # the sample correlations are 1, whatever the truth
        return torch.zeros_like(sample)
    squared = sample.square().clamp(max=LARGEST**2)
    edge = (math.sqrt(c * (1 - e)) + math.sqrt(e * (1 - c))) ** 2
    # r^2 z = (z (1 - c) + c)(z (1 - e) + e) for z = rho^2, the larger root
    quadratic, linear, constant = (1 - c) * (1 - e), c * (1 - e) + e * (1 - c) - squared, c * e
    z = (-linear + (linear.square() - 4 * quadratic * constant).clamp(min=0).sqrt()) / (2 * quadratic)
    return torch.where(squared > edge, z.clamp(0, LARGEST**2).sqrt(), 0.0)


def correlations_for(information: float, dimensions: int) -> list[float]:
    r"""Equal correlations of d independent pairs with this mutual information, :math:`\sqrt{1 - e^{-2I/d}}`.

    Example:
        >>> rho = correlations_for(10.0, 20)
        >>> round(rho[0], 4), round(gaussian_information(rho, "kl"), 6)
        (0.7951, 10.0)
    """
    return [math.sqrt(-math.expm1(-2 * information / dimensions))] * dimensions


def gaussian_information(correlations: Sequence[float], divergence: DivergenceName | Divergence = "kl") -> float:
    r"""Exact f-mutual information of Gaussians with these canonical correlations.

    Under the joint distribution the log ratio is :math:`r = I + \sum_k \rho_k (\chi_k - \chi'_k) / 2` with independent
    chi-squares of one degree of freedom, so that

    .. math:: E[e^{\lambda r}] = e^{\lambda I} \prod_k (1 - \lambda^2 \rho_k^2)^{-1/2}, \qquad
        I = -\tfrac12 \sum_k \log(1 - \rho_k^2).

    KL, reverse KL, Jeffrey's, Pearson, Neyman, squared Hellinger and Tsallis follow from this in closed form. For any
    other f the law of r is inverted by a Fourier transform, and f is summed on a grid, to about ten digits.

    Args:
        correlations: canonical correlations, each in (-1, 1).
        divergence: a name or a `Divergence`.

    Returns:
        The information in nats (for KL); infinite where the integral diverges.

    Raises:
        ValueError: a correlation is not in (-1, 1), or the integral of an f without closed form does not converge.

    Example:
        >>> round(gaussian_information([0.8], "kl"), 4), round(gaussian_information([0.8], "js"), 4)
        (0.5108, 0.2673)
    """
    divergence = make_divergence(divergence)
    rho = torch.tensor([abs(float(value)) for value in correlations], dtype=torch.float64)
    if not bool((rho < 1).all()):
        raise ValueError(f"correlations must lie in (-1, 1), got one of {float(rho.max()):g}")
    rho = rho[rho > 1e-8]  # the square of a smaller one is below the precision
    if not len(rho):
        return 0.0
    law = _LogRatioLaw(rho)
    closed = _closed_form(law, divergence)
    return law.quadrature(divergence) if closed is None else closed


def _closed_form(law: _LogRatioLaw, divergence: Divergence) -> float | None:
    # by type, not by name: a subclass may have another f
    kind = type(divergence)
    forward, reverse = law.information, law.reverse - law.information
    if kind is KL:
        return forward
    if kind is ReverseKL:
        return reverse
    if kind is Jeffrey:
        return forward + reverse
    if kind is Pearson:
        return law.moment(1.0) - 1
    if kind is Neyman:
        return law.moment(-2.0) - 1
    if kind is SquaredHellinger:
        return 2 - 2 * law.moment(-0.5)
    if isinstance(divergence, Tsallis) and kind is Tsallis:
        return (law.moment(divergence.order - 1) - 1) / (divergence.order - 1)
    return None


class _LogRatioLaw:
    """The law of the log ratio under the joint and under the independent distribution."""

    def __init__(self, rho: Tensor) -> None:
        self.rho = rho
        self.information = -0.5 * float(torch.log1p(-rho.square()).sum())
        self.reverse = float((rho.square() / (1 - rho.square())).sum())  # Jeffrey's

    def moment(self, order: float) -> float:
        """E_joint[e^(order r)], infinite where it does not exist."""
        return math.inf if abs(order) * float(self.rho.max()) >= 1 else math.exp(self._log_moment(order))

    def _log_moment(self, order: float) -> float:
        return order * self.information - 0.5 * float(torch.log1p(-((order * self.rho) ** 2)).sum())

    def quadrature(self, divergence: Divergence) -> float:
        """E_independent[f(u)] by sums under several exponentially tilted laws, checked by a wider and finer grid."""
        first, second = (self._sum_of_tilts(divergence, width, step) for width, step in ((36.0, 0.1), (44.0, 0.07)))
        if not abs(first - second) <= 1e-6 * max(1.0, abs(second)):
            raise ValueError(
                f"the {divergence.name} information of correlations up to {float(self.rho.max()):.4g} does not "
                f"converge ({first:g} and {second:g} on two grids): it may be infinite"
            )
        return second

    def _sum_of_tilts(self, divergence: Divergence, width: float, step: float) -> float:
        """Sum over tilts of the expectation of f times a share, where the shares add up to 1 (balance heuristic).

        The law with density p(r) e^(tilt r) / E[e^(tilt r)] is the joint one for tilt 0, and the independent one for
        tilt -1; two more reach the tails of an f that grows faster than u, or that is infinite at 0.
        """
        pole = 1 / float(self.rho.max())
        tilts = [-min((1 + pole) / 2, 3.0), -1.0, 0.0, min(pole / 2, 2.0)]

        def integrand(r: Tensor) -> Tensor:
            r = r.clamp(-340.0, 340.0)  # e^(2r) is a number; beyond, there is no mass
            # f = u f' - penalty; everything is relative to the largest of the tilted densities, so nothing overflows
            largest = torch.logsumexp(torch.stack([tilt * r - self._log_moment(tilt) for tilt in tilts]), dim=0)
            return divergence.score(r) * torch.exp(-largest) - divergence.penalty(r) * torch.exp(-r - largest)

        return sum(self._expectation(integrand, tilt, width, step) for tilt in tilts)

    def _expectation(self, g: Callable[[Tensor], Tensor], tilt: float, width: float, step: float) -> float:
        """E[g(r)] under a tilted law; e^-width is what the window leaves out."""
        pole = 1 / float(self.rho.max())
        rest = 1 - (tilt * self.rho) ** 2
        centre = self.information + float((tilt * self.rho.square() / rest).sum())
        spread = float((self.rho.square() * (2 - rest) / rest.square()).sum())
        half = width / (pole - abs(tilt)) + 8 * math.sqrt(spread)
        points = 1 << math.ceil(math.log2(max(4 * half / step, 2048)))
        step = 4 * half / points
        omega = 2 * math.pi * torch.fft.fftfreq(points, d=step, dtype=torch.float64)
        argument = torch.complex(torch.full_like(omega, tilt), omega)
        log_transform = self.information * argument - 1j * centre * omega - self._log_moment(tilt)
        for rho, count in zip(*self.rho.unique(return_counts=True), strict=True):
            log_transform = log_transform - 0.5 * float(count) * torch.log1p(-((argument * float(rho)) ** 2))
        offsets = (torch.arange(points, dtype=torch.float64) - points // 2) * step
        signs = 1 - 2 * (torch.arange(points) % 2)  # shifts the origin to the middle of the window
        density = torch.fft.fft(log_transform.exp() * signs).real / (points * step)
        # the sum of a band-limited density times an analytic function that fades out within the window is exact to
        # exponentially small terms, even though the density itself may be singular
        fade = 0.5 * torch.erfc((offsets.abs() - 1.5 * half) / (half / 16))
        return float((density * fade * g(centre + offsets)).sum() * step)
