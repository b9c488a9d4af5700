"""settings.json of a run: what was trained, with what, on which data; enough to run it again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fmicl.config import TASKS, Settings
from fmicl.runs.folder import Run
from fmicl.utils.device import describe_device
from fmicl.utils.files import read_json, write_json
from fmicl.utils.provenance import command_line, commit, versions
from fmicl.utils.registry import unknown_name


def write_settings(
    run: Run,
    settings: Settings,
    device: str,
    data: dict[str, Any] | None = None,
    extended: Sequence[dict[str, Any]] = (),
) -> None:
    """Write settings.json: all options, and the fingerprint of the data.

    Args:
        run: the run.
        settings: its settings.
        device: where it is trained.
        data: fingerprint of the data.
        extended: of a run that goes on for more epochs, its length, command and start before, the oldest first.
    """
    history = {"extended": list(extended)} if extended else {}
    write_json(
        run.settings,
        {
            "recipe": settings.recipe,
            "task": settings.task.name,
            "hash": settings.hash,
            "settings": settings.to_json(),
            "data": data,
            "command": command_line(),
            "versions": versions(["torch", "lightning", *settings.task.packages]),
            "device": describe_device(device),
            "commit": commit(),
            "seed": settings.seed,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            **history,
        },
    )


def extend_settings(run: Run, settings: Settings, device: str) -> None:
    """Replace the settings of a run by those of a longer one; what they were is listed under ``extended``."""
    before = read_json(run.settings)
    earlier = {key: before.get(key) for key in ("hash", "command", "started")}
    earlier["epochs"] = before["settings"]["epochs"]
    write_settings(run, settings, device, read_fingerprint(run), [*before.get("extended", ()), earlier])


def read_settings(run: Run, task: str | None = None) -> Settings:
    """The settings of a run.

    Args:
        run: the run.
        task: the task that it must be of, images or text; None for any.

    Raises:
        ValueError: it is a run of another task, has settings that this version doesn't know, or is not a run.
    """
    if task is not None:
        require_task(run, task)
    found, saved = read_task(run), read_json(run.settings)
    return Settings.from_json(str(saved["recipe"]), saved["settings"], found)


def require_task(run: Run, task: str) -> None:
    """Refuse a run that was trained on something else.

    Raises:
        ValueError: it is a run of another task; the message says how its encoder is loaded.
    """
    found = read_task(run)
    if found != task:
        loader = TASKS[found].loader
        raise ValueError(f"{run.path} is a run on {found}, not on {task}; in Python, {loader} loads its encoder")


def read_task(run: Run) -> str:
    """What a run was trained on: images or text.

    Raises:
        ValueError: settings.json is not that of a run of this version.
    """
    saved = read_json(run.settings)
    missing = {"recipe", "task", "settings"} - saved.keys()
    if missing:
        raise ValueError(f"{run.settings} is not that of a run of this version: it has no {', '.join(sorted(missing))}")
    if not isinstance(saved["settings"], dict):
        raise ValueError(f"{run.settings} is damaged: its settings are a {type(saved['settings']).__name__}")
    if saved["task"] not in TASKS:
        raise ValueError(f"{run.settings}: {unknown_name('task', saved['task'], TASKS)}")
    return str(saved["task"])


def read_fingerprint(run: Run) -> dict[str, Any] | None:
    """The fingerprint of the data that a run was started with; None if it has none."""
    data = read_json(run.settings).get("data")
    return data if isinstance(data, dict) else None
