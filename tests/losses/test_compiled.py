"""Losses in functions compiled by torch.compile."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import fmicl
from fmicl.losses import fused, operator
from fmicl.losses.cross_entropy import CrossEntropyLoss
from unit_rows import rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def learned(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


OWN = fmicl.Divergence.from_generator(lambda u: u * u.log() - u + 1, name="own")
LOSSES: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: fmicl.FMICLLoss(name) for name in fmicl.list_divergences()},  # type: ignore[misc]
    "js, shift": lambda: fmicl.FMICLLoss("js", shift="optimal", negatives="both"),
    "kl, shift, reference": lambda: fmicl.FMICLLoss("kl", shift="optimal", kernel="reference"),
    "js, shift, reference": lambda: fmicl.FMICLLoss("js", shift="optimal", kernel="reference"),
    "js, reference": lambda: fmicl.FMICLLoss("js", mu="normalised", kernel="reference"),
    "cosine": lambda: fmicl.FMICLLoss("js", similarity=fmicl.Cosine(0.3), negatives="cross"),
    "own": lambda: fmicl.FMICLLoss(OWN),
    "learned gamma": lambda: fmicl.FMICLLoss("js", gamma=learned(2.0), alpha=learned(3.0)),
    "infonce": fmicl.InfoNCELoss,
    "infonce, reference": lambda: fmicl.InfoNCELoss(kernel="reference"),
    "learned temperature": lambda: fmicl.InfoNCELoss(learned(0.3), "cross"),
    "align_uniform": fmicl.AlignUniformLoss,
    "dcl": fmicl.DCLLoss,
    "dhel": fmicl.DHELLoss,
    "icon": lambda: fmicl.IConLoss("js"),
    "renyi": fmicl.RenyiLoss,
    "rpc": lambda: fmicl.RPCLoss(temperature=2.0),
    "siglip": fmicl.SigLIPLoss,
    "spectral": fmicl.SpectralContrastiveLoss,
    "barlow_twins": fmicl.BarlowTwinsLoss,
    "vicreg": fmicl.VICRegLoss,
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """No recompilation for a batch of the same shape, and no warnings."""
    torch.compiler.reset()
    logger = logging.getLogger("torch._dynamo")
    logger.addHandler(caplog.handler)
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    seen = [str(warning.message) for warning in recwarn]
    other = ("torch.jit", "TensorFloat32")  # torch 2.11's own use of the former; inductor's advice on a GPU
    assert not [message for message in seen if not any(word in message for word in other)]


def assert_compiled_equals_eager(loss: nn.Module, backend: str = "aot_eager", fullgraph: bool = True) -> None:
    """Values, and gradients in the parameters of a model and of the loss, for batches of one shape."""
    loss = loss.to(DEVICE)
    model = nn.Linear(5, 4, device=DEVICE)
    parameters = [*model.parameters(), *loss.parameters()]

    def step(x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = 2 * loss(model(x), model(y))
        return value

    compiled = torch.compile(step, backend=backend, fullgraph=fullgraph)
    for seed in range(2):
        x, y = rows(9, 5, seed).to(DEVICE), rows(9, 5, seed + 10).to(DEVICE)
        values = compiled(x, y), step(x, y)
        seen, wanted = ((value, *torch.autograd.grad(value, parameters)) for value in values)
        torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-5)


def test_every_loss_has_a_case() -> None:
    kinds = {type(make()) for make in LOSSES.values()}
    contrastive = {value for name, value in vars(fmicl.losses).items() if name.endswith("Loss")} - {CrossEntropyLoss}
    assert kinds >= contrastive


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_in_one_graph(name: str) -> None:
    assert_compiled_equals_eager(LOSSES[name]())


def test_inductor() -> None:
    assert_compiled_equals_eager(fmicl.InfoNCELoss(), "inductor")


def test_copies() -> None:
    loss = fmicl.FMICLLoss("tsallis", similarity=fmicl.Gaussian(2.0))
    for copied in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        torch.compiler.reset()
        assert_compiled_equals_eager(copied)


def test_losses_of_different_settings_in_one_function() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def both(x: Tensor, loss: nn.Module) -> Tensor:
        value: Tensor = loss(x, 1 - x)
        return value

    x = rows(6, 4).to(DEVICE)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for temperature in (0.5, 0.7, 0.9, 1.0):
            loss = fmicl.InfoNCELoss(temperature)
            torch.testing.assert_close(both(x, loss), loss(x, 1 - x))


def test_labels_and_explicit_negatives() -> None:
    x, y, queue = (rows(8, 4, seed).to(DEVICE).requires_grad_() for seed in range(3))
    labels = torch.arange(8, device=DEVICE) // 2
    loss = fmicl.FMICLLoss("js")

    def whole(x: Tensor, y: Tensor, queue: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([loss(x, y, labels=labels), loss(x, y, negatives=queue), *loss.terms(x, y)])

    results = []
    for function in (whole, torch.compile(whole, backend="aot_eager", fullgraph=True)):
        values = function(x, y, queue, labels)
        total = (values * torch.arange(4, device=DEVICE)).sum()
        results.append((values.detach(), *torch.autograd.grad(total, (x, y, queue))))
    torch.testing.assert_close(*results)


def test_functions_take_divergences_by_name_and_as_objects() -> None:
    tsallis = fmicl.divergence("tsallis", order=2.0)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def both(x: Tensor) -> Tensor:
        losses = (fmicl.functional.fmicl_loss(x, -x, kind, negatives="both") for kind in ("js", tsallis))
        return torch.stack(list(losses))

    x = rows(6, 4).to(DEVICE)
    wanted = [fmicl.functional.fmicl_loss(x, -x, kind, negatives="both") for kind in ("js", tsallis)]
    torch.testing.assert_close(both(x), torch.stack(wanted))


def test_the_operator_is_valid() -> None:
    tensors = [rows(6, 4).requires_grad_(), rows(6, 4, 1)]
    described = ((0, "tensor", ""), (1, "tensor", ""), ("temperature", "constant", 0.5))
    name = operator._register("infonce_loss", described)
    torch.library.opcheck(torch.ops.fmicl.loss.default, (tensors, name, [True, False]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], AbstractContextManager[None]]) -> None:
    x = rows(6, 4).to(DEVICE)
    with mode():
        for loss in (fmicl.InfoNCELoss(), fmicl.FMICLLoss(OWN)):
            torch.testing.assert_close(torch.compile(loss, backend="aot_eager", fullgraph=True)(x, -x), loss(x, -x))


def test_a_second_derivative_is_refused() -> None:
    x, y = rows(6, 4).requires_grad_(), rows(6, 4, 1)
    value = torch.compile(fmicl.InfoNCELoss(), backend="eager", fullgraph=True)(x, y)
    with pytest.raises(RuntimeError, match="kernel='reference'"):
        torch.autograd.grad(value, x, create_graph=True)


def test_a_learned_divergence_breaks_the_graph() -> None:
    """Its parameters are no input of the operator."""
    loss = fmicl.FMICLLoss(fmicl.divergence("tsallis", order=learned(2.0)))
    assert_compiled_equals_eager(loss, fullgraph=False)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="kernel='reference'"):
        torch.compile(loss, backend="eager", fullgraph=True)(rows(9, 5), rows(9, 5, 1))


def test_the_operator_takes_the_fused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(fused, "infonce_loss", lambda *_, **__: seen.append("asked"))
    x = rows(6, 4).requires_grad_()
    torch.compile(fmicl.InfoNCELoss(), backend="aot_eager", fullgraph=True)(x, -x).backward()
    assert seen == ["asked"]


def test_within_torch_func() -> None:
    y = rows(9, 5, 1)
    slope = torch.func.grad(lambda x: fmicl.functional.fmicl_loss(x, y, "js"))
    compiled = torch.compile(slope, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows(9, 5)), slope(rows(9, 5)))


def test_the_compiler_is_not_loaded_without_need() -> None:
    script = (
        "import sys, torch, fmicl; fmicl.InfoNCELoss()(*torch.ones(2, 3, 3)); print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n"
