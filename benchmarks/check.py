"""Errors of the Triton kernels against float64: every pair function and size, and whole losses.

    python benchmarks/check.py --json results/benchmarks/check-h200.json      # a CUDA GPU: about two minutes
    TRITON_INTERPRET=1 python benchmarks/check.py --quick          # without one, small sizes, in Triton's interpreter

Inputs of the fast mode are rounded to bfloat16 first, so that what is seen is the kernel's own error: the rounding of
its slopes. The exit code is 1 if any error is above its bound.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import provenance
from torch import Tensor

import fmicl
from fmicl import kernels
from fmicl.kernels import PairFunction, Square, reference
from fmicl.kernels.triton import TritonBackend
from fmicl.utils.files import write_json

SIZES = [
    (2, 1), (77, 5), (1000, 64), (3000, 128), (5000, 200), (500, 512), (3000, 512), (9000, 512), (1500, 2048)
]  # fmt: skip
QUICK = [(2, 1), (77, 5), (70, 200)]
BOUNDS = {
    "fast": (1e-5, 5e-3),
    "high": (1e-5, 5e-6),
    "bfloat16": (1e-4, 1e-2),
    "float32, any length": (1e-5, 1e-5),
    "bfloat16, any length": (1e-3, 2e-2),
    "float16, any length": (1e-3, 2e-2),
    "text": (1e-4, 5e-3),
}
"""Largest relative errors of loss and gradient. Rows of any length are rounded to bfloat16 on the sphere, if at all."""


def functions() -> dict[str, PairFunction]:
    made: dict[str, PairFunction] = {"square": Square(1.5)}
    for name in fmicl.list_divergences():
        made[name] = fmicl.Gaussian(gamma=0.8, mu=1.2).critic(fmicl.divergence(name), 4)
        made[f"{name}, cosine"] = fmicl.Cosine(temperature=0.4).critic(fmicl.divergence(name), 4)
    return made


def rows(n: int, d: int, mode: str, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.normalize(torch.randn(n, d, generator=generator), dim=-1).to(device)
    return x.bfloat16().float() if mode == "fast" else x


def relative(seen: Tensor, true: Tensor) -> float:
    return float((seen.double() - true).norm() / true.norm().clamp(min=1e-3))


def check_pairs(name: str, function: PairFunction, n: int, d: int, mode: str, device: torch.device) -> dict[str, Any]:
    """x with itself, and x against other rows, with a pair to skip."""
    x, other = rows(n, d, mode, 0, device), rows(n + 3, d, mode, 1, device)
    backend = TritonBackend(mode == "fast")
    errors = []
    for columns, skip in ((None, 0), (other, 1)):
        exact = x.double().requires_grad_()
        total = reference.pair_sum(exact, exact if columns is None else columns.double(), function, skip)
        (gradient,) = torch.autograd.grad(total, exact)
        if columns is None:
            seen, seen_gradient = backend.pair_symmetric(x, function, True)
        else:
            seen, seen_gradient = backend.pair_rows(x, columns, function, skip, True)
        assert seen_gradient is not None
        errors.append((relative(seen, total.detach()), relative(seen_gradient, gradient)))
    loss, gradient_error = (max(values) for values in zip(*errors, strict=True))
    return {"what": name, "n": n, "d": d, "mode": mode, "loss": loss, "gradient": gradient_error}


def check_logsumexp(n: int, d: int, mode: str, device: torch.device) -> dict[str, Any]:
    results = []
    for kernel, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        x, other = (rows(n, d, mode, seed, device).to(dtype).requires_grad_() for seed in (0, 1))
        options: dict[str, Any] = {"kernel": kernel, "fast": mode == "fast"}
        value = kernels.row_logsumexp(x, None, 5.0, 0, **options) + kernels.row_logsumexp(x, other, 5.0, 0, **options)
        if n > 2:  # two views of each sample, in turn
            even = n // 2 * 2
            value = value[:even] + kernels.row_logsumexp(x[:even], None, 5.0, 0, paired=True, **options)
        results.append((value, *torch.autograd.grad(value.sum(), (x, other))))
    loss, *gradients = (relative(seen.detach(), true.detach()) for seen, true in zip(*results, strict=True))
    return {"what": "log-sum-exp", "n": n, "d": d, "mode": mode, "loss": loss, "gradient": max(gradients)}


def check_both(n: int, d: int, mode: str, device: torch.device) -> dict[str, Any]:
    """x against other rows, with gradients of both."""
    function = Square(1.5)
    x, other = rows(n, d, mode, 0, device), rows(n + 3, d, mode, 1, device)
    exact = [value.double().requires_grad_() for value in (x, other)]
    total = reference.pair_sum(exact[0], exact[1], function, 1)
    seen, *gradients = TritonBackend(mode == "fast").pair_both(x, other, function, 1)
    errors = [relative(a, b) for a, b in zip(gradients, torch.autograd.grad(total, exact), strict=True)]
    loss = relative(seen, total.detach())
    return {"what": "both sides", "n": n, "d": d, "mode": mode, "loss": loss, "gradient": max(errors)}


LOSSES: dict[str, Callable[..., torch.nn.Module]] = {
    "FMICLLoss": functools.partial(fmicl.FMICLLoss, "kl"),
    "InfoNCELoss": fmicl.InfoNCELoss,
    "AlignUniformLoss": fmicl.AlignUniformLoss,
    "SpectralContrastiveLoss": fmicl.SpectralContrastiveLoss,
}


def check_half(name: str, n: int, d: int, device: torch.device) -> dict[str, Any]:
    """A whole loss on bfloat16 rows of the sphere; its gradient is bfloat16 as well, which is rounded once more."""
    x, y = (rows(n, d, "fast", seed, device).bfloat16() for seed in (0, 1))
    return check_loss(name, functools.partial(LOSSES[name], normalised=True), x, y, "bfloat16")


def check_loss(
    what: str,
    loss: Callable[..., torch.nn.Module],
    x: Tensor,
    y: Tensor,
    mode: str,
    negatives: Tensor | None = None,
    kernel: str = "triton",
) -> dict[str, Any]:
    """A whole loss of two views as they are given, and its gradient in both."""
    leaves = [value.detach().requires_grad_() for value in (x, y)]
    exact = [value.detach().double().requires_grad_() for value in (x, y)]
    seen = loss(kernel=kernel)(*leaves, negatives=negatives)
    true = loss(kernel="reference")(*exact, negatives=None if negatives is None else negatives.double())
    seen.backward()
    true.backward()
    errors = [relative(a.grad, b.grad) for a, b in zip(leaves, exact, strict=True) if b.grad is not None]  # type: ignore[arg-type]
    value, (n, d) = relative(seen.detach(), true.detach()), x.shape
    return {"what": what, "n": n, "d": d, "mode": mode, "loss": value, "gradient": max(errors)}


def views(n: int, d: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two views as an encoder gives them, near each other; so short that float16 holds the gradient."""
    generator = torch.Generator().manual_seed(2)
    x = 0.02 * torch.randn(n, d, generator=generator)
    y = x + 0.04 * torch.randn(n, d, generator=generator)
    return x.to(device, dtype), y.to(device, dtype)


def check_views(n: int, d: int, device: torch.device) -> list[dict[str, Any]]:
    """Views of any length, in each type, contiguous or not: by way of the programs that put them onto the sphere."""
    kl, sharp = LOSSES["FMICLLoss"], functools.partial(fmicl.InfoNCELoss, temperature=0.05)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mode = f"{str(dtype).removeprefix('torch.')}, any length"
        x, y = views(n, d, dtype, device)
        found.append(check_loss("FMICLLoss", kl, x, y, mode))
        found.append(check_loss("InfoNCELoss, temperature 0.05", sharp, x, y, mode))
        between = torch.stack([x, y], dim=2)
        found.append(check_loss("FMICLLoss, strided", kl, between[:, :, 0], between[:, :, 1], mode))
        found.append(check_loss("FMICLLoss, transposed", kl, x.T.contiguous().T, y.T.contiguous().T, mode))
    return found


def check_text(device: torch.device) -> list[dict[str, Any]]:
    """The paper's setting for sentences, on rows with a coordinate that is large in all of them, as BERT has."""
    x, y = views(64, 512, torch.float32, device)
    x, y = ((value + 2 * torch.eye(512, device=device)[7]).bfloat16() for value in (x, y))
    loss = functools.partial(fmicl.FMICLLoss, "kl", alpha=409600.0, gamma=20.0, precision="high")
    return [
        check_loss("FMICLLoss, sentences", loss, x, y, "text"),
        check_loss("FMICLLoss, sentences, as trained", loss, x, y, "text", kernel="auto"),
    ]


def check_alike(n: int, d: int, m: int, device: torch.device) -> list[dict[str, Any]]:
    """JS where all negatives are alike or at right angles: the products of its kernel are as large as they can be."""
    x, y, other = (torch.eye(d, device=device, dtype=torch.bfloat16)[k].expand(n, d).contiguous() for k in range(3))
    same, orthogonal = x[:1].expand(m, d).contiguous(), other[:1].expand(m, d).contiguous()
    js = functools.partial(fmicl.FMICLLoss, "js", normalised=True)
    cosine = functools.partial(js, similarity="cosine")
    return [
        check_loss("js, rows alike", js, x, y, "bfloat16", same),
        check_loss("js, cosine, right angles", cosine, x, x, "bfloat16", orthogonal),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--json", type=Path, help="file to write all errors to")
    parser.add_argument("--commit", help="of the tree, where git is not there to ask")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for mode in ("fast", "high"):
        for n, d in QUICK if options.quick else SIZES:
            found.append(check_pairs("kl", functions()["kl"], n, d, mode, device))
            if n > 2:
                found.append(check_logsumexp(n, d, mode, device))
                found.append(check_both(n, d, mode, device))
                if mode == "fast":
                    found += [check_half(name, n, d, device) for name in ("FMICLLoss", "InfoNCELoss")]
        for name, function in functions().items():
            found.append(check_pairs(name, function, 77 if options.quick else 1000, 64, mode, device))
    for name in ("AlignUniformLoss", "SpectralContrastiveLoss"):
        found.append(check_half(name, 77 if options.quick else 3000, 64, device))
    n, d = (40, 24) if options.quick else (3000, 128)
    found += check_views(n, d, device) + check_text(device)
    for d in (64,) if options.quick else (64, 512, 1024):
        found += check_alike(2 if options.quick else 300, d, 128 if options.quick else 1000, device)
    wrong = 0
    print("| what | N | d | mode | loss | gradient | |\n|---|---|---|---|---|---|---|")
    for row in found:
        bounds = BOUNDS[row["mode"]]
        fine = row["loss"] <= bounds[0] and row["gradient"] <= bounds[1]
        wrong += not fine
        cells = (row["what"], row["n"], row["d"], row["mode"], f"{row['loss']:.1e}", f"{row['gradient']:.1e}")
        print("| " + " | ".join(map(str, cells)) + f" | {'' if fine else 'TOO LARGE'} |")
    if options.json is not None:
        write_json(options.json, {**provenance(device.type, options.commit, ["torch", "triton"]), "errors": found})
    print(f"{len(found) - wrong} of {len(found)} within bounds")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
