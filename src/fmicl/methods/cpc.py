"""CPC: a context predicts the parts of a view that follow (van den Oord, Li and Vinyals, 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fmicl.methods.base import Comparison, Method
from fmicl.methods.critics import CriticLoss, CriticOptions
from fmicl.methods.registry import register_method
from fmicl.utils.options import option


def patches(images: Tensor, side: int) -> Tensor:
    """Square images cut into side x side patches that overlap by half, as sequences from top to bottom.

    Args:
        images: (N, C, S, S).
        side: patches a side; a patch has 2 S / (side + 1) pixels a side, rounded down to an even number.

    Returns:
        (N, columns, rows, C, P, P).

    Example:
        >>> patches(torch.zeros(2, 3, 32, 32), 3).shape
        torch.Size([2, 3, 3, 3, 16, 16])
    """
    size = patch_size(images.shape[-1], side)
    cut = images.unfold(2, size, size // 2).unfold(3, size, size // 2)[:, :, :side, :side]
    return cut.permute(0, 3, 2, 1, 4, 5)


def patch_size(side: int, parts: int) -> int:
    """Side of a patch in pixels.

    Raises:
        ValueError: the images are too small for so many.

    Example:
        >>> patch_size(256, 7), patch_size(32, 3)
        (64, 16)
    """
    size = 2 * (side // (parts + 1))
    if size < 2:
        raise ValueError(f"images of {side} pixels have no {parts} patches a side: take fewer --parts")
    return size


def token_runs(ids: Tensor, number: int) -> Tensor:
    """Token ids (N, L), padded with -1, cut into runs of equal length: (N, 1, number, ceil(L / number)).

    Example:
        >>> token_runs(torch.tensor([[5, 6, 7, -1]]), 3)
        tensor([[[[ 5,  6],
                  [ 7, -1],
                  [-1, -1]]]])
    """
    length = -(-ids.shape[1] // number)
    padded = torch.nn.functional.pad(ids, (0, number * length - ids.shape[1]), value=-1)
    return padded.view(len(ids), 1, number, length)


class CPC(Method):
    r"""A context network predicts the embeddings of later parts of a view, several steps ahead.

    A view is cut into parts, each of which goes through encoder and head alone: z_t. Images are patches in columns from
    top to bottom, sentences runs of tokens. A GRU makes the context c_t of z_1, ..., z_t, and the critic of step k is
    log-bilinear, T_k(c_t, z_{t+k}) = z_{t+k} . W_k c_t / sqrt(d). Negatives are the parts at the same place in other
    samples of the batch. After van den Oord, Li and Vinyals, "Representation Learning with Contrastive Predictive
    Coding", 2018, whose negatives also are parts at other places, and whose context on images is a PixelCNN. The two
    views of a sample are sequences of their own, and the loss is the mean over both.

    Args:
        encoder: as in :class:`Method`, and so are the other arguments.
        objective: a :class:`CriticLoss`; None for InfoNCE.
        parts: patches a side, or runs of tokens.
        steps: how far ahead is predicted, less than the parts.

    Example:
        >>> from fmicl.models.vision import SmallConv
        >>> method = CPC(SmallConv(), dim=8, hidden=16, parts=3, steps=2)
        >>> method.loss(torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)).loss.shape
        torch.Size([])
    """

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module | None = None,
        *,
        dim: int = 512,
        parts: int = 3,
        steps: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(encoder, CriticLoss(None) if objective is None else objective, dim=dim, **options)
        if not 1 <= steps < parts:
            raise ValueError(f"steps must be at least 1 and less than parts ({parts}), got steps={steps}")
        self.parts, self.steps = parts, steps
        self.context = nn.GRUCell(dim, dim)
        self.predictors = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(steps))

    def compare_views(self, first: Tensor, second: Tensor, local: Tensor | None = None) -> Comparison:
        """The mean loss over steps and both views."""
        del local
        views = torch.cat([first, second])
        parts = token_runs(views, self.parts) if views.ndim == 2 else patches(views, self.parts)
        present = (parts >= 0).any(dim=-1) if views.ndim == 2 else None  # (2N, 1, S)
        if present is not None:  # an encoder needs a token
            parts = torch.where(present.unsqueeze(-1), parts, parts[:, :, :1])
        z = self.embed(parts.flatten(0, 2).contiguous()).unflatten(0, parts.shape[:3])  # (2N, columns, rows, d)
        contexts = self._contexts(z)
        losses, pairs = [], []
        for step, predict in enumerate(self.predictors, 1):
            x, y = predict(contexts[:, :, : self.parts - step]).flatten(1, 2), z[:, :, step:].flatten(1, 2)
            there = None if present is None else present[:, :, step:].flatten(1, 2)
            n = len(first)
            for rows in (slice(n), slice(n, None)):
                known = {} if there is None else {"present": there[rows]}
                losses.append(self.objective(x[rows], y[rows], **known))
                pairs.append((x[rows].flatten(0, 1), y[rows].flatten(0, 1)))
        return Comparison(torch.stack(losses).mean(), *(each.detach() for each in pairs[0]))

    def _contexts(self, z: Tensor) -> Tensor:
        n, columns, rows, dim = z.shape
        state = z.new_zeros(n * columns, dim)
        states = []
        for row in range(rows - 1):  # nothing follows the last one
            state = self.context(z[:, :, row].reshape(-1, dim), state)
            states.append(state)
        contexts: Tensor = torch.stack(states, dim=1).unflatten(0, (n, columns))
        return contexts


@register_method("cpc", summary="A context predicts later parts of a view: patches of an image, tokens of a sentence.")
@dataclass(frozen=True)
class CPCOptions(CriticOptions):
    """Options of CPC."""

    method: ClassVar[type[Method]] = CPC

    parts: int = option(3, "Patches a side, each overlapping the next by half, or runs of tokens of a sentence.")
    prediction_steps: int = option(2, "How many parts ahead cpc predicts, less than --parts.", above=0)

    def __post_init__(self) -> None:
        """Refuse more steps than there are."""
        super().__post_init__()
        if self.prediction_steps >= self.parts:
            raise ValueError(
                f"prediction_steps must be less than parts ({self.parts}), but it is {self.prediction_steps}"
            )

    def arguments(self) -> dict[str, Any]:
        """Parts and steps."""
        return {"parts": self.parts, "steps": self.prediction_steps}

    def input_sizes(self, size: int) -> dict[str, int]:
        """The encoder sees patches."""
        return {"patches (fewer --parts make them larger)": patch_size(size, self.parts)}
