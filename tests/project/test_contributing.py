"""CONTRIBUTING.md: its examples work."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from fmicl.config import recipe
from fmicl.losses import OBJECTIVES
from fmicl.methods import METHODS
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def test_its_examples_register_what_can_be_trained_by_name() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    names = {"__name__": "builtins"}  # of a module that exists, as dataclasses need
    try:
        for block in blocks:
            exec(compile(block, "CONTRIBUTING.md", "exec", dont_inherit=True), names)
        settings = recipe("digits", method="stop_gradient", objective="pull", strength=2.0, dim=8, hidden=16)
        assert settings.unused() == {}
        method = build_image_method(settings, build_image_encoder(settings))
        x, y = torch.randn(2, 4, 1, 8, 8)
        found = method.loss(x, y)
        torch.testing.assert_close(found.loss, 2 * (found.first - found.second).square().sum(dim=1).mean())
    finally:
        for registry, name in ((OBJECTIVES, "pull"), (METHODS, "stop_gradient")):
            if name in registry:
                registry.unregister(name)


def test_every_command_of_the_makefile_that_it_names_exists() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", PAGE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
