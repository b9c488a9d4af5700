r"""Learnable parts of a pair function: its offset and scale, and tensors that its penalty depends on.

The sums over pairs are custom autograd functions of the rows, so a gradient in anything else needs an input of its own.

- Offset and scale become part of the rows: with x~_i = (scale x_i, offset) and o~_j = (o_j, 1),
  z_ij = offset + scale x_i.o_j = x~_i.o~_j. Their gradients follow from that of the rows, in every kernel, without
  reading their values on the host.
- The leaf tensors that a penalty depends on (a parametrised f, what a user's function captures) are found by evaluating
  it once; `pair_parameters` of the tiled backend differentiates the sum in them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fmicl.divergences import JS, KL, VLC, Jeffrey, Neyman, Pearson, ReverseKL, SquaredHellinger
from fmicl.divergences.critic import Critic
from fmicl.kernels.backend import PairFunction, Square
from fmicl.utils.learnable import Scalar, host_value, leaf_tensors

_WITHOUT_PARAMETERS = {JS, KL, VLC, Jeffrey, Neyman, Pearson, ReverseKL, SquaredHellinger}
_LARGE_SCALE = 1024.0  # so large that kernels subtract the maximum before they exponentiate, whatever the true scale is
_BFLOAT16_PARTS = 3  # bfloat16 numbers whose sum has the 24 bits of a float32


def has_learnable_scalars(function: PairFunction) -> bool:
    """Whether offset or scale is a tensor."""
    return isinstance(function.scale, Tensor) or isinstance(function.offset, Tensor)


def penalty_parameters(function: PairFunction, x: Tensor) -> list[Tensor]:
    """The leaf tensors with a gradient that the penalty depends on; x is any tensor on its device.

    Example:
        >>> import fmicl
        >>> order = torch.nn.Parameter(torch.tensor(3.0))
        >>> learned = fmicl.Gaussian().critic(fmicl.divergence("tsallis", order=order), d=2)
        >>> penalty_parameters(learned, torch.zeros(1))[0] is order
        True
        >>> penalty_parameters(fmicl.Gaussian().critic(fmicl.divergence("kl"), d=2), torch.zeros(1))
        []
    """
    if not torch.is_grad_enabled() or type(function) is Square:
        return []
    if type(function) is Critic and type(function.divergence) in _WITHOUT_PARAMETERS:
        return []
    return leaf_tensors(function.penalty, x.new_zeros(1))


@dataclass(frozen=True)
class _OfProducts:
    """A pair function of z = x~.o~ itself."""

    function: PairFunction
    offset: float = 0.0
    scale: float = 1.0

    def penalty(self, z: Tensor) -> Tensor:
        return self.function.penalty(z)

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.function.penalty_and_slope(z)


def fold_scalars(x: Tensor, other: Tensor, function: PairFunction, fast: bool) -> tuple[Tensor, Tensor, PairFunction]:
    """Rows (scale x, offset) and columns (o, 1), and the function of their inner product.

    Args:
        x: rows, (N, d).
        other: columns, (M, d).
        function: its offset or scale is a tensor.
        fast: whether products may be rounded to bfloat16; the offset is then split into several columns.
    """
    # no copy from the host, which a CUDA graph can't capture
    offset = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device) + function.offset
    parts = _bfloat16_parts(offset) if fast else [offset]
    constants = torch.stack(parts).to(x.dtype).expand(len(x), -1)
    rows = torch.cat([_times(x, function.scale), constants], dim=1)
    columns = torch.cat([other, other.new_ones(len(other), len(parts))], dim=1)
    if isinstance(function, Critic | Square):
        return rows, columns, replace(function, offset=0.0, scale=1.0)  # which the Triton kernels know
    return rows, columns, _OfProducts(function)


def fold_scale(x: Tensor, scale: Tensor, with_itself: bool) -> tuple[Tensor, float]:
    """Rows x~ and a number s: s x~_i.o_j is scale x_i.o_j, or s x~_i.x~_j is scale x_i.x_j if `with_itself`."""
    known = host_value(scale)
    nominal = _LARGE_SCALE if known is None else known
    factor = scale / nominal
    return _times(x, factor.sqrt() if with_itself else factor), nominal


def _times(x: Tensor, factor: Scalar) -> Tensor:
    return (x * factor).to(x.dtype)


def _bfloat16_parts(value: Tensor) -> list[Tensor]:
    """Numbers that bfloat16 represents, of sum `value`; the first has its gradient."""
    rest, parts = value.detach(), []
    for _ in range(_BFLOAT16_PARTS):
        parts.append(rest.to(torch.bfloat16).to(value.dtype))
        rest = rest - parts[-1]
    return [parts[0] + (value - value.detach()), *parts[1:]]
