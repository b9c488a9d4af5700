"""A sweep trains a grid, outlives runs that die, goes on where it was, and stops when it is told to."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import tyro

from fmicl import cli, launchers
from fmicl.grid import arguments, cells, grid_of, leaves, parse_case, values_of
from fmicl.launchers import LocalLauncher, Slot, SubmititLauncher, TrainJob, local_slots, slurm_options
from fmicl.recipes import RECIPES, Recipe
from fmicl.sweep import Sweep
from fmicl.sweep_folder import find_folder, last_error, locked, not_told_apart_by
from fmicl.text_recipes import TEXT_RECIPES

DIGITS = RECIPES["digits"].recipe

FAKE = """
import json, os, signal, sys, time
from pathlib import Path

out = Path(sys.argv[sys.argv.index("--out") + 1])
what = sys.argv[sys.argv.index("--divergence") + 1] if "--divergence" in sys.argv else "kl"
assert sys.argv[1:3] == ["train", "digits"] and sys.argv[-1] == "--resume"
out.mkdir(exist_ok=True)
tries = out / "tries"
first = not tries.exists()
tries.write_text(tries.read_text() + "x" if not first else "x")
print("run folder", out, flush=True)
if what == "js" and first:
    print("Traceback (most recent call last):", file=sys.stderr)
    print("  File somewhere", file=sys.stderr)
    print("torch.OutOfMemoryError: CUDA out of memory.", file=sys.stderr)
    sys.exit(1)
if what == "pearson" and first:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "vlc":
    def stop(*_):
        (out / "checkpoint").write_text("here")
        sys.exit(143)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "--hidden" in sys.argv else stop)
    (out / "metrics.csv").write_text("epoch,loss,knn,seconds\\n1,2.5,50.0,3\\n")
    end = time.monotonic() + 60
    while not (out / "checkpoint").exists() and time.monotonic() < end:
        time.sleep(0.02)
(out / "environment.json").write_text(json.dumps({k: v for k, v in os.environ.items() if "CUDA" in k or "OMP" in k}))
(out / "metrics.csv").write_text("epoch,loss,knn,seconds\\n1,2.5,50.0,3\\n2,2.0,60.0,1\\n")
seed = int(sys.argv[sys.argv.index("--seed") + 1]) if "--seed" in sys.argv else 0
if what != "neyman":
    (out / "results.json").write_text(json.dumps({"knn": 60.0 + seed, "linear": 70.0}))
(out / "report.html").write_text("page")
"""


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    """A program that does to a run folder what `fmicl train` does, in no time."""
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return [sys.executable, "-S", str(path)]


def grid(**values: tuple[Any, ...]) -> list[Any]:
    return cells(DIGITS, values)


def local(count: int = 2) -> LocalLauncher:
    return LocalLauncher([Slot(f"cuda:{i}", {"CUDA_VISIBLE_DEVICES": str(i)}) for i in range(count)])


def states(folder: Path) -> dict[str, str]:
    return {name: run["state"] for name, run in json.loads((folder / "sweep.json").read_text())["runs"].items()}


# ---- the grid


def parse(*words: str) -> Any:
    return tyro.cli(cli._COMMANDS, args=words).command


def test_every_field_of_every_recipe_may_have_several_values() -> None:
    for name, entry in RECIPES.items():
        command = parse("sweep", name)
        assert values_of(command.grid, entry.recipe) == {}
        assert [cell.recipe for cell in cells(entry.recipe, {})] == [entry.recipe]
    options = "--divergence kl js --seed 0 1 2 --blur 0 0.5 --crop-scale 0.2 1 0.4 1 --mu normalised 2 --download "
    options += "--shift None optimal --scale-learning-rate True False --mean 0.5 --std 0.5 --depth None 3"
    command = parse("sweep", "cifar10", *options.split())
    values = values_of(command.grid, RECIPES["cifar10"].recipe)
    assert values == {
        "divergence": ("kl", "js"), "seed": (0, 1, 2), "blur": (0.0, 0.5), "crop_scale": ((0.2, 1.0), (0.4, 1.0)),
        "mu": ("normalised", 2.0), "shift": (None, "optimal"), "download": (True,),
        "scale_learning_rate": (True, False), "mean": ((0.5,),), "std": ((0.5,),), "depth": (None, 3),
    }  # fmt: skip
    found = cells(RECIPES["cifar10"].recipe, values)
    assert len(found) == 2 * 3 * 2 * 2 * 2 * 2 * 2 * 2
    assert len({cell.name for cell in found}) == len(found)
    assert found[0].recipe.views.channels == 1
    assert {cell.recipe.seed for cell in found[: len(found) // 3]} == {0}  # a round for each seed


def test_the_help_of_a_sweep_is_that_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("sweep", "digits", "--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for leaf in leaves(Recipe):
        assert f"--{leaf.name.replace('_', '-')}" in text
        assert leaf.help, leaf.name


def test_a_child_is_told_exactly_its_cell() -> None:
    """Whatever differs from the recipe becomes options that `fmicl train` reads back as the very same settings."""
    changed = dataclasses.replace(
        DIGITS, data_dir=Path("a b"), download=True, checksum=False, second_blur=0.5, depth=3, mu="normalised",
        shift="optimal", baselines=False, precision="32", learning_rate=1e-05, encoder_momentum=0.9, seed=7,
        views=dataclasses.replace(DIGITS.views, crop_scale=(0.1, 0.9), mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0)),
    )  # fmt: skip
    assert parse("train", "digits", *arguments(changed, DIGITS)).recipe == changed
    back = dataclasses.replace(changed, shift=None, depth=None, baselines=True)
    assert parse("train", "digits", *arguments(back, DIGITS)).recipe == back


def test_another_kind_of_recipe_will_do() -> None:
    @dataclass(frozen=True)
    class Inner:
        """Inner.

        Args:
            size: How large.
        """

        size: int = 1

    @dataclass(frozen=True)
    class Base:
        rate: float = 0.1
        """How fast."""

    @dataclass(frozen=True)
    class Other(Base):
        corpus: Path | None = None
        pooling: Literal["cls", "mean"] = "cls"
        tasks: tuple[str, ...] = ("a", "b")
        inner: Inner = field(default_factory=Inner)
        seed: int = 0

    globals().update(Inner=Inner, Other=Other)  # where type hints are looked up
    found = cells(Other(), {"pooling": ("cls", "mean"), "size": (1, 2), "corpus": (Path("x/y.txt"),), "seed": (0,)})
    assert [cell.name for cell in found][:2] == ["pooling=cls,size=1", "pooling=cls,size=2"]
    assert found[-1].recipe == Other(corpus=Path("x/y.txt"), pooling="mean", inner=Inner(2))
    assert parse_case(["all", "tasks=a,c", "size=3"], Other()) == ("all", {"tasks": ("a", "c"), "size": 3})
    assert next(leaf for leaf in leaves(Other) if leaf.name == "size").help == "How large."
    assert next(leaf for leaf in leaves(Other) if leaf.name == "rate").help == "How fast."
    assert grid_of(Other()).tasks == ("a", "b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--epochs 2 0", "epochs must be positive, but it is 0"),
        ("--flip 0.5 2", "flip is a probability"),
        ("--seed 0 1 0", "--seed has 0 twice"),
        ("--divergence", "--divergence needs at least one value"),
        ("--divergence kl kll", "did you mean 'kl'"),
        ("--objective fmicl infonce --divergence kl js", "divergence has no part in it"),
        ("--device cpu cuda", "have it in common"),
        ("--parallel 0", "parallel must be positive"),
        ("--slurm partition=x", "--slurm goes with --launcher submitit"),
        ("--case SimCLR", "a case is NAME FIELD=VALUE"),
        ("--case objective=infonce x=1", "a case is NAME FIELD=VALUE"),
        ("--case SimCLR infonce", "'infonce' is not FIELD=VALUE"),
        ("--case SimCLR objektive=infonce", "did you mean objective"),
        ("--case SimCLR objective=info", "objective can't be 'info'"),
        ("--case A seed=1 --case A seed=2", "there are two cases A"),
        ("--case A divergence=js --divergence kl js", "divergence is set by case A and by --divergence"),
        ("--case A divergence=js --case B divergence=js", "A and B would train the same thing"),
        ("--case A divergence=js divergence=kl", "says divergence twice"),
        ("--data-dir /nowhere", "there is no folder /nowhere"),
        ("--batch-size 256 --devices 3", "batch_size is 256 over 3 process(es)"),
        ("--method moco --queue 4096 10", "queue (10) must hold at least one batch (256)"),
        ("cifar10 --seed 0 1", "is read from a folder: say which one with --data-dir"),
        ("wikipedia --seed 0 1", "which text to train on is not said: --data FILE"),
        ("--out FILE", "is a file, not the folder of a sweep"),
        ("--out FULL", "is no sweep"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(
    options: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "thesis.tex").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    recipe = [] if options.startswith(("cifar10", "wikipedia")) else ["digits"]
    assert cli.main(["sweep", *recipe, *options.split()]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("fmicl: error: ")
    assert sorted(tmp_path.rglob("*")) == before


# ---- runs


def test_runs_that_die_are_reported_the_others_go_on_and_again_is_all_it_takes(
    fake: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    found = grid(divergence=("kl", "js", "pearson", "neyman"), seed=(0, 1))
    assert Sweep("digits", DIGITS, found, folder, program=fake)(local()) == 1
    shown = capsys.readouterr()
    saved = json.loads((folder / "sweep.json").read_text())["runs"]
    for seed in (0, 1):
        assert saved[f"divergence=kl,seed={seed}"]["state"] == "finished"
        assert saved[f"divergence=js,seed={seed}"]["error"] == "torch.OutOfMemoryError: CUDA out of memory."
        assert saved[f"divergence=pearson,seed={seed}"]["error"] == "killed by SIGKILL (out of memory?)"
        assert saved[f"divergence=neyman,seed={seed}"]["error"] == "ended without results.json"
    assert "failed: divergence=js,seed=0: torch.OutOfMemoryError: CUDA out of memory." in shown.out
    assert "6 of 8 runs failed; the same command tries them again" in shown.err
    assert {json.loads(p.read_text())["CUDA_VISIBLE_DEVICES"] for p in folder.rglob("environment.json")} == {"0", "1"}

    assert Sweep("digits", DIGITS, found, folder, program=fake)(local()) == 1
    assert "sweep of 8 runs" in (shown := capsys.readouterr()).out
    assert "2 finished before" in shown.out
    assert "divergence=js,seed=0: started" in shown.out
    assert "2 of 8 runs failed" in shown.err  # neyman never leaves results
    tries = {path.parent.name: len(path.read_text()) for path in folder.rglob("tries")}
    assert tries["divergence=kl,seed=0"] == 1
    assert tries["divergence=js,seed=0"] == tries["divergence=pearson,seed=1"] == 2
    assert "CUDA out of memory" in (folder / "divergence=js,seed=0.log").read_text()  # the log keeps all starts
    saved = json.loads((folder / "sweep.json").read_text())
    assert saved["runs"]["divergence=js,seed=0"]["error"] is None
    assert [row for row in saved["summary"] if row["group"] == "divergence=js"] == [
        {
            "group": "divergence=js",
            "runs": 2,
            "k-NN": {"mean": 60.5, "std": pytest.approx(0.5**0.5), "values": [60.0, 61.0]},
            "linear": {"mean": 70.0, "std": 0.0, "values": [70.0, 70.0]},
        }
    ]
    assert "60.50 ± 0.71" in shown.out


def test_a_sweep_may_grow_but_not_change(fake: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"

    def sweep(**values: tuple[Any, ...]) -> int:
        return Sweep("digits", DIGITS, grid(**values), folder, program=fake, machine=frozenset({"workers"}))(local())

    assert sweep(divergence=("kl", "tsallis")) == 0
    assert sweep(divergence=("kl", "tsallis"), seed=(0, 1), workers=(0,)) == 0
    assert set(states(folder)) == {
        "divergence=kl", "divergence=tsallis", "divergence=kl,seed=1", "divergence=tsallis,seed=1"
    }  # fmt: skip
    assert len((folder / "divergence=kl" / "tries").read_text()) == 1  # seed 0 is the recipe's own: it was there
    assert sweep(divergence=("reverse_kl", "jeffrey")) == 0
    assert len(states(folder)) == 6  # what is not in the grid stays on record
    with pytest.raises(ValueError, match=r"a run divergence=kl with other settings \(epochs was the recipe's, is 3"):
        sweep(divergence=("kl", "js"), epochs=(3,))
    with pytest.raises(ValueError, match="is a sweep of digits, not of cifar10"):
        Sweep("cifar10", RECIPES["cifar10"].recipe, cells(RECIPES["cifar10"].recipe, {}), folder)


def test_what_the_runs_differ_in_tells_them_apart_whatever_it_is(fake: list[str], tmp_path: Path) -> None:
    """Also a setting of the machine's, which otherwise may change when a sweep goes on."""
    found = grid(precision=("32", "bf16"))
    machine = not_told_apart_by(DIGITS, found)
    for _ in range(2):
        sweep = Sweep("digits", DIGITS, found, tmp_path / "sweep", program=fake, machine=machine)
        assert [run.name for run in sweep.runs] == ["precision=32", "precision=bf16"]
        assert sweep(local()) == 0
    assert machine >= {"workers", "device"}


@pytest.mark.parametrize(
    ("recipe", "before", "after"),
    [
        ("images", {"data_dir": ("a",)}, {"data_dir": ("b",)}),
        ("wikipedia", {"data": ("a.txt",)}, {"data": ("b.txt",)}),
        ("wikipedia", {"data": ("a.txt",)}, {"data": ("a.txt",), "sts": ("sts",)}),
    ],
)
def test_other_data_is_another_sweep(
    tmp_path: Path, recipe: str, before: dict[str, tuple[str]], after: dict[str, tuple[str]]
) -> None:
    """The results of one data set are never shown as those of another."""
    default: Any = {**RECIPES, **TEXT_RECIPES}[recipe].recipe

    def sweep(values: dict[str, tuple[str]], out: Path | None = None) -> Sweep:
        found = cells(default, {name: tuple(map(Path, paths)) for name, paths in values.items()})
        machine = not_told_apart_by(default, found)
        return Sweep(recipe, default, found, find_folder(recipe, found, out, machine, tmp_path), machine=machine)

    first = sweep(before)
    first.save()
    assert sweep(before).folder == first.folder
    assert sweep(after).folder != first.folder
    with pytest.raises(ValueError, match="with other settings"):
        sweep(after, first.folder)


def test_the_same_grid_finds_its_folder(fake: list[str], tmp_path: Path) -> None:
    one, other = grid(seed=(0, 1)), grid(seed=(0, 2))
    first = find_folder("digits", one, None, root=tmp_path / "sweeps")
    assert first.name == "digits-001"
    Sweep("digits", DIGITS, one, first, program=fake)(local())
    assert find_folder("digits", one, None, root=tmp_path / "sweeps") == first
    assert find_folder("digits", other, None, root=tmp_path / "sweeps").name == "digits-002"
    assert find_folder("digits", one, tmp_path / "x") == tmp_path / "x"


def start_in_background(fake: list[str], folder: Path, *extra: str) -> subprocess.Popen[str]:
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from fmicl.grid import cells
        from fmicl.launchers import LocalLauncher, Slot
        from fmicl.recipes import RECIPES
        from fmicl.sweep import Sweep
        from fmicl.sweep_folder import locked
        recipe, folder = RECIPES["digits"].recipe, Path({str(folder)!r})
        found = cells(recipe, {{"divergence": ("kl", "vlc"), "seed": (0, 1), {", ".join(extra)}}})
        with locked(folder) as lock:
            sweep = Sweep("digits", recipe, found, folder, program={fake!r})
            sys.exit(sweep(LocalLauncher([Slot("cpu", {{}})] * 2, keep_open=lock)))
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*vlc*/metrics.csv"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_runs_with_a_checkpoint(
    number: signal.Signals, code: int, fake: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    process = start_in_background(fake, folder)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "stopping 2 runs" in out
    assert err == f"fmicl: stopped; the same command goes on where the runs are (--out {folder})\n"
    assert sorted(states(folder).values()) == ["finished", "finished", "stopped", "stopped"]
    assert len(list(folder.glob("*vlc*/checkpoint"))) == 2
    found = grid(divergence=("kl", "vlc"), seed=(0, 1))
    assert Sweep("digits", DIGITS, found, folder, program=fake)(local()) == 0
    assert set(states(folder).values()) == {"finished"}


def test_a_second_signal_ends_runs_that_do_not_listen(fake: list[str], tmp_path: Path) -> None:
    process = start_in_background(fake, tmp_path / "sweep", '"hidden": (32,)')
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_runs_that_outlive_a_killed_sweep_keep_others_out(fake: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    process = start_in_background(fake, folder)
    process.kill()
    process.communicate()
    with pytest.raises(ValueError, match="a run that outlived one, is at work"), locked(folder):
        pass
    for path in folder.glob("*vlc*/"):
        (path / "checkpoint").write_text("")  # they come to their end
    deadline = time.monotonic() + 30
    while len(list(folder.glob("*vlc*/report.html"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    with locked(folder):
        assert Sweep("digits", DIGITS, grid(divergence=("kl", "vlc"), seed=(0, 1)), folder, program=fake)(local()) == 0


def test_a_program_that_is_not_there_fails_its_run(tmp_path: Path) -> None:
    assert Sweep("digits", DIGITS, grid(), tmp_path / "s", program=["/nowhere/python"])(local()) == 1
    assert "could not be started" in json.loads((tmp_path / "s" / "sweep.json").read_text())["runs"]["run"]["error"]


def test_two_runs_of_digits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The whole of it: real runs at once, and once more without training any."""
    command = ["sweep", "digits", "--case", "SimCLR", "objective=infonce", "--case", "JS", "divergence=js"]
    command += ["--epochs", "1", "--hidden", "16", "--baselines", "False", "--device", "cpu", "--parallel", "2"]
    command += ["--monitor-every", "1", "--out", str(tmp_path / "sweep")]
    assert cli.main(command) == 0
    for name, objective in (("SimCLR", "infonce"), ("JS", "fmicl")):
        told = json.loads((tmp_path / "sweep" / name / "settings.json").read_text())
        assert told["command"][:5] == ["python", "-m", "fmicl", "train", "digits"]
        settings = told["settings"]
        assert (settings["objective"], settings["hidden"], settings["baselines"]) == (objective, 16, False)
    saved = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [row["group"] for row in saved["summary"]] == ["SimCLR", "JS"]
    assert all(row["k-NN"]["mean"] > 50 for row in saved["summary"])
    assert saved["runs"]["JS"]["epoch"] == 1
    assert saved["runs"]["JS"]["attempts"] == 1
    capfd.readouterr()
    assert cli.main(command) == 0
    assert "2 finished before" in capfd.readouterr().out
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["runs"]["JS"]["attempts"] == 1


# ---- devices


def test_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launchers, "_processors", lambda: 8)
    assert local_slots(3, device="cpu") == [Slot("cpu", {"OMP_NUM_THREADS": "2"})] * 3
    assert local_slots(20, device="cpu")[0].environment == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert local_slots(3, device="cpu")[0].environment == {}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert [slot.where for slot in local_slots(2)] == ["cuda:0", "cuda:1", "cuda:2"] * 2
    assert [dict(slot.environment) for slot in local_slots(1, devices=2)] == [{"CUDA_VISIBLE_DEVICES": "0,1"}]
    with pytest.raises(ValueError, match="a run takes 4 GPUs"):
        local_slots(1, devices=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-a,5")
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in local_slots()] == ["7", "GPU-a", "5"]


# ---- submitit


class FakeJob:
    def __init__(self, folder: Path, job_id: str, tasks: object = (0,)) -> None:
        del tasks
        self.job_id, self.paths = job_id, types.SimpleNamespace(stdout=folder / f"{job_id}_0_log.out")
        self.result: Any = None
        self.cancelled = False

    def work(self, function: TrainJob) -> None:
        self.result = function()

    def done(self, force_check: bool = False) -> bool:
        del force_check
        return self.result is not None or int(self.job_id) < 100  # a cluster forgets old jobs

    def results(self) -> list[int]:
        if self.result is None:
            raise RuntimeError("Job 7 has not produced any output (state: NODE_FAIL)\n------\nmore")
        return [self.result]

    def cancel(self) -> None:
        self.cancelled = True


class FakeExecutor:
    made: list[FakeExecutor] = []  # noqa: RUF012

    def __init__(self, folder: Path, cluster: str, **options: Any) -> None:
        self.folder, self.cluster, self.options = folder, cluster, options
        self.parameters: dict[str, Any] = {}
        self.names: list[str] = []
        FakeExecutor.made.append(self)

    def update_parameters(self, **parameters: Any) -> None:
        if "slurm_colour" in parameters:
            raise NameError("Unknown argument 'colour' for executor 'slurm' in parameter 'slurm_colour'.\nmore")
        self.parameters.update(parameters)

    def submit(self, function: TrainJob) -> FakeJob:
        self.names.append(self.parameters["name"])
        job = FakeJob(self.folder, str(100 + len(self.names)))
        threading.Thread(target=job.work, args=(function,)).start()
        return job


@pytest.fixture
def submitit(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """As much of submitit as is used here."""
    module, helpers = types.ModuleType("submitit"), types.ModuleType("submitit.helpers")
    FakeExecutor.made.clear()
    for name, value in {"AutoExecutor": FakeExecutor, "SlurmJob": FakeJob, "helpers": helpers}.items():
        setattr(module, name, value)
    helpers.DelayedSubmission = lambda function: ("again", function)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "submitit", module)
    monkeypatch.setitem(sys.modules, "submitit.helpers", helpers)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return module


def test_a_job_for_each_run(submitit: types.ModuleType, fake: list[str], tmp_path: Path) -> None:
    del submitit
    folder = tmp_path / "sweep"
    found = grid(divergence=("kl", "js"), seed=(0, 1))
    options = slurm_options(["partition=gpu", "time=8:00:00", "cpus-per-task=4", "account=lab-7", "mem_gb=16"])

    def again() -> int:
        launcher = SubmititLauncher(folder / "jobs", options, devices=2, limit=2)
        return Sweep("digits", DIGITS, found, folder, program=fake)(launcher)

    assert again() == 1
    executor = FakeExecutor.made[0]
    assert executor.parameters == {
        "tasks_per_node": 2, "gpus_per_node": 2, "slurm_partition": "gpu", "slurm_time": 480, "cpus_per_task": 4,
        "slurm_account": "lab-7", "mem_gb": 16.0, "stderr_to_stdout": True, "name": "fmicl-divergence=js,seed=1",
    }  # fmt: skip
    assert (executor.cluster, executor.options) == ("slurm", {"slurm_max_num_timeout": 10_000})
    assert len(executor.names) == 4
    saved = json.loads((folder / "sweep.json").read_text())["runs"]
    assert saved["divergence=kl,seed=0"]["job"] == "101"
    assert saved["divergence=kl,seed=0"]["log"] == "jobs/101_0_log.out"
    assert states(folder)["divergence=js,seed=0"] == "failed"
    assert again() == 0
    assert FakeExecutor.made[1].names == ["fmicl-divergence=js,seed=0", "fmicl-divergence=js,seed=1"]


def test_a_sweep_that_is_stopped_leaves_its_jobs_and_finds_them_again(
    submitit: types.ModuleType, fake: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    found = grid(divergence=("vlc",))
    sweep = Sweep("digits", DIGITS, found, folder, program=fake)
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    assert sweep(SubmititLauncher(folder / "jobs", {})) == 130
    assert "its jobs go on; the same command watches them again, `scancel 101` ends them" in capsys.readouterr().err
    assert states(folder) == {"run": "running"}
    assert FakeExecutor.made[0].parameters["timeout_min"] == 1440

    class Ended(FakeJob):
        def done(self, force_check: bool = False) -> bool:
            if force_check:
                return False
            (folder / "run" / "checkpoint").write_text("")  # the job comes to its end
            self.result = 0 if (folder / "run" / "results.json").exists() else None
            return self.result is not None

    submitit.SlurmJob = Ended  # type: ignore[attr-defined]
    assert Sweep("digits", DIGITS, found, folder, program=fake)(SubmititLauncher(folder / "jobs", {})) == 0
    assert len((folder / "run" / "tries").read_text()) == 1
    assert "job 101 goes on" in capsys.readouterr().out
    lost = launchers._Job(FakeJob(folder, "7"))
    assert lost.poll() == 1
    assert lost.error == "Job 7 has not produced any output (state: NODE_FAIL) more"


def test_a_preempted_job_stops_its_run_and_goes_on(submitit: types.ModuleType, fake: list[str], tmp_path: Path) -> None:
    del submitit
    out = tmp_path / "run"
    job = TrainJob([*fake, "train", "digits", "--divergence", "vlc", "--out", str(out), "--resume"])
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(job()))
    thread.start()
    deadline = time.monotonic() + 30
    while not (out / "metrics.csv").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    word, once_more = job.checkpoint()
    thread.join()
    assert (word, codes, (out / "checkpoint").exists()) == ("again", [143], True)
    assert once_more() == 0
    assert (out / "results.json").exists()


def test_a_jobs_run_is_stopped_from_a_signals_handler(fake: list[str], tmp_path: Path) -> None:
    """As submitit does it: in the main thread, which waits for the run at that moment."""
    out = tmp_path / "run"
    script = textwrap.dedent(f"""
        import signal, sys, types
        helpers = types.ModuleType("submitit.helpers")
        helpers.DelayedSubmission = lambda job: job
        sys.modules |= {{"submitit": types.ModuleType("submitit"), "submitit.helpers": helpers}}
        from fmicl.launchers import TrainJob
        job = TrainJob({[*fake, "train", "digits", "--divergence", "vlc", "--out", str(out), "--resume"]!r})
        def preempted(*_):
            sys.exit(job.checkpoint()())
        signal.signal(signal.SIGUSR2, preempted)
        job()
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (out / "metrics.csv").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=20) == 0
    assert (out / "tries").read_text() == "xx"
    assert (out / "results.json").exists()


def test_options_that_submitit_refuses(submitit: types.ModuleType, tmp_path: Path) -> None:
    del submitit
    with pytest.raises(ValueError, match="submitit refuses the options of --slurm: Unknown argument 'colour'"):
        SubmititLauncher(tmp_path, slurm_options(["colour=red"]))
    for word in ("gpu", "=3", "time="):
        with pytest.raises(ValueError, match="--slurm takes KEY=VALUE"):
            slurm_options([word])
    with pytest.raises(ValueError, match="is no time"):
        slurm_options(["time=soon"])
    times = {"90": 90, "90:30": 91, "1:30:00": 90, "2-0": 2880, "1-1:1": 1501, "0:10": 1}
    assert {text: slurm_options([f"time={text}"])["slurm_time"] for text in times} == times


def test_without_submitit_or_slurm_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert cli.main(["sweep", "digits", "--launcher", "submitit"]) == 2
    assert capsys.readouterr().err == ("fmicl: error: --launcher submitit needs submitit: pip install 'fmicl[slurm]'\n")
    monkeypatch.setitem(sys.modules, "submitit", types.ModuleType("submitit"))
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert cli.main(["sweep", "digits", "--launcher", "submitit"]) == 2
    assert "finds no SLURM here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_real_submitit_on_this_machine(fake: list[str], tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'fmicl[slurm]'")
    folder = tmp_path / "sweep"
    sweep = Sweep("digits", DIGITS, grid(divergence=("kl", "js")), folder, program=fake)
    launcher = SubmititLauncher(folder / "jobs", {"timeout_min": 2}, gpu=False, cluster="local")
    assert sweep(launcher) == 1
    assert states(folder) == {"divergence=kl": "finished", "divergence=js": "failed"}
    saved = json.loads((folder / "sweep.json").read_text())["runs"]["divergence=js"]
    assert saved["error"] == "torch.OutOfMemoryError: CUDA out of memory."


def test_the_last_error_is_of_the_last_start(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("ValueError: old\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("epoch 1\nfmicl: error: the loss is nan\n")
    assert last_error(log, start, 1) == "the loss is nan"
    log.write_text("ValueError: old\nsome words\n")
    assert last_error(log, start, 1) == "some words"
    assert last_error(tmp_path / "none", 0, 3) == "exit code 3, without a word"
    assert last_error(log, 0, -15) == "killed by SIGTERM"
