"""What the settings of a recipe mean: its encoder, its method around it, the optimiser and the schedule."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from fmicl.config.recipes import Recipe
from fmicl.config.settings import Settings
from fmicl.divergences import Divergence, divergence
from fmicl.methods import Method, MoCo, Optimisation, Rotation, method_class
from fmicl.methods.rotation import finite_at_zero
from fmicl.models.vision import build_encoder, check_input_size
from fmicl.training.objectives import build_divergence, build_objective

__all__ = ["build_method", "build_recipe_encoder", "method_options", "optimisation_of", "rotation_divergence"]


def build_recipe_encoder(recipe: Recipe) -> nn.Module:
    """The untrained encoder of a recipe; its weights follow from torch's seed.

    Raises:
        ValueError: there is no such encoder, it can't take the images, or its name is that of trained weights.
    """
    plain, _, tag = recipe.encoder.partition(".")
    if tag:
        raise ValueError(
            f"encoder {recipe.encoder} names trained weights ({tag}), but training starts from random ones: "
            f"take --encoder {plain}"
        )
    size, channels = recipe.views.size, len(recipe.views.mean)
    encoder = build_encoder(
        recipe.encoder,
        size=size,
        channels=channels,
        stem=recipe.stem,
        depth=recipe.depth,
        stable_vit=recipe.stable_vit,
    )
    if recipe.rotation_weight:
        try:
            check_input_size(encoder, recipe.encoder, recipe.turned_size, channels)
        except ValueError as error:
            raise ValueError(
                f"{str(error).removesuffix('.')}; these are the images that are turned (--rotation-weight): take "
                f"--rotation-size {size}"
            ) from error
    return encoder


def build_method(recipe: Recipe, encoder: nn.Module, batches_per_epoch: int) -> Method:
    """The method of a recipe around an encoder, with the schedule for this many batches an epoch."""
    options: dict[str, Any] = method_options(recipe) | {"dim": recipe.dim, "hidden": recipe.hidden}
    kind = method_class(recipe.method)
    method = kind(encoder, build_objective(recipe), optimisation_of(recipe, batches_per_epoch), **options)
    asked = rotation_divergence(recipe)
    if asked is not None:
        features = int(encoder.num_features)  # type: ignore[arg-type]
        method.rotation = Rotation(
            features, asked, weight=recipe.rotation_weight, size=recipe.turned_size, hidden=recipe.hidden
        )
    return method


def rotation_divergence(recipe: Settings) -> Divergence | None:
    """By which the information of turned images is asked for; None where it isn't.

    Raises:
        ValueError: the recipe's won't do.
    """
    if not getattr(recipe, "rotation_weight", 0.0):
        return None
    return finite_at_zero(build_divergence(recipe)) if recipe.objective == "fmicl" else divergence("kl")


def optimisation_of(recipe: Settings, batches_per_epoch: int) -> Optimisation:
    """Optimiser and schedule of a recipe, for this many batches an epoch."""
    batches = recipe.epochs * batches_per_epoch
    steps = math.ceil(batches / recipe.accumulate)
    warmup = min(recipe.warmup_epochs, recipe.epochs / 5) / recipe.epochs
    return Optimisation(
        optimizer=recipe.optimizer,
        learning_rate=recipe.peak_learning_rate,
        weight_decay=recipe.weight_decay,
        warmup_steps=round(warmup * steps),
        total_steps=steps,
        accumulate=recipe.accumulate,
        seed=recipe.seed,
        schedule=recipe.schedule,
        total_batches=batches,
    )


def method_options(recipe: Settings) -> dict[str, Any]:
    """What a recipe's method takes beside encoder, objective and optimisation: momentum, queue and the like."""
    options: dict[str, Any] = {}
    if recipe.method != "simclr":
        options |= {"momentum": recipe.encoder_momentum, "statistics": recipe.statistics}
        if recipe.encoder_momentum_end is not None:
            options["final_momentum"] = recipe.encoder_momentum_end
    if method_class(recipe.method) is MoCo:
        options |= {"queue": recipe.queue, "symmetric": recipe.symmetric}
    return options
