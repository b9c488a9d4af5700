"""Tasks: images and text."""

from __future__ import annotations

from fmicl.config import TASKS
from fmicl.training.tasks.base import Context, Monitor, Task
from fmicl.utils.registry import unknown_name

__all__ = ["Context", "Monitor", "Task", "task_class"]


def task_class(name: str) -> type[Task]:
    """The class of a task, by name; its dependencies are imported now."""
    if name == "images":
        from fmicl.training.tasks.images import ImageTask

        return ImageTask
    if name == "text":
        from fmicl.training.tasks.text import TextTask

        return TextTask
    raise unknown_name("task", name, TASKS)
