"""Safetensors weights: reading files and loading them into modules, with errors of one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

NAMED = 3
"""Weights of each kind that a message names."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or no safetensors file.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged, or no safetensors file ({error}): copy it again from where it was complete"
        ) from error


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], source: object, target: str) -> None:
    """Load weights into a module, all of them.

    Args:
        module: where they go.
        weights: by name.
        source: where they come from, for the message.
        target: what the module is, for the message.

    Raises:
        ValueError: names or shapes differ.

    Example:
        >>> load_weights(nn.Linear(2, 3), {"weight": nn.Linear(2, 4).weight}, "x.safetensors", "the head")
        Traceback (most recent call last):
        ...
        ValueError: x.safetensors doesn't have the weights of the head: bias is missing; weight has shape (4, 2), ...
    """
    wrong = describe_mismatch(module.state_dict(), weights)
    if wrong:
        raise ValueError(f"{source} doesn't have the weights of {target}: {wrong}")
    module.load_state_dict(weights, strict=False)  # without the counters of batch normalisation, as in older files


def describe_mismatch(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """How weights differ from those of a module in names and shapes, at most three of each; "" if they don't.

    Example:
        >>> import torch
        >>> wanted, found = nn.Linear(2, 3).state_dict(), {"weight": torch.zeros(3, 3), "scale": torch.zeros(3)}
        >>> describe_mismatch(wanted, found)
        'bias is missing; scale is unknown; weight has shape (3, 3), not (3, 2)'
    """
    missing = [f"{name} is missing" for name in wanted if name not in state and "num_batches_tracked" not in name]
    unknown = [f"{name} is unknown" for name in state if name not in wanted]
    shapes = [
        f"{name} has shape {tuple(x.shape)}, not {tuple(wanted[name].shape)}"
        for name, x in state.items()
        if name in wanted and x.shape != wanted[name].shape
    ]
    parts = []
    for found in (missing, unknown, shapes):
        more = f"; and {len(found) - NAMED} more like it" if len(found) > NAMED else ""
        parts += ["; ".join(found[:NAMED]) + more] if found else []
    return "; ".join(parts)
