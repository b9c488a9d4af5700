"""What a sweep looks at before its first run starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fmicl.config.recipes import Recipe
from fmicl.config.text_recipes import TextRecipe
from fmicl.sweep.folder import DATA
from fmicl.sweep.grid import Cell

__all__ = ["check_cells"]

ENCODER = ("encoder", "stem", "depth", "stable_vit", "views", "rotation_weight", "rotation_size")
"""Settings that an image encoder is built from, or that say what else it must take."""


def check_cells(cells: Sequence[Cell], *, here: bool = True) -> None:
    """Refuse what would fail in every run, before the first one starts.

    Args:
        cells: what is to be trained.
        here: whether that is on this machine, so that its files must be here.

    Raises:
        ValueError: an objective or an encoder that can't be built, batches that can't be shared out, data that isn't
            named, or sentences of more tokens than the files of a model here say it takes, in the words of
            `fmicl train`.
        FileNotFoundError: data, or a sentence model's folder, that isn't there.
    """
    from fmicl.data import dataset_info, require_data_dir
    from fmicl.training.building import rotation_divergence
    from fmicl.training.objectives import build_objective
    from fmicl.training.processes import check_batch

    encoders = set()
    for cell in cells:
        build_objective(cell.recipe)
        rotation_divergence(cell.recipe)
        check_batch(cell.recipe, cell.recipe.devices)
        if isinstance(cell.recipe, TextRecipe):
            from fmicl.models.text import check_model_path, declared_length_limit
            from fmicl.training.text import check_lengths

            _ = cell.recipe.text
            if here:
                check_model_path(cell.recipe.model)
            check_lengths(cell.recipe, declared_length_limit(cell.recipe.model))
        else:
            if dataset_info(cell.recipe.dataset).needs_folder:
                require_data_dir(cell.recipe.dataset, cell.recipe.data_dir)
            encoder = tuple(getattr(cell.recipe, name) for name in ENCODER)
            if encoder not in encoders:
                _check_encoder(cell.recipe)
            encoders.add(encoder)
        for name in DATA if here and not getattr(cell.recipe, "download", False) else ():
            value = cell.changes.get(name)
            if isinstance(value, Path) and not value.exists():
                raise FileNotFoundError(f"there is no {'file' if value.suffix else 'folder'} {value}")


def _check_encoder(recipe: Recipe) -> None:
    """Build a recipe's encoder: without its weights, which is quick, or with them where that can't be done."""
    import torch

    from fmicl.training.building import build_recipe_encoder

    try:
        with torch.device("meta"):
            build_recipe_encoder(recipe)
    except Exception:  # models raise whatever they like; whether it is for want of weights is seen with them
        build_recipe_encoder(recipe)
