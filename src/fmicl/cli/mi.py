"""`fmicl mi X.npy Y.npy`: f-mutual information of two arrays by several estimators, with intervals."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fmicl.cli.command import command
from fmicl.utils.files import check_new_file, write_json

if TYPE_CHECKING:
    from torch import Tensor

CHOSEN = ("donsker_varadhan", "infonce", "f_dime")
"""Estimators of the table, unless others are named: a bound, one with little variance, a plug-in."""


@dataclass(frozen=True)
class MI:
    """Estimate the f-mutual information of paired samples by several estimators, each with a 95 % interval."""

    x: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="X.npy")]
    """Array (N, ...) of the first variable; integers are categories, floats are continuous."""
    y: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="Y.npy")]
    """Array (N, ...) of the second variable, row by row with the first."""
    divergence: str = "kl"
    """The f-divergence, by name (fmicl.list_divergences()): kl is Shannon's mutual information, in nats."""
    estimator: tuple[str, ...] = CHOSEN
    """Estimators of the table: bounds, classifiers and plug-ins; an unknown name lists all."""
    critic: str = "copula"
    """Function that is trained to tell joint from independent pairs; an unknown name lists all."""
    marginals: Literal["normal", "standard"] = "normal"
    """What is done to continuous columns first: ranks mapped to a Gaussian, or mean 0 and variance 1."""
    steps: int = 800
    """Training steps at most, of each critic."""
    seed: int = 0
    """Seed of folds, weights and batches."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"
    """Where to compute."""
    json: Path | None = None
    """File to write the estimates to, which must not exist."""

    def __call__(self) -> None:
        """Estimate, and print the table and the warnings."""
        if self.json is not None:
            check_new_file(self.json, "take another --json")
        from fmicl.divergences import divergence
        from fmicl.information.critics import CRITICS
        from fmicl.information.estimation import Estimate, Training, estimate
        from fmicl.information.estimators import make_estimator
        from fmicl.information.limits import warnings_of

        f, _ = divergence(self.divergence), CRITICS[self.critic]
        for name in self.estimator:
            make_estimator(name)
        if not self.estimator:
            raise ValueError("--estimator needs at least one name")
        x, y = read_array(self.x), read_array(self.y)
        if len(x) != len(y):
            raise ValueError(
                f"{self.x} has {len(x)} rows and {self.y} has {len(y)}: row i of both must belong to the same sample"
            )
        found: dict[str, Estimate] = {}
        print(
            f"{len(x)} samples, x {_shape(x)}, y {_shape(y)}; {f.name} information"
            + (" in nats" if f.name == "kl" else "")
        )
        print(f"{'estimator':<18}{'estimate':>10}   95 % interval")
        for name in self.estimator:
            with _bar(name) as progress:
                found[name] = estimate(
                    x, y, f, name, self.critic, marginals=self.marginals, seed=self.seed, device=self.device,
                    progress=progress, training=Training(steps=self.steps),
                )  # fmt: skip
            value = found[name]
            print(f"{name:<18}{value.value:>10.4f}   {value.low:.4f} to {value.high:.4f}", flush=True)
        warnings = warnings_of(f, found, len(x))
        for line in warnings:
            print(f"warning: {line}", file=sys.stderr)
        if self.json is not None:
            self._write(self.json, f.name, found, warnings, len(x))
            print(f"estimates -> {self.json}")

    def _write(self, out: Path, divergence: str, found: dict[str, Any], warnings: list[str], samples: int) -> None:
        from fmicl.utils.provenance import command_line, commit, versions

        rows = {name: {key: _finite(value) for key, value in each._asdict().items()} for name, each in found.items()}
        record = {
            "divergence": divergence, "samples": samples, "critic": self.critic, "marginals": self.marginals,
            "seed": self.seed, "estimates": rows, "warnings": warnings, "command": command_line(),
            "versions": versions(["torch"]), "commit": commit(),
        }  # fmt: skip
        write_json(out, record, overwrite=False)


def read_array(path: Path) -> Tensor:
    """A numeric array of an .npy file, as a tensor.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no .npy file of numbers, has no rows, or has NaN or infinite values.
    """
    import numpy as np

    from fmicl.information.preparation import as_samples

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not an .npy file of numbers: {error}") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} holds several arrays: save one with numpy.save")
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{path} must hold real numbers, but its type is {array.dtype}")
    if array.dtype.kind == "u":
        array = array.astype(np.int64)
    if array.ndim == 0:
        raise ValueError(f"{path} must have shape (N, ...) with N samples, but it is a single number, of shape ()")
    return as_samples(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))), str(path))


def _shape(values: Tensor) -> str:
    columns = " x ".join(map(str, values.shape[1:])) or "1"
    return f"{columns} ({'continuous' if values.is_floating_point() else 'categories'})"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[float], None] | None]:
    """A progress bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as display:
        task = display.add_task(name, total=1.0)
        yield lambda share: display.update(task, completed=share)


run = command("mi", MI)
