"""The list of the paper's items in docs/reproduction.md: complete, and what it names exists; links of all pages."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

import fmicl
from fmicl.cli import sweep, train
from fmicl.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reproduction.md").read_text()

LABELS = [
    "def:fMI", "lem:optimal_sim", "assmp:joint_vMF", "thm:uniformity", "prop:scaling", "thm:simclr_moco_negative",
    "alg:f-MICL", "eq:dual_form_fMI", "eq:condition_T", "eq:objective", "eq:optimal_similarity1", "eq:vM-F",
    "eq:optimal_similarity", "eq:objective_gaussian", "eq:objective_sample", "eq:dv", "eq:infonce", "eq:objective1",
    "eq:chi", "eq:f-div_property", "eq:esterror", "eq:gaussian_assumption_app", "tbl:choices_f_div", "tab:accs",
    "tab:imnet", "tab:cos_vs_gaussian", "tab:fdivergence", "tbl:choices_f_div_app", "tab:setup", "tab:alpha1",
    "tab:alpha2", "tab:accs_full", "fig:gaussian", "fig:f-MICL-intro", "fig:relation", "fig:uniformity_batch",
    "fig:tetrahedron", "fig:curve", "fig:gaussian2",
]  # fmt: skip
"""All labels of theorems, definitions, equations, tables and figures in the paper's LaTeX source."""


def items() -> list[list[str]]:
    """The rows of the table: place in the paper, what it says, where it is here."""
    lines = PAGE.split("<!-- items -->\n")[1].split("\n<!-- /items -->")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ROWS = items()
REFERENCES = sorted({code for row in ROWS for code in re.findall("`([^`]+)`", row[2])})


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_each_row_has_three_cells_and_says_where_or_not_yet() -> None:
    assert len(ROWS) >= 58
    for row in ROWS:
        assert len(row) == 3, row
        assert all(row), row
        assert re.search(r"`|\]\(|not yet|no run yet", row[2]), row


def test_each_label_of_the_paper_is_in_the_table_once() -> None:
    found = [label for row in ROWS for label in re.findall(r"`([a-z]+:[^`]+)`", row[0])]
    assert sorted(found) == sorted(LABELS)


@pytest.mark.parametrize("code", REFERENCES)
def test_what_a_row_names_exists(code: str) -> None:
    first, *rest = shlex.split(code)
    if first == "fmicl":
        command, *words = rest
        assert command in COMMANDS
        if command in ("train", "sweep"):
            {"train": train.parse, "sweep": sweep.parse}[command](words[0], words[1:])
    elif first == "python":
        assert rest[0] == "-m"
        assert importlib.util.find_spec(rest[1])
    elif first.startswith("fmicl."):
        found = fmicl
        for name in first.split(".")[1:]:
            found = getattr(found, name)
    else:
        path, *names = first.split("::")
        assert (ROOT / path).exists()
        text = (ROOT / path).read_text() if names else ""
        for name in names:
            assert re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE), name


PAGES = [
    page for folder in ("", "benchmarks", "docs", "experiments", "results") for page in (ROOT / folder).glob("*.md")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_reverse_kl_is_no_constant_on_record() -> None:
    """The numbers of the errata."""
    results = json.loads((ROOT / "results/cifar10/reverse_kl-200e-s0-5653be02.json").read_text())["results"]
    assert round(results["effective_rank"], 1) == 4.7
    assert (round(results["uniformity"], 2), round(results["knn"], 1)) == (-2.03, 65.8)
