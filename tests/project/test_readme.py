"""What the README says is so."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import fmicl
from fmicl import theory
from fmicl.config import RECIPES
from fmicl.losses import OBJECTIVES
from fmicl.methods import METHODS
from fmicl.utils.registry import Registry

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_its_code_runs() -> None:
    names = {"x": torch.randn(8, 4, requires_grad=True), "y": torch.randn(8, 4)}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert names["x"].grad is not None


def shown(name: str) -> str:
    """The part of the README between two markers."""
    return README.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0]


@pytest.mark.parametrize("registry", [OBJECTIVES, METHODS, RECIPES], ids=lambda registry: registry.kind)
def test_its_tables_are_those_of_the_registries(registry: Registry[Any]) -> None:
    assert shown(f"{registry.kind}s") == registry.table()


def test_it_is_short() -> None:
    assert README.count("\n") <= 150


def test_its_table_is_what_theory_prints() -> None:
    assert shown("certificates") == theory.table()
    printed = subprocess.run([sys.executable, "-m", "fmicl.theory"], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == shown("certificates")


def test_importing_fmicl_loads_nothing_of_weight_but_torch() -> None:
    """The losses need torch alone: what training needs is never imported with them."""
    heavy = ["lightning", "timm", "torchvision", "sklearn", "matplotlib", "tyro", "pandas", "scipy", "PIL", "pyarrow"]
    code = (
        "import sys, fmicl, torch\n"
        "fmicl.FMICLLoss('js')(torch.randn(4, 3), torch.randn(4, 3))\n"
        "fmicl.theory.table(); fmicl.information\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert seen.strip() == "[]"


def test_torch_is_the_only_hard_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[<>=]", requirement)[0] for requirement in project["dependencies"]] == ["torch"]
    assert set(project["optional-dependencies"]) == {"train", "text", "dev"}


def test_every_public_name_is_there_and_documented() -> None:
    for name in fmicl.__all__:
        assert getattr(fmicl, name).__doc__, name
        assert name in dir(fmicl)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="FMICLLoss"):
        _ = fmicl.FMCLLoss


def test_tests_that_the_errata_name_exist() -> None:
    errata = (ROOT / "docs" / "errata.md").read_text()
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(?:\w+::)?(\w+)`", errata):
        assert test in (ROOT / path).read_text(), test


def test_installs_leave_the_clone_where_it_is() -> None:
    """Without -e, an extra that is added later would put a copy in the place of the clone."""
    files = [ROOT / "README.md", ROOT / "experiments" / "README.md", *(ROOT / "src").rglob("*.py")]
    installs = re.findall(r"pip install ([^`\n]*)", "\n".join(file.read_text() for file in files))
    assert len(installs) > 4
    assert all(words.startswith("-e ") for words in installs), installs
