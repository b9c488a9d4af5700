"""Builders of data, encoder and method from image settings."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from fmicl.config import Settings
from fmicl.data import Splits, dataset_info, load_images, summarise_skipped
from fmicl.data.augmentations.views import LocalCropOptions
from fmicl.methods import Method, Rotation
from fmicl.methods.rotation import RotationOptions
from fmicl.models.vision import build_encoder, check_input_size, feature_map_width, freeze_blocks
from fmicl.runs.folder import exclude_runs
from fmicl.runs.initial_weights import load_initial_weights


def build_image_encoder(settings: Settings, *, load: bool = True) -> nn.Module:
    """The encoder that training starts with: random weights follow from torch's seed.

    Args:
        settings: all options.
        load: load trained weights, where the settings name some.

    Raises:
        ValueError: an unknown encoder, one that can't take the images, or trained weights that aren't of it.
    """
    plain, _, tag = settings.encoder.partition(".")
    if tag and settings.weights is None:
        raise ValueError(
            f"encoder {settings.encoder} names trained weights ({tag}), but training starts from random ones: "
            f"take --encoder {plain}, or --weights timm for these"
        )
    size, channels = settings.size, len(settings.mean)
    encoder = build_encoder(
        settings.encoder,
        size=size,
        channels=channels,
        stem=settings.stem,
        depth=settings.depth,
        stable_vit=settings.stable_vit,
    )
    smaller = settings.method_options.input_sizes(size)
    if settings.rotation_weight:
        what = f"rotated images (--rotation-weight): take --rotation-size {size}"
        smaller[what] = settings[RotationOptions].size(size)
    if settings.local_crops:
        what = f"local crops (--local-crops): take --local-size {size}"
        smaller[what] = settings[LocalCropOptions].size(size)
    for what, side in smaller.items():
        try:
            check_input_size(encoder, settings.encoder, side, channels)
        except ValueError as error:
            raise ValueError(f"{str(error).removesuffix('.')}; these are the {what}") from error
    if settings.method_options.feature_maps:
        feature_map_width(encoder, size, channels)
    if load:
        load_initial_weights(encoder, settings)
    if settings.freeze and settings.weights is not None:
        freeze_blocks(encoder, settings.freeze)
    return encoder


def build_image_method(settings: Settings, encoder: nn.Module, classes: int = 0) -> Method:
    """The method of the settings around an encoder, for data of so many classes."""
    context = settings.objective_context(settings.dim, classes)
    objective = settings.objective_options.build(context)
    heads = {"dim": settings.dim, "hidden": settings.hidden}
    if settings.method_options.feature_maps:
        heads["local_width"] = feature_map_width(encoder, settings.size, len(settings.mean))
    method = settings.method_options.build(encoder, objective, **heads)
    if settings.rotation_weight:
        features = int(encoder.num_features)  # type: ignore[arg-type]
        method.rotation = Rotation(
            features,
            settings.objective_options.information_divergence(context).frozen(),
            weight=settings.rotation_weight,
            size=settings[RotationOptions].size(settings.size),
            hidden=settings.hidden,
        )
    return method.train()  # which leaves frozen batch normalisation out


def load_splits(settings: Settings, say: Callable[[str], None] = lambda _: None) -> Splits:
    """The data; ``say`` prints which images and folders are left out, and that data_dir has no effect."""
    if settings.data_dir is not None and not dataset_info(settings.dataset).needs_folder:
        say(f"warning: data_dir ({settings.data_dir}) has no effect: {settings.dataset} needs no files")
    kind = dataset_info(settings.dataset).options
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*and are skipped")  # they are reported below
        splits = load_images(
            settings.dataset,
            settings.data_dir,
            size=settings.size,
            download=settings.download,
            validation=settings.validation,
            seed=settings.seed,
            memory_limit=round(settings.memory_gib * 2**30),
            cache_limit=round(settings.cache_gib * 2**30),
            cache=settings.cache_dir,
            checksum=settings.checksum,
            exclude=exclude_runs,
            options=None if kind is None else settings[kind],
        )
    if splits.skipped:
        left_out = summarise_skipped(splits.skipped)
        say(f"warning: {len(splits.skipped)} image(s) can't be read and are left out: {left_out}")
    if splits.left_out:
        say(f"warning: folders in {settings.data_dir} are left out: {summarise_skipped(splits.left_out)}")
    return splits
