"""Whole losses of two views in a few Triton launches, from raw embeddings to the loss and its gradient.

For batches of up to some thousand rows a loss takes as long as Python needs to launch its kernels. A `ViewLossPlan`
fixes everything that depends on settings, shape and type only: grids, tiles, constants and compiled kernels. A call
then allocates four tensors and launches four kernels (InfoNCE five). Nothing is read on the host, so it can be captured
in a CUDA graph, and no sum is atomic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fmicl.divergences.critic import Critic
from fmicl.kernels.lowering import LOG2E, Lowered, LoweredScore, lower, lower_score, lower_softmax
from fmicl.utils.triton import CachedLaunch, interpreting, multiprocessors

# rows^2 * width up to which pairs are summed by this module's kernels, for bfloat16 and float32: measured on an H200
_LARGEST_SMALL = {True: 2**33, False: 2**31}
_MOST_PARTS = 16


class ViewLoss(NamedTuple):
    """A loss of two views as constants of the kernels.

    Attributes:
        negatives: "anchor", "both" or "cross".
        penalty: of the pairs; its kind is "softmax" for InfoNCE.
        score: of the positives; None for InfoNCE.
        alpha: weight of the mean penalty.
        offset: log density ratio at inner product 0.
        scale: its slope; for InfoNCE, 1 / temperature.
        decoupled: leave the positive out of InfoNCE's denominator.
    """

    negatives: str
    penalty: Lowered
    score: LoweredScore | None
    alpha: float
    offset: float
    scale: float
    decoupled: bool = False

    @classmethod
    def fmicl(cls, critic: Critic, alpha: float, negatives: str) -> ViewLoss | None:
        """f-MICL; None if the kernels have no program for its divergence.

        Example:
            >>> import fmicl
            >>> critic = fmicl.Gaussian(gamma=0.5).critic(fmicl.divergence("kl"), d=8)
            >>> ViewLoss.fmicl(critic, 40.0, "anchor").score.linear      # the score is r + 1
            1.0
        """
        penalty, score = lower(critic), lower_score(critic.divergence)
        if critic.free or penalty is None or score is None:
            return None
        return cls(negatives, penalty, score, alpha, float(critic.offset), float(critic.scale))

    @classmethod
    def infonce(cls, scale: float, negatives: str, decoupled: bool) -> ViewLoss:
        """InfoNCE.

        Example:
            >>> ViewLoss.infonce(2.0, "both", decoupled=False).penalty.kind
            'softmax'
        """
        return cls(negatives, Lowered("softmax", 0.0, LOG2E * scale, scale), None, 0.0, 0.0, scale, decoupled)


class _Tile(NamedTuple):
    """Tile of a program: rows, columns, depth of a step, width of the gradient; warps and pipeline stages.

    A depth of 0 is the whole width: the rows are held for all columns.
    """

    rows: int
    columns: int
    depth: int
    width: int
    warps: int
    stages: int


def _tile(width: int, fast: bool) -> _Tile:
    if width <= 128:
        return _Tile(32, 64 if fast else 32, 0, 128, 4, 2)
    if fast:
        return _Tile(16, 32, 0, 512, 4, 2) if width <= 512 else _Tile(64, 64, 64, 256, 8, 3)
    return _Tile(32, 32, 32, 128, 4, 3)


@dataclass
class ViewLossState:
    """What the backward pass needs: unit rows, scratch memory, and the pairs' gradients in the unit rows of x and y."""

    units: Tensor
    scratch: Tensor
    by_pairs: tuple[Tensor, Tensor] | None = None


@dataclass
class ViewLossPlan:
    """The launches of a loss for one shape and type.

    Attributes:
        loss: what to compute.
        samples: N, at least 2.
        d: dimension of the embeddings.
        device: theirs.
        fast: round unit rows and slopes to bfloat16; otherwise float32 throughout.
        wanted: whether x and y need gradients.
    """

    loss: ViewLoss
    samples: int
    d: int
    device: torch.device
    fast: bool
    wanted: tuple[bool, bool]
    small: bool = field(init=False)

    def __post_init__(self) -> None:
        loss, n = self.loss, self.samples
        self.paired, self.two_sided = loss.negatives == "both", loss.negatives == "cross"
        self.softmax = loss.score is None
        self.n = 2 * n if self.paired else n  # rows of a side
        self.rows = n if loss.negatives == "anchor" else 2 * n
        self.width = -(-self.d // 16) * 16
        self.gradient = any(self.wanted) and (loss.negatives != "anchor" or self.wanted[0])
        self.sides = 2 if self.two_sided and self.wanted[1] else 1
        self.dtype = torch.bfloat16 if self.fast and not interpreting() else torch.float32
        self.small = self.n**2 * self.width <= _LARGEST_SMALL[self.fast]
        self._plan()

    def _plan(self) -> None:
        from fmicl.kernels import views_device as device
        from fmicl.kernels.triton import TritonBackend

        self.backend = TritonBackend(self.fast)
        loss, n, samples, width = self.loss, self.n, self.samples, self.width
        stride, shift = (2, 1) if self.paired else (1, samples)
        block = max(16, 1 << (width - 1).bit_length())
        by_row = {"BD": block, "num_warps": 1 if block <= 256 else 4}
        has_y = loss.negatives != "anchor"
        tile = _tile(width, self.fast)
        blocks = -(-n // tile.rows)
        parts = max(1, min(2 * multiprocessors(self.device) // blocks, -(-n // tile.columns), _MOST_PARTS))
        share = -(-n // (parts * tile.columns)) * tile.columns
        if self.softmax and not self.small:
            self.tiles = self.backend.logsumexp_tiles(n, n, width, self.device)
            parts = self.tiles.parts
        else:
            parts = -(-n // share) if self.small else 1
        self.parts = parts
        partial = parts * n if self.softmax else parts * blocks if self.small else 1  # results of the sums
        self.scratch_size = 3 * samples + partial
        lse_parts = 1 << (parts - 1).bit_length()
        softmax = {"PAIRED": self.paired, "DECOUPLED": loss.decoupled, "PARTS": lse_parts if self.softmax else 1}
        scale_log2 = LOG2E * loss.scale
        tiles = {
            "TWO_SIDED": self.two_sided, "PAIRED": self.paired, "HELD": tile.depth == 0, "BM": tile.rows,
            "BN": tile.columns, "BK": tile.depth or block, "PRECISE": not self.fast, "num_warps": tile.warps,
            "num_stages": tile.stages,
        }  # fmt: skip
        slab = min(tile.width, block)

        self._unit = CachedLaunch(device.unit_views, (samples, 1, 1), Y=has_y, **by_row)
        self._unit_numbers = (samples, self.d, width, stride, shift)

        anchors = n
        count = n * (n - (2 if self.paired else 1))
        penalty = loss.penalty
        both_orders = 1 if self.two_sided else 2
        if self.softmax:
            self.lowered = lower_softmax(loss.scale)._replace(slope=loss.scale / anchors)
        else:
            self.lowered = penalty._replace(gain=1.0, slope=both_orders * penalty.slope * loss.alpha / count)

        self._logsumexp = CachedLaunch(device.view_logsumexp, (blocks, parts, 1), **tiles)
        self._logsumexp_numbers = (n, samples, width, scale_log2, share)
        self._pairs = CachedLaunch(
            device.view_pairs, (blocks * self.sides, parts, -(-width // slab) if self.gradient else 1),
            KIND=penalty.kind, GRADIENT=self.gradient, DECOUPLED=loss.decoupled, PARTS=softmax["PARTS"], BD=slab,
            **tiles,
        )  # fmt: skip
        self._pairs_numbers = (
            n, samples, width, penalty.offset, penalty.scale, penalty.order, self.lowered.slope, share, parts,
        )  # fmt: skip

        self._normalisers = CachedLaunch(
            device.view_normalisers, (-(-n // 256), 1, 1), POWER=self.lowered.kind == "softmax", BLOCK=256, **softmax
        )  # fmt: skip
        self._normalisers_numbers = (n, samples, scale_log2, parts)

        score = loss.score or LoweredScore("softmax")
        if self.softmax:
            weight, constant, slope_weight, offset, scale = 1 / (LOG2E * anchors), 0.0, 0.0, 0.0, scale_log2
            slope_weight = loss.scale / (2 * anchors)
        else:
            weight = loss.alpha / count * penalty.gain
            constant = loss.alpha * penalty.constant - score.constant
            slope_weight = loss.scale / (2 * samples)
            offset, scale = loss.offset + loss.scale, loss.scale / 2
        self._loss = CachedLaunch(
            device.view_loss, (1, 1, 1), KIND=score.kind, BLOCK=1024, num_warps=8, **softmax
        )  # fmt: skip
        form = (score.linear, score.gain, score.power, parts)
        self._loss_numbers = (samples, n, partial, weight, constant, offset, scale, *form)
        x_wanted, y_wanted = self.wanted
        self._gradient = CachedLaunch(
            device.view_gradient, (samples, 1, 1), KIND=score.kind, Y=has_y and self.gradient, X_WANTED=x_wanted,
            Y_WANTED=y_wanted, **softmax, **by_row,
        )  # fmt: skip
        shares = parts if self.small else 1
        y_shift = shift if self.small or not self.two_sided else 0
        rows = self.sides * n
        self._gradient_numbers = (
            samples, n, self.d, width, stride, y_shift, rows, shares, slope_weight, offset, scale, *form,
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ViewLossState]:
        """The loss, a float32 scalar, and what `backward` needs."""
        units = torch.empty(self.rows, self.width, dtype=self.dtype, device=x.device)
        scratch = torch.empty(self.scratch_size, dtype=torch.float32, device=x.device)
        result = torch.empty((), dtype=torch.float32, device=x.device)
        state = ViewLossState(units, scratch)
        self._unit(x, y, units, scratch, *self._unit_numbers)
        if self.fast and self.dtype == torch.float32:  # the interpreter can't multiply bfloat16 matrices
            units.copy_(units.bfloat16())
        if self.softmax:
            if self.small:
                self._logsumexp(units, scratch, *self._logsumexp_numbers)
            else:
                self._large_logsumexp(state)
        elif self.small:
            self._small_pairs(state)
        else:
            self._large_pairs(state)
        self._loss(scratch, result, *self._loss_numbers)
        return result, state

    def backward(self, x: Tensor, y: Tensor, state: ViewLossState, upstream: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients in x and y, times the upstream scalar; only those wanted are meaningful."""
        if self.softmax and state.by_pairs is None:
            if self.small:
                self._small_pairs(state)
            else:
                self._large_softmax(state)
        x_wanted, y_wanted = self.wanted
        x_gradient = torch.empty_like(x) if x_wanted else x
        y_gradient = torch.empty_like(y) if y_wanted else y
        x_by_pairs, y_by_pairs = state.by_pairs or (state.scratch, state.scratch)
        self._gradient(
            x, y, state.scratch, x_by_pairs, y_by_pairs, upstream, x_gradient, y_gradient, *self._gradient_numbers
        )
        return x_gradient, y_gradient

    def _small_pairs(self, state: ViewLossState) -> None:
        gradient = state.scratch
        if self.gradient:
            shape = (self.parts, self.sides * self.n, self.width)
            gradient = torch.empty(shape, dtype=torch.float32, device=state.units.device)
            state.by_pairs = (gradient, gradient)
        self._pairs(state.units, state.scratch, gradient, *self._pairs_numbers)

    def _large_pairs(self, state: ViewLossState) -> None:
        backend, units, f32 = self.backend, state.units, torch.float32
        if not self.two_sided:
            total, gradient = backend.lowered_pairs(
                units, None, self.lowered, 0, self.gradient, paired=self.paired, dtype=f32
            )
            state.by_pairs = None if gradient is None else (gradient, gradient)
        else:
            x, y = units[: self.n], units[self.n :]
            if self.sides == 2 and backend.shares_slopes(x):
                total, *gradients = backend.lowered_both(x, y, self.lowered, 0, None)
                state.by_pairs = (gradients[0], gradients[1])
            else:
                total, x_gradient = backend.lowered_pairs(x, y, self.lowered, 0, self.gradient, dtype=f32)
                y_gradient = x_gradient
                if self.sides == 2:
                    _, y_gradient = backend.lowered_pairs(y, x, self.lowered, 0, True, dtype=f32)
                if x_gradient is not None and y_gradient is not None:
                    state.by_pairs = (x_gradient, y_gradient)
        state.scratch[3 * self.samples :].copy_(total)

    def _large_logsumexp(self, state: ViewLossState) -> None:
        units = state.units
        x, other = (units[: self.n], units[self.n :]) if self.two_sided else (units, units)
        parts = state.scratch[3 * self.samples :]
        self.backend.write_logsumexp(x, other, LOG2E * self.loss.scale, 0, self.paired, self.tiles, parts, 1.0)

    def _large_softmax(self, state: ViewLossState) -> None:
        from fmicl.kernels.triton import LoweredNormaliser

        backend, units = self.backend, state.units
        found = torch.empty(self.n, dtype=torch.float32, device=units.device)
        self._normalisers(state.scratch, found, *self._normalisers_numbers)
        anchors, f32 = LoweredNormaliser(found), torch.float32
        if not self.two_sided:
            _, gradient = backend.lowered_pairs(
                units, None, self.lowered, 0, True, anchors, anchors, self.paired, dtype=f32
            )
            assert gradient is not None
            state.by_pairs = (gradient, gradient)
            return
        x, y = units[: self.n], units[self.n :]
        if self.sides == 2 and backend.shares_slopes(x):
            _, *gradients = backend.lowered_both(x, y, self.lowered, 0, anchors)
            state.by_pairs = (gradients[0], gradients[1])
            return
        _, x_gradient = backend.lowered_pairs(x, y, self.lowered, 0, True, anchors, dtype=f32)
        y_gradient = x_gradient
        if self.sides == 2:
            _, y_gradient = backend.lowered_pairs(y, x, self.lowered, 0, True, None, anchors, dtype=f32)
        assert x_gradient is not None
        assert y_gradient is not None
        state.by_pairs = (x_gradient, y_gradient)
