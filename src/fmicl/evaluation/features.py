"""Feature extraction: frozen encoder outputs for whole datasets, and the batch size to compute them with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fmicl.models.norms import evaluation_mode

EVALUATION_BATCH = 512
"""Images per batch, unless they are large or a GPU takes more."""
CPU_PIXELS = 2**19
"""Pixels per batch on a CPU, at most: as many as 512 CIFAR-10 images, so that evaluation needs no more memory than
training."""
GPU_SMALL_PIXELS = 2**21
"""Pixels up to which a GPU batch may grow to the size of a training step: kernel launches dominate below it."""
GPU_LARGE_PIXELS = 2**23
"""Pixels per batch of large images on a GPU; more if a training step has more."""


def evaluation_batch_size(size: int, device: torch.device, training_views: int = 0) -> int:
    """Images per forward pass without gradients.

    Args:
        size: side of the images in pixels.
        device: where the encoder runs.
        training_views: views per training step, 0 without training; a GPU holds that many in evaluation, too.

    Example:
        >>> [evaluation_batch_size(size, torch.device("cpu")) for size in (32, 224)]
        [512, 10]
        >>> [evaluation_batch_size(size, torch.device("cuda")) for size in (32, 224)]
        [512, 167]
    """
    if device.type == "cuda":
        small = max(EVALUATION_BATCH, min(GPU_SMALL_PIXELS // size**2, training_views))
        return max(1, min(small, max(GPU_LARGE_PIXELS // size**2, training_views)))
    return max(1, min(EVALUATION_BATCH, CPU_PIXELS // size**2))


@torch.no_grad()
def extract_features(
    encoder: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor | None]],
    device: torch.device | str,
    into: torch.device | str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Features of all batches in float32, in order, and their labels if they have any.

    The encoder runs in evaluation mode; afterwards every module is back in the mode that it was in, also on an error.

    Args:
        encoder: maps a batch (B, ...) to features (B, d).
        batches: pairs of inputs and labels (or None), on any device.
        device: the encoder's device.
        into: device of the result; None means the encoder's.

    Returns:
        Features (N, d), and labels (N,) or None.

    Raises:
        ValueError: there are no batches, only some have labels, or the encoder's output is not (B, d).

    Example:
        >>> images, labels = torch.ones(3, 1, 2, 2), torch.tensor([0, 1, 1])
        >>> features, kept = extract_features(nn.Flatten(), [(images, labels)], "cpu")
        >>> features.shape, kept.tolist()
        (torch.Size([3, 4]), [0, 1, 1])
    """
    target = device if into is None else into
    features: list[Tensor] = []
    labels: list[Tensor] = []
    # A compiled encoder runs eagerly here: it would be compiled again for the other batch sizes of evaluation.
    run = encoder if encoder._compiled_call_impl is None else encoder.forward
    with evaluation_mode(encoder):
        for inputs, label in batches:
            output = run(inputs.to(device, non_blocking=True))
            if output.ndim != 2:
                raise ValueError(f"the encoder must return (batch, d) features, got {tuple(output.shape)}: pool them")
            features.append(output.detach().to(target, torch.float32))
            if label is not None:
                labels.append(label.to(target))
    if not features:
        raise ValueError("there are no batches to extract features from")
    if labels and len(labels) < len(features):
        raise ValueError(f"{len(features) - len(labels)} of {len(features)} batches have no labels, the others do")
    return torch.cat(features), torch.cat(labels) if labels else None
