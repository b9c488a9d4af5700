"""Tasks: images and text."""

from __future__ import annotations

from fmicl.training.tasks.base import Context, Task

__all__ = ["Context", "Task", "task_class"]


def task_class(name: str) -> type[Task]:
    """The class of a task, by name; its dependencies are imported now."""
    if name == "images":
        from fmicl.training.tasks.images import ImageTask

        return ImageTask
    from fmicl.training.tasks.text import TextTask

    return TextTask
