"""File names that mark run and sweep folders.

:class:`fmicl.runs.folder.Run` has the whole layout. These names lie below it because the search for images, too, must
recognise such folders: the figures in them are not data.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["CHECKPOINT_FOLDER", "ENCODER_CONFIG", "METRICS", "SETTINGS", "SWEEP_FILE", "is_run_folder"]

SETTINGS = "settings.json"
METRICS = "metrics.csv"
ENCODER_CONFIG = "encoder.json"
CHECKPOINT_FOLDER = "checkpoints"
SWEEP_FILE = "sweep.json"


def is_run_folder(folders: Collection[str], files: Collection[str]) -> bool:
    """Whether a folder with these subfolders and files is a run or a sweep.

    settings.json alone is not enough: other programs write files of that name.

    Example:
        >>> is_run_folder([], ["settings.json", "metrics.csv"]), is_run_folder([], ["settings.json"])
        (True, False)
    """
    trained = METRICS in files or ENCODER_CONFIG in files or CHECKPOINT_FOLDER in folders
    return SWEEP_FILE in files or (SETTINGS in files and trained)
