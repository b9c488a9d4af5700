"""RealNVP normalising flow (Dinh et al., 2017): density estimation of features, as in the paper's appendix.

The paper estimates the joint density of positive pairs by RealNVP with a Gaussian and with a uniform prior, with the
code of ikostrikov/pytorch-flows: 5 blocks of an affine coupling, a batch normalisation and a reversal, 100 hidden
units, tanh scales and ReLU translations, Adam with learning rate 1e-4 and weight decay 1e-6. These are the defaults
here, but for the reversal, whose place alternating halves take, a larger learning rate, and early stopping.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

Prior = Literal["gaussian", "uniform"]


class _Coupling(nn.Module):
    """Half of the columns scaled and shifted by functions of the other half."""

    mask: Tensor

    def __init__(self, columns: int, hidden: int, first: bool) -> None:
        super().__init__()
        self.register_buffer("mask", ((torch.arange(columns) % 2) == int(first)).float())
        self.scale = nn.Sequential(
            nn.Linear(columns, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, columns)
        )
        self.shift = nn.Sequential(
            nn.Linear(columns, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, columns)
        )
        for network in (self.scale, self.shift):  # begin at the identity
            last = network[-1]
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x * self.mask
        log_scale = torch.tanh(self.scale(kept)) * 3 * (1 - self.mask)
        return kept + (1 - self.mask) * (x * torch.exp(log_scale) + self.shift(kept)), log_scale.sum(dim=1)

    def inverse(self, z: Tensor) -> Tensor:
        kept = z * self.mask
        log_scale = torch.tanh(self.scale(kept)) * 3 * (1 - self.mask)
        x: Tensor = kept + (1 - self.mask) * (z - self.shift(kept)) * torch.exp(-log_scale)
        return x


class RealNVP(nn.Module):
    r"""Affine couplings to a standard Gaussian, or through a sigmoid to the uniform distribution on a cube.

    .. math:: \log p(x) = \log p_0(z) + \log |\det \partial z / \partial x|

    With the uniform prior the last map is the sigmoid of each column, so that the density is that of logistic noise
    before it.

    Args:
        columns: of the samples.
        blocks: pairs of couplings.
        hidden: units of each hidden layer.
        prior: gaussian or uniform.

    Example:
        >>> flow = RealNVP(4)
        >>> x = torch.randn(3, 4)
        >>> torch.allclose(flow.inverse(flow.transform(x)[0]), x, atol=1e-5)
        True
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, columns: int, *, blocks: int = 5, hidden: int = 100, prior: Prior = "gaussian") -> None:
        super().__init__()
        if columns < 2:
            raise ValueError(f"a flow of couplings needs at least 2 columns, got {columns}")
        if prior not in ("gaussian", "uniform"):
            raise ValueError(f"prior must be 'gaussian' or 'uniform', got {prior!r}")
        self.prior: Prior = prior
        self.couplings = nn.ModuleList([_Coupling(columns, hidden, first=k % 2 == 0) for k in range(2 * blocks)])
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("deviation", torch.ones(columns))

    def standardise_by(self, x: Tensor) -> None:
        """Take mean and standard deviation of these samples as a first, fixed affine map."""
        self.mean = x.mean(dim=0)
        self.deviation = x.std(dim=0).clamp(min=1e-6)

    def transform(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The noise z (N, D) before the sigmoid, and log |det| (N,)."""
        z = (x - self.mean) / self.deviation
        log_det = -self.deviation.log().sum().expand(len(x))
        for coupling in self.couplings:
            z, change = coupling(z)
            log_det = log_det + change
        return z, log_det

    def inverse(self, z: Tensor) -> Tensor:
        """Samples from noise."""
        for coupling in reversed(list(self.couplings)):
            assert isinstance(coupling, _Coupling)
            z = coupling.inverse(z)
        return z * self.deviation + self.mean

    def log_density(self, x: Tensor) -> Tensor:
        """Log density of samples (N, D), (N,)."""
        z, log_det = self.transform(x)
        if self.prior == "gaussian":
            base = -0.5 * z.square().sum(dim=1) - 0.5 * z.shape[1] * math.log(2 * math.pi)
        else:  # the density of uniform noise is 1; the sigmoid's slope is what is left
            base = (nn.functional.logsigmoid(z) + nn.functional.logsigmoid(-z)).sum(dim=1)
        return base + log_det


def fit_flow(
    samples: Tensor,
    *,
    prior: Prior = "gaussian",
    blocks: int = 5,
    hidden: int = 100,
    steps: int = 2000,
    batch_size: int = 256,
    learning_rate: float = 1e-3,
    validation: float = 0.2,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> RealNVP:
    """Train a flow by maximum likelihood, with early stopping on a part of the samples.

    Args:
        samples: (N, D), N at least 20.
        prior: gaussian or uniform.
        blocks: as `RealNVP`.
        hidden: as `RealNVP`.
        steps: at most.
        batch_size: samples in a step.
        learning_rate: of Adam.
        validation: share of samples for early stopping.
        seed: of weights, split and batches.
        progress: called with the share of steps that is done.

    Raises:
        ValueError: samples are too few, or not finite.

    Example:
        >>> x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
        >>> flow = fit_flow(x, steps=50)
        >>> flow.log_density(x).shape
        torch.Size([400])
    """
    if samples.dim() != 2 or len(samples) < 20 or not bool(samples.isfinite().all()):
        raise ValueError(f"a flow needs at least 20 finite samples (N, D), got {tuple(samples.shape)}")
    samples = samples.detach().float()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(samples), generator=generator).to(samples.device)
    held = samples[order[: max(4, round(validation * len(samples)))]]
    train = samples[order[len(held) :]]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        flow = RealNVP(samples.shape[1], blocks=blocks, hidden=hidden, prior=prior).to(samples.device)
    flow.standardise_by(train)
    optimiser = torch.optim.Adam(flow.parameters(), learning_rate, weight_decay=1e-6)
    best, best_state, since = -math.inf, copy.deepcopy(flow.state_dict()), 0
    every = max(1, min(50, steps // 4))
    for step in range(1, steps + 1):
        index = torch.randint(len(train), (min(batch_size, len(train)),), generator=generator).to(samples.device)
        loss = -flow.log_density(train[index]).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        optimiser.step()
        if step % every == 0:
            with torch.no_grad():
                found = float(flow.log_density(held).mean())
            if found > best:
                best, best_state, since = found, copy.deepcopy(flow.state_dict()), 0
            else:
                since += 1
            if progress is not None:
                progress(step / steps)
            if since >= 6:
                break
    flow.load_state_dict(best_state)
    return flow.eval()
