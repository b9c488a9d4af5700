"""The linear probe's solver: time of a fit by torch.optim.LBFGS and by scikit-learn, to the same minimum.

    python benchmarks/probe.py --json FILE      # 50,000 x 512, 10 classes: minutes on two CPU cores
    python benchmarks/probe.py --quick          # 5,000 x 128

All solvers minimise the same function, the mean cross-entropy of W x + b plus decay / 2 |W|^2, from zero, on the
features as `linear_probe` prepares them (centred, scaled by one number, in the eigenbasis of their covariance):

- probe: what `linear_probe` uses, torch.optim.LBFGS with strong Wolfe line search and a diagonal preconditioner, its
  gradient for 2,048 samples at a time on a CPU and with logits of shape (classes, rows);
- all samples at once: the same, by autograd through torch.nn.functional.cross_entropy of all samples;
- not preconditioned: as probe, in the coordinates of W itself;
- scikit-learn: LogisticRegression(solver="lbfgs").

The records in results/benchmarks (probe-cpu.json, probe-cpu-sklearn.json, commit 580404d) have one more: an L-BFGS of
our own with few host-device synchronisations, which the probe used until then.

Features are synthetic: Gaussian classes whose covariance has eigenvalues k^-1.5 in a random basis, class means in the
leading directions, an offset and a scale, so that 85 to 90 % of test samples are classified correctly. Objective and
gradient at the end are evaluated in float64. Times are the minimum over repetitions, which take turns; `cpu_seconds` is
the time of the processor in all threads. `seconds_to_1e-5` is the time until the objective is within 1e-5 of the lowest
one that any solver reached. Reads are transfers of numbers from the device to the host: on a GPU, each one waits for
all work that was queued before it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]  # this tree, installed or not

import torch  # noqa: E402
from measure import provenance  # noqa: E402
from sklearn.linear_model import LogisticRegression as SklearnRegression  # noqa: E402
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped, unused-ignore]  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from fmicl.evaluation import probes  # noqa: E402
from fmicl.evaluation.logistic import LogisticRegression  # noqa: E402
from fmicl.utils.files import write_json  # noqa: E402
from fmicl.utils.numerics import exact_matmul  # noqa: E402

CLASSES = 10
TEST = 10_000
DECAYS = (1e-2, 1e-5)
LIMIT = 300  # iterations, as in linear_probe
CLOSE = 1e-5
SPECTRUM = 1.5  # exponent of the decay of eigenvalues
PACKAGES = ("torch", "numpy", "scipy", "scikit-learn")


# --- solvers ---------------------------------------------------------------------------------------------------------


class Probe(LogisticRegression):
    """What `linear_probe` uses, with a record of its evaluations."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.started: list[float] = []
        self.losses: list[Tensor] = []

    def _objective(self, weight: Tensor, bias: Tensor, decay: float) -> tuple[Tensor, Tensor, Tensor]:
        self.started.append(time.perf_counter())
        found = self._evaluate(weight, bias, decay)
        self.losses.append(found[0].detach())
        return found

    def _evaluate(self, weight: Tensor, bias: Tensor, decay: float) -> tuple[Tensor, Tensor, Tensor]:
        return super()._objective(weight, bias, decay)


class NotPreconditioned(Probe):
    def fit(self, decay: float, max_iterations: int) -> bool:
        kept = self.spectrum
        self.spectrum = torch.full_like(kept, 1 - 2 * decay)  # so that all coordinates have the same scale
        try:
            return super().fit(decay, max_iterations)
        finally:
            self.spectrum = kept


class AtOnce(Probe):
    def _evaluate(self, weight: Tensor, bias: Tensor, decay: float) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            # contiguous: as the views that they are, linear is five times slower on a CPU
            leaves = weight.detach().contiguous().requires_grad_(), bias.detach().contiguous().requires_grad_()
            logits = functional.linear(self.features, leaves[0], leaves[1].squeeze(1))
            loss = functional.cross_entropy(logits, self.labels) + decay / 2 * leaves[0].square().sum()
            by_weight, by_bias = torch.autograd.grad(loss, leaves)
        return loss.detach(), by_weight, by_bias


class Sklearn(Probe):
    """scikit-learn, which evaluates the objective itself and begins at zero."""

    def fit(self, decay: float, max_iterations: int) -> bool:
        # scikit-learn sums where we average: C = 1 / (N decay).
        x, y = self.features.cpu().numpy(), self.labels.cpu().numpy()
        model = SklearnRegression(C=1 / (len(x) * decay), tol=1e-5, max_iter=4 * max_iterations)
        with threadpool_limits(torch.get_num_threads()):
            model.fit(x, y)
        self.weight = torch.from_numpy(model.coef_).to(self.features)
        self.bias = torch.from_numpy(model.intercept_).to(self.features).unsqueeze(1)
        self.iterations = int(model.n_iter_[0])
        return self.iterations < 4 * max_iterations


SOLVERS: dict[str, type[Probe]] = {
    "probe": Probe,
    "all samples at once": AtOnce,
    "not preconditioned": NotPreconditioned,
    "scikit-learn": Sklearn,
}
PROBES = ("probe", "all samples at once")
ONCE = ("not preconditioned", "scikit-learn")  # slow


# --- data ------------------------------------------------------------------------------------------------------------


def features(count: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """(count + TEST, d) float32 features, as an encoder might give them, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.arange(1, d + 1).float().pow(-SPECTRUM / 2)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator))[0]
    leading = torch.exp(-torch.arange(d).float() / 24)  # share of class means in each direction, relative to the spread
    means = 0.85 * torch.randn(CLASSES, d, generator=generator) * leading * spread
    labels = torch.randint(CLASSES, (count + TEST,), generator=generator)
    x = means[labels] + torch.randn(count + TEST, d, generator=generator) * spread
    return 3.0 * (x @ basis.T + 0.5), labels


# --- measurement -----------------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts transfers of numbers to the host: .item() and its kind, explicit or not, and .tolist()."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(named or {}))

    def __enter__(self) -> Reads:
        usual = Tensor.tolist

        def counted(tensor: Tensor) -> Any:
            self.count += 1
            return usual(tensor)

        self.patch = mock.patch.object(Tensor, "tolist", counted)
        self.patch.start()
        super().__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        return self

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)  # type: ignore[no-untyped-call, unused-ignore]
        self.patch.stop()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    synchronise(device)
    start = time.perf_counter()
    found = call()
    synchronise(device)
    return time.perf_counter() - start, found


def exact(model: LogisticRegression, decay: float) -> tuple[float, float, float]:
    """Objective, and largest entries of the gradient by W and b and in preconditioned coordinates, in float64."""
    x = LogisticRegression(model.features.double(), model.labels, CLASSES, model.spectrum.double())
    with torch.no_grad():
        loss, *gradients = x._objective(model.weight.double(), model.bias.double(), decay)
    gradient = torch.cat(gradients, dim=1)
    scale = torch.cat([x.spectrum / 2 + decay, x.spectrum.new_tensor([0.5])]).rsqrt()
    return float(loss), float(gradient.abs().max()), float((scale * gradient).abs().max())


def accuracy(model: LogisticRegression, x: Tensor, labels: Tensor) -> float:
    return 100.0 * float((model.logits(x).argmax(dim=1) == labels).double().mean())


def fits(data: tuple[Tensor, ...], decay: float, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """A row for each solver: the best of the repetitions, which take turns."""
    x, y, test, truth, spectrum = data
    rows: dict[str, dict[str, Any]] = {}
    traces: dict[str, list[tuple[float, float]]] = {}
    for turn in range(repeats):
        for name in names:
            if turn and name in ONCE:
                continue
            model = SOLVERS[name](x, y, CLASSES, spectrum)
            start, processor_start = time.perf_counter(), time.process_time()
            seconds, converged = timed(lambda model=model: model.fit(decay, LIMIT), x.device)  # type: ignore[misc]
            busy = time.process_time() - processor_start
            print(
                f"{name}, decay {decay:.0e}: {seconds:.2f} s, {busy:.2f} s of the processor",
                file=sys.stderr,
                flush=True,
            )
            if name in rows:
                rows[name]["cpu_seconds"] = min(busy, rows[name]["cpu_seconds"])
                rows[name]["all_seconds"].append(round(seconds, 4))
                if seconds >= rows[name]["seconds"]:
                    continue
            # an evaluation has ended when the next one begins
            ends = [*model.started[1:], start + seconds]
            traces[name] = [(end - start, float(loss)) for end, loss in zip(ends, model.losses, strict=False)]
            objective, gradient, preconditioned = exact(model, decay)
            before = rows.get(name, {"all_seconds": [round(seconds, 4)], "cpu_seconds": busy})
            rows[name] = {
                "solver": name,
                "weight_decay": decay,
                "seconds": seconds,
                "all_seconds": before["all_seconds"],
                "cpu_seconds": before["cpu_seconds"],
                "converged": converged,
                "evaluations": len(model.losses) or None,
                "iterations": getattr(model, "iterations", None),
                "objective": objective,
                "gradient": gradient,
                "gradient_preconditioned": preconditioned,
                "train_accuracy": accuracy(model, x, y),
                "test_accuracy": accuracy(model, test, truth),
            }
    lowest = min(row["objective"] for row in rows.values())
    for name, row in rows.items():
        row["above_lowest"] = row["objective"] - lowest
        reached = [(at, k + 1) for k, (at, loss) in enumerate(traces[name]) if loss <= lowest + CLOSE]
        row["seconds_to_1e-5"], row["evaluations_to_1e-5"] = reached[0] if reached else (None, None)
    return list(rows.values())


def reads(data: tuple[Tensor, ...], decay: float) -> dict[str, Any]:
    """Transfers to the host in a fit."""
    x, y, _, _, spectrum = data
    model = Probe(x, y, CLASSES, spectrum)
    with Reads() as seen:  # type: ignore[no-untyped-call, unused-ignore]
        model.fit(decay, LIMIT)
    evaluations = len(model.losses)
    return {
        "weight_decay": decay,
        "evaluations": evaluations,
        "reads": seen.count,
        "reads_per_evaluation": round(seen.count / evaluations, 2),
    }


def whole(count: int, d: int, seed: int, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """`linear_probe` with its usual grid of weight decays, with each solver in turn."""
    x, y = (value.to(device) for value in features(count, d, seed))
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        for name in PROBES:
            with mock.patch.object(probes, "LogisticRegression", SOLVERS[name]):
                seconds, result = timed(lambda: probes.linear_probe(x[:count], y[:count], x[count:], y[count:]), device)
            row = rows.setdefault(name, {"solver": name, "all_seconds": []})
            row["all_seconds"].append(round(seconds, 3))
            print(f"linear_probe, {name}: {seconds:.2f} s, {result.accuracy:.2f} %", flush=True)
            row["seconds"] = min(row["all_seconds"])
            row["test_accuracy"], row["weight_decay"] = result.accuracy, result.weight_decay
            row["validation_accuracy"], row["converged"] = result.validation_accuracy, result.converged
    return list(rows.values())


# --- record ----------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    names = ["decay", "solver", "s", "CPU s", "s to 1e-5", "evaluations", "objective", "above lowest", "gradient"]
    names += ["train %", "test %"]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        near = row["seconds_to_1e-5"]
        cells = (
            f"{row['weight_decay']:.0e}", row["solver"], f"{row['seconds']:.3f}",
            f"{row['cpu_seconds']:.3f}", "-" if near is None else f"{near:.3f}",
            row["evaluations"] or f"({row['iterations']} iterations)",
            f"{row['objective']:.7f}", f"{row['above_lowest']:.1e}", f"{row['gradient']:.1e}",
            f"{row['train_accuracy']:.2f}", f"{row['test_accuracy']:.2f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 x 128 in place of 50,000 x 512")
    parser.add_argument("--size", type=int, nargs=2, metavar=("N", "D"), help="training samples and dimensions")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions, of which the fastest counts (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of the CPU (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the features (default: 0)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="where to fit; CUDA if there is one")
    parser.add_argument("--only", nargs="+", choices=list(SOLVERS), help="only these solvers")
    parser.add_argument("--no-probe", action="store_true", help="single fits only, not the whole of linear_probe")
    parser.add_argument("--json", type=Path, help="file to write all numbers to")
    parser.add_argument("--commit", help="of the tree, where git is not there to ask")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    count, d = options.size or ((5_000, 128) if options.quick else (50_000, 512))
    x, y = (value.to(device) for value in features(count, d, options.seed))
    prepare, (train, test, spectrum) = timed(lambda: probes._standardise(x[:count], x[count:]), device)
    data = train, y[:count], test, y[count:], spectrum
    record: dict[str, Any] = {
        **provenance(device.type, options.commit, PACKAGES),
        "threads": options.threads,
        "seed": options.seed,
        "repeats": options.repeats,
        "size": {"train": count, "test": TEST, "d": d, "classes": CLASSES},
        "prepare_seconds": prepare,  # centring, eigenbasis: common to all
    }
    with exact_matmul(device):
        # threads and libraries are loaded by something small
        small = train[:500].contiguous(), y[:500], test[:500], y[count : count + 500], spectrum
        fits(small, 1e-1, options.only or list(SOLVERS), 1)
        record["fits"], record["reads"] = [], []
        for decay in DECAYS:
            record["fits"] += fits(data, decay, options.only or list(SOLVERS), options.repeats)
        for decay in DECAYS:
            record["reads"].append(reads(data, decay))
    print(table(record["fits"]), flush=True)
    for row in record["reads"]:
        print(f"decay {row['weight_decay']:.0e}: {row['reads_per_evaluation']} reads an evaluation")
    if not options.no_probe:
        record["probe"] = whole(count, d, options.seed, device, 1)
    if options.json is not None:
        write_json(options.json, record)


if __name__ == "__main__":
    main()
