"""Batch normalisation and its running statistics: by those of the batches before, without a move, or in evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["PastNorm", "by_past", "evaluating", "unmoved"]


class PastNorm(nn.Module):
    r"""Normalise by the running statistics of the batches before this one, then let this one move them.

    .. math:: y = w \frac{x - \bar m}{\sqrt{\bar v + \epsilon}} + b, \qquad
        \bar m \leftarrow \bar m + \rho_t (E[x] - \bar m), \quad
        \bar v \leftarrow \bar v + \rho_t (\mathrm{Var}[x] - \bar v)

    with :math:`\rho_t = \max(\rho, 1 / (t + 1))` at batch t, so that the first batches count alike. Batch 0 has none
    before it and goes by its own. The statistics are taken over all processes. There are no gradients: it is for
    networks that follow another, as momentum encoders do.

    Parameters and buffers have the names that they have in torch's batch normalisation, whose place it takes.

    Args:
        norm: torch's, of which this has the parameters, the statistics, and rho (its momentum).
        then: what follows it, by the name that it had there.

    Example:
        >>> norm = PastNorm(nn.BatchNorm1d(1, affine=False, eps=0.0))
        >>> (norm(torch.tensor([[2.0], [4.0]])) * 2**0.5).flatten().round()   # mean 3, variance 2
        tensor([-1.,  1.])
        >>> (norm(torch.tensor([[3.0], [9.0]])) * 2**0.5).flatten().round()   # by the first batch's
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

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d, **then: nn.Module) -> None:
        super().__init__()
        if norm.running_mean is None or norm.momentum is None:
            raise ValueError(
                "a batch normalisation without running statistics has none of the batches before: take those of the "
                "batch (--key-statistics batch)"
            )
        self.eps, self.momentum, self.affine = norm.eps, float(norm.momentum), norm.affine
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        for name, module in then.items():
            self.add_module(name, module)
        self.train(norm.training)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """(N, C) or (N, C, ...), normalised; in evaluation mode nothing moves."""
        if not self.training:
            return self._normalise(x, self.running_mean, self.running_var)
        mean, variance = _moments(x)
        first = self.num_batches_tracked == 0
        past = torch.where(first, mean, self.running_mean), torch.where(first, variance, self.running_var)
        result = self._normalise(x, *past)
        share = (1 / (self.num_batches_tracked + 1)).clamp_min(self.momentum)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)
        self.num_batches_tracked.add_(1)
        return result

    def _normalise(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        x = F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)
        for module in self.children():
            x = module(x)
        return x


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (C,) of the columns, of all processes together: each has as many rows.

    Raises:
        ValueError: a channel has one value or none, and so no variance.
    """
    rows = x.numel() // max(x.shape[1], 1)
    if rows < 2:
        raise ValueError(f"batch normalisation needs more than one value of a channel, got shape {tuple(x.shape)}")
    axes = [axis for axis in range(x.ndim) if axis != 1]
    variance, mean = torch.var_mean(x.float(), dim=axes)
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return mean, variance
    mine = torch.stack([mean, variance])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    means, variances = torch.stack(gathered, dim=1)
    total = rows * len(gathered)
    within, between = (rows - 1) * variances.sum(0), rows * (means - means.mean(0)).square().sum(0)
    return means.mean(0), (within + between) / (total - 1)


def by_past(network: nn.Module) -> nn.Module:
    """Put a :class:`PastNorm` in the place of each batch normalisation of a network; the rest stays as it is.

    Returns:
        The network, or what takes its place where it is a batch normalisation itself.

    Raises:
        ValueError: a batch normalisation of another kind than torch's own two, and timm's that an activation follows.

    Example:
        >>> by_past(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))[1]
        PastNorm()
    """
    if type(network) in (nn.BatchNorm1d, nn.BatchNorm2d):
        assert isinstance(network, nn.BatchNorm1d | nn.BatchNorm2d)
        return PastNorm(network)
    if _with_activation(network):
        return PastNorm(network, **dict(network.named_children()))
    if isinstance(network, nn.modules.batchnorm._BatchNorm):
        raise ValueError(
            f"statistics of the batches before are known for BatchNorm1d and BatchNorm2d of torch and BatchNormAct2d "
            f"of timm, not for {type(network).__name__}: take those of the batch (--key-statistics batch)"
        )
    for name, child in network.named_children():
        setattr(network, name, by_past(child))
    return network


def _with_activation(norm: nn.Module) -> TypeGuard[nn.BatchNorm2d]:
    """Whether it is timm's, which normalises and then calls its children: dropout, and the activation."""
    try:
        from timm.layers.norm_act import BatchNormAct2d
    except ImportError:
        return False
    return type(norm) is BatchNormAct2d


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards each of its modules is in its own, frozen ones among those that are trained.

    Example:
        >>> network = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout().eval())
        >>> with evaluating(network):
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
def unmoved(network: nn.Module) -> Iterator[None]:
    """What goes through the network meanwhile is normalised by its own statistics and leaves the running ones alone.

    For batches in training that are unlike those which the network is meant for. (The number of batches, which says
    nothing where there is a momentum, goes on. Layers of other kinds than torch's batch normalisations are not known.)

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> with unmoved(norm):
        ...     _ = norm(torch.tensor([[2.0], [4.0]]))
        >>> float(norm.running_mean), norm.momentum
        (0.0, 0.1)
    """
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            if norm.momentum is None and norm.num_batches_tracked is not None:  # the rate then, which must not fall
                norm.num_batches_tracked = norm.num_batches_tracked.clone()
            norm.momentum = 0.0
        yield
    finally:
        for norm, rate, count in before:
            norm.momentum, norm.num_batches_tracked = rate, count
