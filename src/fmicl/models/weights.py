"""Loading weights from safetensors files, with errors that say what is wrong in a line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["load_weights", "read_weights"]


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): copy it again from where it was complete") from error


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], source: object, target: str) -> None:
    """Load weights into a module, all of them.

    Args:
        module: where they go.
        weights: by name.
        source: where they come from, for the message.
        target: what the module is, for the message.

    Raises:
        ValueError: names or shapes differ; the message has the number of each and an example.

    Example:
        >>> load_weights(nn.Linear(2, 3), {"weight": nn.Linear(2, 4).weight}, "x.safetensors", "the head")
        Traceback (most recent call last):
        ...
        ValueError: x.safetensors doesn't have the weights of the head: 1 missing (bias); 1 of another shape \
(weight: (4, 2), not (3, 2))
    """
    own = module.state_dict()
    shapes = [
        f"{name}: {tuple(weights[name].shape)}, not {tuple(value.shape)}"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    wrong = {
        "missing": [name for name in own if name not in weights],
        "unknown": [name for name in weights if name not in own],
        "of another shape": shapes,
    }
    if any(wrong.values()):
        differences = "; ".join(f"{len(names)} {kind} ({_first(names)})" for kind, names in wrong.items() if names)
        raise ValueError(f"{source} doesn't have the weights of {target}: {differences}")
    module.load_state_dict(weights)


def _first(names: Collection[str]) -> str:
    return f"{next(iter(names))}{', ...' if len(names) > 1 else ''}"
