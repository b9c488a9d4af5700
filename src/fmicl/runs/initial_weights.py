"""Pretrained weights that an image encoder starts from (`--weights`): timm's, of a run, or of a safetensors file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmicl.config import Settings
from fmicl.models.weights import describe_mismatch, read_weights
from fmicl.runs.export import EncoderConfig
from fmicl.runs.folder import open_run

TIMM = "timm"
"""The value of `--weights` for those that timm has."""
ENCODER_ARGUMENTS = ("stem", "depth", "stable_vit")
"""Options that say how an encoder is built, beside its name."""
NAMED = 3
"""Names of a mismatch that an error lists."""


def check_weights(settings: Settings) -> None:
    """Refuse weights that can't be found, before anything is loaded.

    Raises:
        FileNotFoundError: there is no such run or file.
        ValueError: timm has no weights for the encoder, or the encoder of a file is not named.
    """
    if settings.weights is None:
        return
    if settings.weights == TIMM:
        if settings.encoder != "auto":
            _timm_config(settings.encoder)
        return
    path = Path(settings.weights).expanduser()
    if path.is_dir():
        run = open_run(path)
        if not run.encoder.exists():
            raise FileNotFoundError(f"{path} has no {run.encoder.name}: its training has not ended, or it is on text")
    elif not path.is_file():
        raise FileNotFoundError(
            f"there are no weights {path}: --weights is timm, a run folder or a safetensors file with timm's names"
        )
    elif settings.encoder == "auto":
        raise ValueError(f"{path} doesn't say which encoder its weights are of: name it with --encoder")


def preprocessing_of(weights: str | None, encoder: str | None) -> dict[str, Any]:
    """Options that follow from weights: size, mean and std of timm's config; of a run those and its encoder.

    A file says nothing about them.

    Args:
        weights: the option.
        encoder: the encoder that timm's weights are of.
    """
    if weights == TIMM and encoder is not None:
        config = _timm_config(encoder)
        return {"size": config.input_size[-1], "mean": tuple(config.mean), "std": tuple(config.std)}
    if weights is None or weights == TIMM or not Path(weights).expanduser().is_dir():
        return {}
    saved = EncoderConfig.read(open_run(Path(weights).expanduser()))
    return {"encoder": saved.encoder, "size": saved.size, "mean": saved.mean, "std": saved.std, **saved.arguments}


def load_initial_weights(encoder: nn.Module, settings: Settings) -> None:
    """Load the weights that the settings name into an encoder; nothing if they name none.

    Raises:
        ValueError: the weights are of another encoder, or can't be read.
        ConnectionError: timm can't download them.
    """
    if settings.weights is None:
        return
    if settings.weights == TIMM:
        state = _timm_state(settings)
        source = f"timm's weights of {settings.encoder}"
    else:
        path = Path(settings.weights).expanduser()
        file = open_run(path).encoder if path.is_dir() else path
        state = read_weights(file)
        source = str(file)
    wanted = encoder.state_dict()
    classifier = _classifier(encoder)
    state = {name: x for name, x in state.items() if name in wanted or not name.startswith(classifier)}
    wrong = describe_mismatch(wanted, state)
    if wrong:
        raise ValueError(f"{source} are not weights of {settings.encoder} as it is built here: {wrong}")
    encoder.load_state_dict(state, strict=False)  # without the counters of batch normalisation, as in older files


def _classifier(encoder: nn.Module) -> tuple[str, ...]:
    """Prefixes of the classifier's weights, which an encoder doesn't have."""
    config = getattr(encoder, "pretrained_cfg", None) or {}
    names = config.get("classifier") or ()
    return tuple(f"{name}." for name in ([names] if isinstance(names, str) else names))


def _timm_config(encoder: str) -> Any:
    import timm

    config = timm.get_pretrained_cfg(encoder) if timm.is_model(encoder) else None
    if config is None or not config.has_weights:
        near = [name for name in timm.list_models(pretrained=True) if name.startswith(encoder.split(".")[0][:6])]
        some = f", such as {', '.join(near[:NAMED])}" if near else ""
        raise ValueError(
            f"timm has no weights for {encoder}: take an encoder of timm.list_models(pretrained=True){some}"
        )
    return config


def _timm_state(settings: Settings) -> dict[str, Tensor]:
    import timm

    arguments: dict[str, Any] = {"pretrained": True, "num_classes": 0, "in_chans": len(settings.mean)}
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)  # it announces every retry
    with torch.random.fork_rng(devices=[]):  # the weights of later modules don't depend on it
        try:
            try:
                model = timm.create_model(settings.encoder, img_size=settings.size, **arguments)
            except TypeError:
                model = timm.create_model(settings.encoder, **arguments)
        except Exception as error:  # the hub raises any type
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConnectionError(
                f"timm can't download its weights of {settings.encoder} ({reason[:200]}). Without a network, pass a "
                "safetensors file: --weights FILE"
            ) from error
        finally:
            hub.setLevel(level)
    state: dict[str, Tensor] = model.state_dict()
    return state
