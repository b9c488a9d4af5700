"""What a sweep looks at before its first run starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fmicl.grid import Cell
from fmicl.sweep_folder import DATA
from fmicl.text_recipes import TextRecipe

__all__ = ["check_cells"]


def check_cells(cells: Sequence[Cell], *, here: bool = True) -> None:
    """Refuse what would fail in every run, before the first one starts.

    Args:
        cells: what is to be trained.
        here: whether that is on this machine, so that its files must be here.

    Raises:
        ValueError: an objective that can't be built, batches that can't be shared out, data that isn't named, or
            sentences of more tokens than the files of a model here say it takes, in the words of `fmicl train`.
        FileNotFoundError: data that isn't there.
    """
    from fmicl.data import dataset_info, named_folder
    from fmicl.objectives import build_objective
    from fmicl.processes import check_batch

    for cell in cells:
        build_objective(cell.recipe)
        check_batch(cell.recipe, cell.recipe.devices)
        if isinstance(cell.recipe, TextRecipe):
            from fmicl.text_models import told_limit
            from fmicl.text_training import check_lengths

            _ = cell.recipe.text
            check_lengths(cell.recipe, told_limit(cell.recipe.model))
        elif dataset_info(cell.recipe.dataset).needs_folder:
            named_folder(cell.recipe.dataset, cell.recipe.data_dir)
        for name in DATA if here and not getattr(cell.recipe, "download", False) else ():
            value = cell.changes.get(name)
            if isinstance(value, Path) and not value.exists():
                raise FileNotFoundError(f"there is no {'file' if value.suffix else 'folder'} {value}")
