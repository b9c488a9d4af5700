"""The command line: it answers at once, lists each recipe, takes each field, and tells what was meant."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fmicl.config.fields import leaves

import fmicl
from fmicl.cli import main as cli
from fmicl.cli import tables
from fmicl.config import RECIPES, recipe
from fmicl.config.settings import Settings
from fmicl.runs import folder as runs


def run(*arguments: str, columns: int = 200) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": str(columns)}
    return subprocess.run(
        [sys.executable, "-m", "fmicl", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


def parse(*arguments: str) -> Any:
    return cli._parse(arguments)


def test_help_answers_within_half_a_second() -> None:
    times: list[float] = []
    while not times or (min(times) >= 0.5 and len(times) < 10):  # other tests keep the machine busy
        before = time.perf_counter()
        done = run("--help")
        times.append(time.perf_counter() - before)
        assert done.returncode == 0
    assert min(times) < 0.5
    assert all(command in done.stdout for command in ("train", "sweep", "evaluate", "embed", "report"))


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys, fmicl.cli.main, fmicl.config.recipes\n"
        "heavy = {'torch', 'lightning', 'timm', 'sklearn', 'matplotlib', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    """As `fmicl train digits --help | head -1`, with a reader that leaves before a word is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "fmicl", "train", "digits", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert done.stderr == ""


def without(package: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script where a package is not installed."""
    hide = f"import sys; sys.modules[{package!r}] = None\n"
    return subprocess.run([sys.executable, "-c", hide + script], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("tyro", ["train", "--help"], "train"),
        ("lightning", ["train", "digits"], "train"),
        ("transformers", ["train", "wikipedia"], "text"),
        ("sentence_transformers", ["train", "wikipedia"], "text"),
    ],
)
def test_a_package_of_the_extra_that_is_missing_is_one_line(package: str, arguments: list[str], extra: str) -> None:
    script = f"import fmicl.__main__\nsys.argv = {['fmicl', *arguments]!r}\nsys.exit(fmicl.__main__.main())"
    done = without(package, script)
    assert done.returncode == 2
    assert f"needs: pip install -e '.[{extra}]' in the folder of fmicl's clone\n" in done.stderr
    assert done.stderr.startswith("fmicl: error: there is no package ")
    assert done.stderr.count("\n") == 1


def test_with_torch_alone_the_version_is_told_and_help_says_what_is_missing() -> None:
    script = "import fmicl.__main__\nsys.argv = ['fmicl', {!r}]\nsys.exit(fmicl.__main__.main())"
    done = without("tyro", script.format("--version"))
    assert (done.returncode, done.stdout) == (0, f"fmicl {fmicl.__version__}\n")
    done = without("tyro", script.format("--help"))
    assert (done.returncode, done.stderr) == (0, "")
    assert all(words in done.stdout for words in ("torch alone", "train, sweep", "pip install -e '.[train]'"))


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("torch", [False, True])
def test_a_command_ends_at_once_with_all_that_was_to_be_done_at_the_end(torch: bool, thread: bool) -> None:
    """With torch there, nothing is taken apart; what asked to be called is, and a thread's work is waited for."""
    script = f"""
import atexit, sys, threading, time
sys.modules.pop("torch", None)
if {torch}:
    sys.modules["torch"] = sys
class Part:
    def __del__(self, say=print):
        say("taken apart")
part = Part()
atexit.register(print, "at the end")
if {thread}:
    threading.Thread(target=lambda: (time.sleep(0.3), print("work"))).start()
from fmicl.__main__ import leave
print("said", end=" ")
leave(3)
"""
    stub = "import sys, types; sys.modules['fmicl'] = types.ModuleType('fmicl'); import fmicl\n"
    stub += "fmicl.EXTRAS, fmicl.__version__, fmicl.how_to_install = {}, '0', None\n"
    stub += f"fmicl.__path__ = [{str(Path(fmicl.__file__).parent)!r}]\n"
    done = subprocess.run([sys.executable, "-c", stub + script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (3, "")
    work = "work\n" if thread else ""
    rest = "" if torch and not thread else "taken apart\n"
    assert done.stdout == f"said {work}at the end\n{rest}"


def test_load_encoder_says_which_extra_it_needs() -> None:
    done = without("safetensors", "import fmicl\nfmicl.FMICLLoss('kl')\nfmicl.load_encoder('run')")
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ImportError: fmicl.load_encoder needs the package safetensors, which is not there: "
        "pip install -e '.[train]' in the folder of fmicl's clone"
    )


def test_python_m_fmicl_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "fmicl", "report", "/nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "fmicl: error: there is no run folder /nowhere\n")


def test_train_help_lists_each_recipe_with_its_sentence() -> None:
    text = " ".join(run("train", "--help").stdout.replace("│", " ").split())
    entries: list[Entry[Settings]] = [*RECIPES.values(), *TEXT_RECIPES.values()]
    for entry in entries:
        assert f"{entry.name} {entry.sentence}" in text
        assert entry.sentence.endswith(".")


def test_every_field_of_a_recipe_is_an_option() -> None:
    text = run("train", "cifar10", "--help").stdout
    fields = [f.name for f in dataclasses.fields(Recipe) if f.name != "views"]
    fields += [f.name for f in dataclasses.fields(recipe("cifar10").views)]
    for name in fields:
        assert f"--{name.replace('_', '-')}" in text, name


def words_of(shown: str) -> str:
    return " ".join(shown.replace("│", " ").split())


def test_the_words_on_an_option_flow_into_full_lines() -> None:
    """A line ends where the next word has no room, not where a line of the docstring does."""
    shown = run("train", "digits", "--help", columns=80).stdout
    indent = "│ " + " " * 20
    pairs = [pair for pair in itertools.pairwise(shown.splitlines()) if all(x.startswith(indent) for x in pair)]
    assert len(pairs) > 50
    for line, after in pairs:
        room = 78 - len(line.rstrip("│ "))  # within the frame
        assert room <= len(after.strip("│ ").split()[0]), line
    for leaf in leaves(Recipe):
        assert leaf.help in words_of(shown), leaf.name


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("train images --divergance js", "--divergence STR"),
        ("sweep images --divergance js", "--divergence [STR"),
        ("train wikipedia --modle x", "--model STR"),
        ("evaluate RUN --jsno x", "--json"),
        ("embed RUN photos -o x.csv --batchsize 3", "--batch-size"),
    ],
)
def test_a_misspelt_option_is_told_the_one_that_was_meant_and_no_other_recipe(
    arguments: str, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_code:
        cli.main(arguments.split())
    assert exit_code.value.code == 2
    said = words_of(capsys.readouterr().err)
    assert f"Perhaps you meant: {option}" in said
    verb, name = arguments.split()[:2]
    command = f"{verb} {name}" if verb in ("train", "sweep") else verb
    assert said.rstrip(" ╰─╯").endswith(f"run fmicl {command} --help")
    assert said.count("--help") == 1, "of no other command"
    assert "cifar10" not in said


def test_options_override_the_recipe() -> None:
    command = parse(
        *[
            "train",
            "cifar10",
            "--divergence",
            "js",
            "--epochs",
            "200",
            "--data-dir",
            "DIR",
            "--method",
            "moco",
            "--objective",
            "infonce",
        ],
        *[
            "--encoder",
            "resnet50",
            "--size",
            "64",
            "--crop-scale",
            "0.1",
            "0.9",
            "--mu",
            "normalised",
            "--resume",
            "--out",
            "RUN",
        ],
    )
    recipe = recipe("cifar10")
    assert command.recipe == dataclasses.replace(
        recipe, divergence="js", epochs=200, data_dir=Path("DIR"), method="moco", objective="infonce",
        encoder="resnet50", mu="normalised", views=dataclasses.replace(recipe.views, size=64, crop_scale=(0.1, 0.9)),
    )  # fmt: skip
    assert (command.name, command.out, command.resume) == ("cifar10", Path("RUN"), True)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_without_options_is_itself(name: str) -> None:
    command = parse("train", name)
    assert command.recipe == RECIPES[name].recipe
    assert command.name == name


def test_a_text_recipe_and_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no run to resume
    assert parse("train", "wikipedia").recipe == TEXT_recipe("wikipedia")
    options = ["--data", "wiki.txt", "--model", "roberta-base", "--objective", "infonce", "--pooling", "mean"]
    command = parse("train", "wikipedia", *options, "--sts", "DIR", "--resume")
    assert command.recipe == TextRecipe(
        data=Path("wiki.txt"), model="roberta-base", objective="infonce", pooling="mean", sts=Path("DIR")
    )
    assert (command.name, command.resume) == ("wikipedia", True)


@pytest.mark.parametrize("named", [True, False])
def test_a_resumed_run_has_its_own_settings_but_for_those_that_are_given(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photos = dataclasses.replace(recipe("images"), data_dir=Path("photos"), epochs=3, baselines=True)
    text = dataclasses.replace(TEXT_recipe("wikipedia"), data=Path("a.txt"), pooling="mean")
    for name, recipe in (("images", photos), ("wikipedia", text)):
        folder = tmp_path / "own" / name if named else None
        run = runs.create_run(name, folder)
        runs.write_settings(run, name, recipe, "cpu")
        options = ["--resume", *(["--out", str(folder)] if named else [])]
        command: Any = cli._parse(["train", name, *options])
        assert (command.recipe, command.name, command.resume, command.out) == (recipe, name, True, folder)
        command = cli._parse(["train", name, "--seed", "5", *options, "--epochs", "7"])
        assert command.recipe == dataclasses.replace(recipe, seed=5, epochs=7)
        assert cli._parse(["train", name]).recipe == (RECIPES | TEXT_RECIPES)[name].recipe


def test_home_is_home_in_every_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = tmp_path
    command = cli._parse(["train", "wikipedia", "--out", "~/run", "--data=~/a.txt", "--sts", "~/sts", "--model", "~/m"])
    assert (command.out, command.recipe.data) == (home / "run", home / "a.txt")
    assert (command.recipe.sts, command.recipe.model) == (home / "sts", str(home / "m"))
    command = cli._parse(["sweep", "images", "--data-dir", "~/a", "~/b", "--out", "~/s", "--case", "x", "data_dir=~/c"])
    assert command.grid.data_dir == (home / "a", home / "b")
    assert (command.sweep.out, command.sweep.case) == (home / "s", (("x", f"data_dir={home}/c"),))
    command = cli._parse(["embed", "~/run", "~", "-o", "~/x.csv"])
    assert (command.run, command.source, command.output) == (home / "run", home, home / "x.csv")
    assert cli._parse(["embed", "a~", "b/~/c", "-o", "x=y.csv"]).source == Path("b/~/c")
    runs.write_settings(runs.create_run("digits", home / "run"), "digits", recipe("digits"), "cpu")
    assert cli._parse(["train", "digits", "--resume", "--out", "~/run"]).out == home / "run"


def test_embed_takes_a_short_o() -> None:
    command = parse("embed", "RUN", "photos", "-o", "x.npz")
    assert (command.run, command.source, command.output) == (Path("RUN"), Path("photos"), Path("x.npz"))


@pytest.mark.parametrize("count", [15, 100, None])
def test_the_table_says_how_many_images_were_held_out(
    count: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"knn": 800 / 15, "linear": 46.67, "k": 5, "epoch": 3, "split": "held-out", "test_samples": count}
    (tmp_path / "results.json").write_text(json.dumps(results))
    tables.print_results(tmp_path)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"accuracy on the {f'{count} images of the ' if count else ''}held-out split, percent" in shown
    few = "warning: only 15 test images: each is 6.7 percent of the accuracy"
    assert shown.endswith(few) == (count == 15)
    assert ("warning" in shown) == (count == 15)


def test_train_evaluate_report_embed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    options = ["--epochs", "1", "--device", "cpu", "--hidden", "32", "--monitor-every", "0", "--out", folder]
    assert cli.main(["train", "digits", *options]) == 0
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("raw pixels", "untrained encoder", "trained, epoch 1", "k-NN (k=20)"))
    assert shown.rstrip().endswith(f"page: {folder}/report.html")
    assert cli.main(["train", "digits", *options]) == 2
    assert "never overwrites" in capsys.readouterr().err
    assert cli.main(["train", "digits", *options, "--resume"]) == 0
    assert "has ended already" in capsys.readouterr().out
    page = tmp_path / "run" / "report.html"
    results = tmp_path / "run" / "results.json"
    results.write_text(json.dumps({**json.loads(results.read_text()), "knn": 12.34}))
    assert cli.main(["report", folder]) == 0
    assert "12.3 %" in page.read_text()
    assert cli.main(["evaluate", folder, "--device", "cpu"]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    assert "12.3 %" not in page.read_text()  # the page tells the new results
    page.unlink()
    assert cli.main(["report", folder]) == 0
    assert page.exists()
    (tmp_path / "photos").mkdir()
    output = tmp_path / "x.csv"
    assert cli.main(["embed", folder, str(tmp_path / "photos"), "-o", str(output)]) == 2
    assert not output.exists()
