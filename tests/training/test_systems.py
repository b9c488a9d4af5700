"""Every system of docs/systems.md trains on digits and ends above the untrained encoder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from fmicl.cli.train import parse
from fmicl.methods import METHODS
from fmicl.utils.files import read_json
from small_settings import digits
from train_run import train

PAGE = (Path(__file__).parents[2] / "docs" / "systems.md").read_text()
SECTION = PAGE.split("## Methods\n")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| ([^|]+) \| `(--[^`|]+)` \|", SECTION, re.MULTILINE)
DIGITS: dict[str, dict[str, Any]] = {
    "BYOL": {"method": "byol"},
    "SwAV": {"method": "swav", "prototypes": 100},
    "SwAV with multi-crop": {"method": "swav", "prototypes": 100, "local_crops": 2, "local_scale": (0.2, 0.5)},
    "CPC": {"method": "cpc", "objective": "infonce"},
    "Deep InfoMax": {"method": "dim", "divergence": "js"},
    "MoCo": {"method": "moco", "objective": "infonce", "symmetric": True},
}


def test_every_method_has_a_command_whose_options_have_an_effect() -> None:
    found = set()
    for name, options in ROWS:
        settings, _, _ = parse("cifar10", [*shlex.split(options), "--data-dir", "DIR"])
        assert settings.unused() == {}, name
        found.add(settings.method)
    assert found >= set(METHODS.names()) - {"simclr"}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIGITS)
def test_a_short_run_ends_above_the_untrained_encoder(name: str, tmp_path: Path) -> None:
    run = train(digits(**DIGITS[name], epochs=20, hidden=256, dim=64, baselines=True), out=tmp_path / "run")
    results = read_json(run.results)
    assert results["knn"] > results["untrained"]["knn"]
    assert results["linear"] > results["untrained"]["linear"]
