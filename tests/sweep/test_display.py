"""Display: the live table, lines without a terminal, and the progress that they show."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fmicl.sweep.display import Display, time_left
from fmicl.sweep.state import Progress, State, SweepRun, read_progress
from sweeps import some_run


def row(
    name: str,
    state: State,
    progress: Progress,
    epochs: int = 10,
    where: str = "cuda:0",
    **more: object,
) -> SweepRun:
    return some_run(name, epochs, state=state, progress=progress, where=where, **more)


def shown(rows: list[SweepRun], width: int = 120, height: int | None = None) -> str:
    """The table on a terminal of this size."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, color_system=None, width=width, height=height)
    console.print(Display("digits in x", live=True, console=console).table(rows))
    return text.getvalue()


def test_the_table_shows_each_run_and_the_time_left() -> None:
    rows = [
        row("kl", "running", Progress(4, 2.0, 1.25, 61.5)),
        row("js", "failed", Progress(1, 2.0, 2.0, None), error="boom"),
        row("vlc", "finished", Progress(10, 2.0, 1.0, 70.0), results={"knn": 71.0}),
        row("tsallis", "waiting", Progress()),
    ]
    text = io.StringIO()
    with Display("digits in x", live=True, console=Console(file=text, force_terminal=True, width=120)) as display:
        display.update(rows, slots=1)
        display.print("only without a table")
    for words in ("4/10", "61.50", "1.2500", "0:00:12", "boom", "71.00", "waiting", "about 0:00:32 left"):
        assert words in text.getvalue(), words
    assert "1 finished, 1 running, 1 waiting, 1 failed" in text.getvalue()
    assert "only without" not in text.getvalue()
    assert time_left(rows[3]) is None


def test_a_run_that_is_trained_is_being_evaluated() -> None:
    text = shown([row("kl", "running", Progress(10, 2.0, 1.0, 70.0))])
    assert text.count("evaluating") == 2, "in its row, and of the sweep"
    assert "0:00:00" not in text


def test_a_small_terminal_shows_the_active_runs() -> None:
    rows = [row(f"run{i}", "waiting" if i > 3 else "finished", Progress()) for i in range(40)]
    rows[30].state = "running"
    text = shown(rows, height=12)
    assert "run30" in text
    assert "run39" not in text
    assert "4 finished, 1 running, 35 waiting" in text


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", ["kl", "reverse_kl-moco-seed0", "squared_hellinger-epochs200-seed10"])
@pytest.mark.parametrize("error", ["", "ValueError: there are no images in a folder of a rather long name"])
@pytest.mark.parametrize("where", ["", "cpu", "cuda:0", "job 1234567"])
def test_the_table_fits_the_terminal_with_what_matters_whole(where: str, error: str, name: str, width: int) -> None:
    rows = [
        row(name, "running", Progress(40, 12.0, 1.25, 61.5), 100, where),
        row(name, "finished", Progress(100, 2.0, 1.0, 70.0), 100, where, results={"knn": 71.0}),
        row(name, "failed", Progress(1, 2.0, 2.0, None), 100, where, error=error),
        row(name, "running", Progress(100, 2.0, 1.0, 70.0), 100, where),
        row(name, "waiting", Progress(), 100, ""),
    ]
    lines = shown(rows, width).splitlines()
    assert max(map(len, lines)) <= width
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    head = next(line for line in lines if "state" in line)
    assert [cell.strip() for cell in head.strip("┃").split("┃")][:2] == ["run", "state"]
    assert "…" not in head
    assert not any("…" in cell for line in cells for cell in line[:-1])
    for words in ("running", "finished", "failed", "waiting", "40/100", "100/100", "61.50", "71.00"):
        assert any(words in line for line in cells), words
    if width >= 80 or len(name) <= 18:
        assert [line[0] for line in cells] == [name] * len(rows)
    else:  # on two lines
        assert "".join(line[0] for line in cells) == name * len(rows)
    assert not where or any(where[:5] in line[-1] for line in cells)


def test_a_wide_terminal_shows_every_column_and_the_whole_error() -> None:
    error = "ValueError: there are no images in a folder of a rather long name"
    text = shown([row("kl-seed0", "failed", Progress(1, 2.0, 2.0, None), error=error)], width=160)
    for words in (error, "s/epoch", "loss", "time left", "2.0000"):
        assert words in text


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    text = io.StringIO()
    display = Display("x", console=Console(file=text, width=120), every=0.0)
    display.update([row("kl", "running", Progress(4, 2.0, 1.25, 61.5))])
    assert text.getvalue().rstrip().endswith("1 running; about 0:00:12 left")


def test_progress_of_text_runs(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,epoch,loss,stsb_dev\n10,0.5,2.0,\n20,1.0,1.5,71.25\n")
    assert read_progress(path) == Progress(1.0, None, 1.5, 71.25)
    path.write_text("epoch,loss,seconds\n0.25,2.0,9\n0.5,1.5,3\n0.75,1.0,3\n")
    assert read_progress(path).seconds_per_epoch == 12.0  # of a whole epoch
    path.write_text("epoch,loss\n")
    assert read_progress(path) == Progress()
