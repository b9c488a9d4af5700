"""The encoder that a run leaves: written once, read back without pickle."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fmicl.utils.files import write_atomically
from fmicl.models.vision import build_encoder, projection_head
from fmicl.config.recipes import Recipe
from fmicl.runs.folder import Run, open_run, read_kind, read_recipe
from fmicl.utils.files import read_json, write_json
from fmicl.config.text_recipes import TextRecipe

__all__ = ["EncoderConfig", "export", "load_encoder", "load_projection"]


@dataclass(frozen=True)
class EncoderConfig:
    """What encoder.json holds: how to build the encoder, and what its images must look like."""

    encoder: str
    size: int
    channels: int
    features: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    arguments: dict[str, Any]

    @classmethod
    def of(cls, recipe: Recipe, features: int) -> EncoderConfig:
        """The config of a recipe's encoder."""
        views = recipe.views
        arguments = {"stem": recipe.stem, "depth": recipe.depth, "stable_vit": recipe.stable_vit}
        return cls(recipe.encoder, views.size, len(views.mean), features, views.mean, views.std, arguments)

    @classmethod
    def read(cls, run: Run) -> EncoderConfig:
        """From a run folder.

        Raises:
            FileNotFoundError: the run has no encoder yet.
        """
        if not run.encoder_config.exists():
            raise FileNotFoundError(
                f"{run.path} has no encoder.json yet: its training has not ended; go on with `fmicl train ... --resume`"
            )
        values = read_json(run.encoder_config)
        return cls(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})

    def build(self) -> nn.Module:
        """An untrained encoder of this config."""
        return build_encoder(self.encoder, size=self.size, channels=self.channels, **self.arguments)


def export(run: Run, encoder: nn.Module, projection: nn.Module, config: EncoderConfig) -> None:
    """Write encoder and projection head as safetensors, with encoder.json beside them."""
    write_atomically(run.encoder, lambda path: save_file(plain_weights(encoder), path))
    write_atomically(run.projection, lambda path: save_file(plain_weights(projection), path))
    write_json(run.encoder_config, asdict(config))


def plain_weights(module: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers as safetensors takes them.

    Each is dense in the order of its dimensions, which channels_last ones are not, and in memory of its own on the CPU,
    which a weight that two layers share is not: it is there twice.
    """
    plain = torch.contiguous_format
    return {name: tensor.detach().cpu().clone(memory_format=plain) for name, tensor in module.state_dict().items()}


def load_encoder(run: Path | str) -> nn.Module:
    """The trained encoder of a run, in eval mode on the CPU; no pickle is read.

    Args:
        run: a run folder.

    Returns:
        A module that maps images (N, channels, size, size), normalised by mean and std of RUN/encoder.json, to
        features (N, num_features).

    Raises:
        FileNotFoundError: no such run, or it has not ended.
        ValueError: the weights don't fit the config, or the run is one on sentences.
    """
    folder = open_run(run)
    if read_kind(folder) == TextRecipe.kind:
        raise ValueError(f"{folder.path} is a run on text: sentence_transformers.SentenceTransformer(RUN) loads it")
    config = EncoderConfig.read(folder)
    if not folder.encoder.exists():
        raise FileNotFoundError(f"{folder.encoder} is missing beside encoder.json: copy the whole run folder")
    encoder = config.build()
    try:
        encoder.load_state_dict(load_file(folder.encoder))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{folder.encoder} does not hold the weights of {config.encoder}: {error}") from error
    return encoder.eval()


def load_projection(run: Run) -> nn.Module:
    """The projection head of a run, in eval mode on the CPU.

    Raises:
        FileNotFoundError: the run has none (yet).
    """
    from fmicl.methods import method_class  # brings Lightning, which whoever loads an encoder needn't wait for

    _, recipe = read_recipe(run)
    if not run.projection.exists():
        raise FileNotFoundError(f"{run.projection} is missing: the training of {run.path} has not ended")
    features = EncoderConfig.read(run).features
    last_norm = method_class(recipe.method).last_norm
    head = projection_head(features, recipe.hidden, recipe.dim, last_norm=last_norm)
    head.load_state_dict(load_file(run.projection))
    return head.eval()
