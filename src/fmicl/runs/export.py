"""Export of trained encoders as safetensors, and loading them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fmicl.config import Settings
from fmicl.models.vision import build_encoder
from fmicl.models.weights import load_weights, read_weights
from fmicl.runs.folder import Run, open_run
from fmicl.runs.settings import read_settings, require_task
from fmicl.utils.files import read_json, write_atomically, write_json


@dataclass(frozen=True)
class EncoderConfig:
    """Contents of encoder.json: how to build the encoder, and the size and normalisation of its images."""

    encoder: str
    size: int
    channels: int
    features: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    arguments: dict[str, Any]

    @classmethod
    def of(cls, settings: Settings, features: int) -> EncoderConfig:
        """The config of the settings' encoder."""
        arguments = {"stem": settings.stem, "depth": settings.depth, "stable_vit": settings.stable_vit}
        channels = len(settings.mean)
        return cls(settings.encoder, settings.size, channels, features, settings.mean, settings.std, arguments)

    @classmethod
    def read(cls, run: Run) -> EncoderConfig:
        """Read it from a run folder.

        Raises:
            FileNotFoundError: the run has no encoder yet.
            ValueError: the file is damaged.
        """
        if not run.encoder_config.exists():
            raise FileNotFoundError(
                f"{run.path} has no {run.encoder_config.name}: its training has not ended; continue it with --resume"
            )
        values = read_json(run.encoder_config)
        try:
            return cls(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{run.encoder_config} is damaged, or of another version of fmicl: {error}") from error

    def build(self) -> nn.Module:
        """An untrained encoder of this config."""
        return build_encoder(self.encoder, size=self.size, channels=self.channels, **self.arguments)


def export(run: Run, encoder: nn.Module, projection: nn.Module, config: EncoderConfig) -> None:
    """Write encoder and projection head as safetensors, with encoder.json beside them."""
    write_atomically(run.encoder, lambda path: save_file(contiguous_state_dict(encoder), path))
    write_atomically(run.projection, lambda path: save_file(contiguous_state_dict(projection), path))
    write_json(run.encoder_config, asdict(config))


def contiguous_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state dict as safetensors requires it: on the CPU, contiguous (not channels_last), without shared memory."""
    contiguous = torch.contiguous_format
    return {name: tensor.detach().cpu().clone(memory_format=contiguous) for name, tensor in module.state_dict().items()}


def load_encoder(run: Path | str) -> nn.Module:
    """Load the trained encoder of an image run, in eval mode on the CPU, without pickle.

    Args:
        run: a run folder.

    Returns:
        A module that maps images (N, channels, size, size), normalised by mean and std of RUN/encoder.json, to
        features (N, num_features).

    Raises:
        FileNotFoundError: there is no such run, or its training has not ended.
        ValueError: the weights don't match the config, or it is a text run.
    """
    folder = open_run(run)
    require_task(folder, "images")
    config = EncoderConfig.read(folder)
    if not folder.encoder.exists():
        raise FileNotFoundError(f"{folder.encoder} is missing: copy the whole run folder")
    encoder = config.build()
    load_weights(encoder, read_weights(folder.encoder), folder.encoder, config.encoder)
    return encoder.eval()


def load_projection(run: Run, *, trained: bool = True) -> nn.Module:
    """The projection head of an image run, in eval mode on the CPU; if not trained, with random weights.

    Raises:
        FileNotFoundError: the training has not ended.
        ValueError: the weights don't match the settings.
    """
    settings = read_settings(run, "images")
    if not run.projection.exists():
        raise FileNotFoundError(f"{run.projection} is missing: the training of {run.path} has not ended")
    features = EncoderConfig.read(run).features
    head = settings.method_options.method.projection_head(features, settings.hidden, settings.dim)
    if trained:
        load_weights(head, read_weights(run.projection), run.projection, "the projection head of settings.json")
    return head.eval()
