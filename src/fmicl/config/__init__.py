"""Settings of a run and the recipes that carry them."""

from fmicl.config import recipes as _recipes  # noqa: F401 (registers them)
from fmicl.config import tasks as _tasks  # noqa: F401
from fmicl.config.common import MachineOptions, OptimisationOptions
from fmicl.config.settings import RECIPES, TASKS, Schema, Settings, TaskOptions, recipe, register_recipe, schema_of

__all__ = [
    "RECIPES",
    "TASKS",
    "MachineOptions",
    "OptimisationOptions",
    "Schema",
    "Settings",
    "TaskOptions",
    "recipe",
    "register_recipe",
    "schema_of",
]
