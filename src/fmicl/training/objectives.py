"""The objective that settings ask for, and what is known of it before a run: what theory says, and what will fail."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from fmicl import theory
from fmicl.config.settings import Settings
from fmicl.divergences import Divergence, divergence
from fmicl.losses import AlignUniformLoss, FMICLLoss, InfoNCELoss, SpectralContrastiveLoss
from fmicl.losses.similarities import Gaussian

__all__ = ["build_divergence", "build_objective", "certificate", "collapse_advice", "overweight"]

HARDEST = 1.5
"""A push (`fmicl.theory.push`) beyond which negatives without a gradient have made runs collapse."""
_LARGEST_LOG = 700.0  # of a float's exponential


def build_objective(recipe: Settings) -> nn.Module:
    """The objective of a recipe.

    Raises:
        ValueError: an unknown divergence, whether the objective has one or not, or a setting that it refuses.

    Example:
        >>> from fmicl.config.recipes import RECIPES
        >>> build_objective(RECIPES["cifar10"].recipe).alpha
        40.0
        >>> from fmicl.config.text_recipes import TEXT_RECIPES
        >>> build_objective(TEXT_RECIPES["wikipedia"].recipe).options
        {'precision': 'high'}
    """
    chosen = build_divergence(recipe)
    text = recipe.kind == "text"
    options: dict[str, Any] = {}
    if recipe.negatives != "auto":
        options["negatives"] = recipe.negatives
    elif recipe.objective == "infonce" and (text or recipe.method == "mocov3"):
        # SimCSE and MoCo v3 compare each first view with all second ones, where SimCLR takes all views of the batch.
        options["negatives"] = "cross"
    if text:
        # At gamma = 20, rounding inner products to bfloat16 puts u, and the gradient, off by several percent.
        options["precision"] = "high"
    if recipe.objective == "infonce":
        return InfoNCELoss(temperature=recipe.temperature, **options)
    if recipe.objective == "align_uniform":
        return AlignUniformLoss(gamma=recipe.uniformity_gamma, weight=recipe.uniformity_weight, **options)
    if recipe.objective == "spectral":
        if isinstance(recipe.mu, str):
            raise ValueError("mu='normalised' is a setting of the fmicl objective; spectral takes a number")
        return SpectralContrastiveLoss(mu=recipe.mu, **options)
    return FMICLLoss(
        chosen,
        alpha=recipe.alpha,
        gamma=recipe.gamma,
        mu=recipe.mu,
        similarity=recipe.similarity,
        shift=recipe.shift,
        **options,
    )


def build_divergence(recipe: Settings) -> Divergence:
    """The divergence of a recipe.

    Raises:
        ValueError: there is none of this name; the message says the near ones.
    """
    parameters = {"order": recipe.order} if recipe.divergence == "tsallis" else {}
    return divergence(recipe.divergence, **parameters)


def certificate(recipe: Settings, dim: int) -> str:
    """What theory says about a divergence that isn't certified to spread the embeddings; "" for the others.

    Example:
        >>> import dataclasses
        >>> from fmicl.config.recipes import RECIPES
        >>> certificate(RECIPES["digits"].recipe, dim=64)
        ''
        >>> print(certificate(dataclasses.replace(RECIPES["digits"].recipe, divergence="neyman"), dim=64))
        No theorem stands against it: the penalty of neyman is not convex at gamma=1, mu=1.
    """
    mu = _mu(recipe, dim)
    if mu is None:
        return ""
    kind = theory.uniformity(build_divergence(recipe), recipe.gamma, mu).kind
    if kind == "strictly convex":
        return ""
    word = "convex but not strictly so" if kind == "convex" else kind
    where = f"gamma={recipe.gamma:g}, mu={mu:g}"
    return f"No theorem stands against it: the penalty of {recipe.divergence} is {word} at {where}. "


def overweight(recipe: Settings, dim: int) -> str:
    """What is wrong with negatives that have no gradient and push too hard, and what would do; "" if nothing is.

    Keys of a momentum encoder don't give way. Where queries are driven from them harder than towards their own, they
    run past all keys to the far side of the sphere, and the keys after them: a chase, in which both collapse. With
    negatives that have a gradient (SimCLR; mocov3 with anchors) the same weight only spreads the embeddings more. The
    optimal shift, InfoNCE and alignment-uniformity weigh their negatives by a normaliser, and are not warned of.

    Example:
        >>> import dataclasses
        >>> from fmicl.config.recipes import RECIPES
        >>> print(overweight(dataclasses.replace(RECIPES["cifar10"].recipe, method="moco"), dim=512))
        the keys of moco have no gradient, and with alpha=40 they push 5.4 times as hard as a pair pulls: the \
embeddings may collapse. --alpha 7.4 balances the two; --shift optimal weighs them by itself
        >>> overweight(RECIPES["digits"].recipe, dim=64)
        ''
    """
    mu = _mu(recipe, dim)
    if mu is None or recipe.shift is not None:
        return ""
    push = _share_of_keys(recipe) * theory.push(build_divergence(recipe), recipe.alpha, recipe.gamma, mu)
    if not HARDEST < push < math.inf:
        return ""
    return (
        f"the keys of {recipe.method} have no gradient, and with alpha={recipe.alpha:g} they push {push:.2g} times as "
        f"hard as a pair pulls: the embeddings may collapse. --alpha {recipe.alpha / push:.2g} balances the two; "
        "--shift optimal weighs them by itself"
    )


def _share_of_keys(recipe: Settings) -> float:
    """How many of the negatives are keys of a momentum encoder: of "both", queries against keys are one half."""
    if recipe.method == "moco":
        return 1.0
    return {"cross": 1.0, "both": 0.5}.get(recipe.negatives, 0.0) if recipe.method == "mocov3" else 0.0


def collapse_advice(recipe: Settings, dim: int) -> str:
    """What may help a run whose embeddings have collapsed.

    Example:
        >>> from fmicl.config.recipes import RECIPES
        >>> collapse_advice(RECIPES["digits"].recipe, dim=64)
        'Raise --alpha, lower --learning-rate, or take another divergence.'
    """
    word = "Lower" if _share_of_keys(recipe) else "Raise"  # what gives way spreads more the harder it is pushed
    if recipe.objective == "infonce":
        return "Lower --learning-rate, or change --temperature."
    if recipe.objective == "align_uniform":
        return f"{word} --uniformity-weight, or lower --learning-rate."
    if recipe.objective == "spectral":
        return "Change --mu, or lower --learning-rate."
    weight = f"{word} --alpha, lower" if recipe.parts()["alpha"] else "Change --gamma, lower"
    return f"{certificate(recipe, dim)}{weight} --learning-rate, or take another divergence."


def _mu(recipe: Settings, dim: int) -> float | None:
    """The scale of the density ratio; None where theory has nothing to say, or it is beyond a float."""
    if recipe.objective != "fmicl" or recipe.similarity != "gaussian":
        return None
    log_mu = Gaussian(recipe.gamma, recipe.mu).log_mu(dim)
    return math.exp(log_mu) if log_mu < _LARGEST_LOG else None
