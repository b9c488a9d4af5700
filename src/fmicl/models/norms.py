"""Batch normalisation by running statistics of past batches, and context managers that freeze running statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


class RunningStatisticsNorm(nn.Module):
    r"""Batch normalisation by the running statistics of past batches, which the current batch then updates.

    .. math:: y = w \frac{x - \bar m}{\sqrt{\bar v + \epsilon}} + b, \qquad
        \bar m \leftarrow \bar m + \rho_t (E[x] - \bar m), \quad
        \bar v \leftarrow \bar v + \rho_t (\mathrm{Var}[x] - \bar v)

    with :math:`\rho_t = \max(\rho, 1 / (t + 1))` at batch t, so that the first batches have equal weight. Batch 0 is
    normalised by its own statistics. The statistics are those of all processes together. There are no gradients: this
    is for momentum encoders.

    Parameters and buffers have the same names as in torch's batch normalisation, which it replaces.

    Args:
        norm: torch's layer, whose parameters, statistics and momentum rho this one takes.
        following: modules that are applied to the result, by name.

    Example:
        >>> norm = RunningStatisticsNorm(nn.BatchNorm1d(1, affine=False, eps=1e-12))
        >>> (norm(torch.tensor([[2.0], [4.0]])) * 2**0.5).flatten().round()   # mean 3, variance 2
        tensor([-1.,  1.])
        >>> (norm(torch.tensor([[3.0], [9.0]])) * 2**0.5).flatten().round()   # by those of the first batch
        tensor([0., 6.])
        >>> float(norm.running_mean)
        4.5
    """

    weight: Tensor | None
    bias: Tensor | None
    if TYPE_CHECKING:
        running_mean: Tensor
        running_var: Tensor
        num_batches_tracked: Tensor

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d, **following: nn.Module) -> None:
        super().__init__()
        if norm.running_mean is None or norm.momentum is None:
            raise ValueError(
                "the batch normalisation has no running statistics, or no momentum: use those of the batch "
                "(--key-statistics batch)"
            )
        self.eps, self.momentum, self.affine = norm.eps, float(norm.momentum), norm.affine
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        for name, module in following.items():
            self.add_module(name, module)
        self.train(norm.training)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """(N, C) or (N, C, ...), normalised; in evaluation mode the statistics are not updated."""
        if not self.training:
            return self._normalise(x, self.running_mean, self.running_var)
        mean, variance = _moments(x)
        first = self.num_batches_tracked == 0
        past = torch.where(first, mean, self.running_mean), torch.where(first, variance, self.running_var)
        result = self._normalise(x, *past)
        rate = (1 / (self.num_batches_tracked + 1)).clamp_min(self.momentum)
        self.running_mean.lerp_(mean, rate)
        self.running_var.lerp_(variance, rate)
        self.num_batches_tracked.add_(1)
        return result

    def _normalise(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        x = F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)
        for module in self.children():
            x = module(x)
        return x


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (C,) of each channel, over all processes, each of which has as many rows.

    Raises:
        ValueError: a channel has fewer than two values.
    """
    rows = x.numel() // max(x.shape[1], 1)
    if rows < 2:
        raise ValueError(f"batch normalisation needs at least two values per channel, got shape {tuple(x.shape)}")
    axes = [axis for axis in range(x.ndim) if axis != 1]
    variance, mean = torch.var_mean(x.float(), dim=axes)
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return mean, variance
    local = torch.stack([mean, variance])
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    means, variances = torch.stack(gathered, dim=1)
    total = rows * len(gathered)
    within, between = (rows - 1) * variances.sum(0), rows * (means - means.mean(0)).square().sum(0)
    return means.mean(0), (within + between) / (total - 1)


def use_running_statistics(network: nn.Module) -> nn.Module:
    """Replace each batch normalisation of a network by a :class:`RunningStatisticsNorm`, in place.

    Returns:
        The network, or its replacement if it is a batch normalisation itself.

    Raises:
        ValueError: a batch normalisation other than torch's BatchNorm1d and BatchNorm2d and timm's BatchNormAct2d.

    Example:
        >>> use_running_statistics(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))[1]
        RunningStatisticsNorm()
    """
    if type(network) in (nn.BatchNorm1d, nn.BatchNorm2d):
        assert isinstance(network, nn.BatchNorm1d | nn.BatchNorm2d)
        return RunningStatisticsNorm(network)
    if _is_norm_act(network):
        return RunningStatisticsNorm(network, **dict(network.named_children()))
    if isinstance(network, nn.modules.batchnorm._BatchNorm):
        raise ValueError(
            f"running statistics are implemented for BatchNorm1d and BatchNorm2d of torch and BatchNormAct2d of timm, "
            f"not for {type(network).__name__}: use those of the batch (--key-statistics batch)"
        )
    for name, child in network.named_children():
        setattr(network, name, use_running_statistics(child))
    return network


def _is_norm_act(norm: nn.Module) -> TypeGuard[nn.BatchNorm2d]:
    """Whether it is timm's BatchNormAct2d, which normalises and then applies its children: dropout and activation."""
    try:
        from timm.layers.norm_act import BatchNormAct2d
    except ImportError:
        return False
    return type(norm) is BatchNormAct2d


@contextlib.contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode; afterwards each module has its previous mode, frozen ones included.

    Example:
        >>> network = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout().eval())
        >>> with evaluation_mode(network):
        ...     network.training
        False
        >>> [module.training for module in network]
        [True, False]
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def frozen_running_statistics(network: nn.Module) -> Iterator[None]:
    """Normalise by batch statistics without updating the running ones, in all of torch's batch normalisations.

    For training batches unlike those that the network is meant for. (The number of batches, which has no effect with a
    momentum, is still counted.)

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> with frozen_running_statistics(norm):
        ...     _ = norm(torch.tensor([[2.0], [4.0]]))
        >>> float(norm.running_mean), norm.momentum
        (0.0, 0.1)
    """
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            # without a momentum, the update rate is 1 / this number
            if norm.momentum is None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked = norm.num_batches_tracked.clone()
            norm.momentum = 0.0
        yield
    finally:
        for norm, rate, count in before:
            norm.momentum, norm.num_batches_tracked = rate, count
