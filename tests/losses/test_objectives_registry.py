"""The registry of objectives: what their options build, refuse, warn of and advise."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fmicl
from fmicl.losses import OBJECTIVES
from fmicl.losses.align_uniform import AlignUniformOptions
from fmicl.losses.fmicl import FMICLOptions
from fmicl.losses.infonce import InfoNCEOptions
from fmicl.losses.registry import ObjectiveContext, ObjectiveOptions, register_objective
from fmicl.losses.spectral import SpectralOptions
from fmicl.losses.statistics import BatchStatisticsOptions
from fmicl.utils.options import option, options_of

SIMCLR = ObjectiveContext()
MOCO = ObjectiveContext(method="moco", detached=dict.fromkeys(("anchor", "both", "cross"), 1.0))
MOCO_V3 = ObjectiveContext(method="mocov3", contrast_views=True, detached={"cross": 1.0, "both": 0.5})
ORDER = ObjectiveContext(
    method="moco", detached=dict.fromkeys(("anchor", "both", "cross"), 1.0), divergence_parameters={"order": 1.01}
)


def test_names_and_summaries() -> None:
    assert {"align_uniform", "fmicl", "infonce", "spectral"} <= set(OBJECTIVES.names())
    assert all(entry.summary.endswith(".") for entry in OBJECTIVES)


def test_options_of_one_name_are_declared_alike() -> None:
    seen: dict[str, Any] = {}
    for entry in OBJECTIVES:
        for each in options_of(entry.value):
            assert seen.setdefault(each.name, each) == each
    assert {"negatives", "mu", "alpha", "temperature"} <= set(seen)


CONTRASTIVE = [entry.name for entry in OBJECTIVES if not issubclass(entry.value, BatchStatisticsOptions)]


@pytest.mark.parametrize("name", CONTRASTIVE)
@pytest.mark.parametrize("negatives", ["auto", "cross"])
def test_high_precision_comes_from_the_context(name: str, negatives: Any) -> None:
    options = OBJECTIVES[name].value(negatives=negatives)
    for context, expected in ((SIMCLR, {}), (dataclasses.replace(SIMCLR, high_precision=True), {"precision": "high"})):
        assert options.build(context).options == expected


@pytest.mark.parametrize(
    ("options", "context", "loss"),
    [
        (FMICLOptions(), SIMCLR, fmicl.FMICLLoss("kl")),
        (
            FMICLOptions(divergence="tsallis", alpha=3.0, gamma=2.0, mu="normalised", shift="optimal"),
            dataclasses.replace(SIMCLR, divergence_parameters={"order": 2.5}),
            fmicl.FMICLLoss(fmicl.divergence("tsallis", order=2.5), 3.0, 2.0, "normalised", shift="optimal"),
        ),
        (FMICLOptions(similarity="cosine"), SIMCLR, fmicl.FMICLLoss("kl", similarity="cosine")),
        (InfoNCEOptions(temperature=0.1), SIMCLR, fmicl.InfoNCELoss(0.1)),
        (AlignUniformOptions(), SIMCLR, fmicl.AlignUniformLoss()),
        (
            AlignUniformOptions(uniformity_gamma=3.0, uniformity_weight=2.0),
            SIMCLR,
            fmicl.AlignUniformLoss(gamma=3.0, weight=2.0),
        ),
        (SpectralOptions(mu=3.0), SIMCLR, fmicl.SpectralContrastiveLoss(3.0)),
    ],
    ids=str,
)
def test_build(options: ObjectiveOptions, context: ObjectiveContext, loss: nn.Module) -> None:
    x, y = torch.randn(2, 8, 4)
    built = options.build(context)
    assert repr(built) == repr(loss)
    assert built(x, y) == loss(x, y)


@pytest.mark.parametrize(
    ("options", "context", "expected"),
    [
        (FMICLOptions(), SIMCLR, "anchor"),
        (FMICLOptions(), MOCO_V3, "anchor"),
        (FMICLOptions(negatives="cross"), MOCO_V3, "cross"),
        (InfoNCEOptions(), SIMCLR, "both"),
        (InfoNCEOptions(), MOCO_V3, "cross"),
        (InfoNCEOptions(negatives="both"), MOCO_V3, "both"),
        (AlignUniformOptions(), MOCO_V3, "anchor"),
        (SpectralOptions(), SIMCLR, "cross"),
    ],
)
def test_negatives(options: ObjectiveOptions, context: ObjectiveContext, expected: str) -> None:
    assert options.build(context).negatives == options.resolved_negatives(context) == expected


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fmicl", {"alpha": 0.0}, "alpha .* 0"),
        ("fmicl", {"gamma": float("inf")}, "gamma .* inf"),
        ("fmicl", {"mu": -1.0}, "mu .* -1"),
        ("fmicl", {"mu": "normal"}, "mu .*'normal'"),
        ("fmicl", {"shift": "best"}, "shift .*'best'"),
        ("fmicl", {"alpha": "much"}, "alpha .*'much'"),
        ("infonce", {"temperature": 0.0}, "temperature .* 0"),
        ("infonce", {"negatives": "all"}, "negatives .*'all'"),
        ("align_uniform", {"uniformity_gamma": 0.0}, "uniformity_gamma .* 0"),
        ("align_uniform", {"uniformity_weight": -1.0}, "uniformity_weight .* -1"),
        ("barlow_twins", {"redundancy_weight": 0.0}, "redundancy_weight .* 0"),
        ("vicreg", {"variance_weight": -1.0}, "variance_weight .* -1"),
        ("renyi", {"renyi_skew": 1.0}, "renyi_skew .* 1"),
        ("rpc", {"rpc_beta": -1.0}, "rpc_beta .* -1"),
        ("spectral", {"mu": 0.0}, "mu .* 0"),
        ("spectral", {"mu": "normalised"}, "spectral takes a number"),
    ],
)
def test_invalid_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OBJECTIVES[name].value(**options)


def test_an_unknown_divergence_is_refused_with_the_near_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown divergence 'hellinger'.*squared_hellinger"):
        FMICLOptions(divergence="hellinger").build(SIMCLR)


def test_unused_options() -> None:
    assert set(FMICLOptions(shift="optimal").why_unused()) == {"alpha", "mu", "similarity_from"}
    assert set(FMICLOptions(shift="optimal", divergence="js").why_unused()) == {"similarity_from"}
    fitted = FMICLOptions(similarity="fitted", similarity_from=Path("assumption.json"))
    assert set(fitted.why_unused()) == {"gamma", "mu"}
    others = (name for name in CONTRASTIVE if name not in ("dhel", "fmicl", "siglip"))
    assert all(OBJECTIVES[name].value().why_unused() == {} for name in others)


def test_the_divergence_of_further_terms() -> None:
    assert FMICLOptions(divergence="tsallis").information_divergence(ORDER) == fmicl.divergence("tsallis", order=1.01)
    assert InfoNCEOptions().information_divergence(SIMCLR) == fmicl.divergence("kl")


@pytest.mark.parametrize(
    ("options", "context", "warned"),
    [
        (FMICLOptions(), MOCO, True),
        (FMICLOptions(alpha=7.4), MOCO, False),
        (FMICLOptions(shift="optimal"), MOCO, False),
        (FMICLOptions(divergence="pearson"), MOCO, False),
        (FMICLOptions(divergence="squared_hellinger"), MOCO, True),
        (FMICLOptions(mu="normalised"), MOCO, True),
        (FMICLOptions(mu="normalised", gamma=1000.0), dataclasses.replace(MOCO, dim=4096), False),  # beyond a float
        (FMICLOptions(divergence="neyman", gamma=500.0), MOCO, False),  # no alpha would help
        (FMICLOptions(divergence="tsallis"), ORDER, True),
        (FMICLOptions(similarity="cosine"), MOCO, False),  # no density ratio there
        (InfoNCEOptions(), MOCO, False),
        (AlignUniformOptions(), MOCO, False),
        (SpectralOptions(), MOCO, False),
        (FMICLOptions(), MOCO_V3, False),
        (FMICLOptions(negatives="cross"), MOCO_V3, True),
        (FMICLOptions(negatives="both"), MOCO_V3, True),
        (FMICLOptions(negatives="both", alpha=20.0), MOCO_V3, False),  # half of the negatives have a gradient
        (FMICLOptions(negatives="cross"), SIMCLR, False),
    ],
)
def test_warning_of_negatives_without_a_gradient(
    options: ObjectiveOptions, context: ObjectiveContext, warned: bool
) -> None:
    warnings = options.warnings(context)
    assert len(warnings) == warned
    if warned:
        assert context.method in warnings[0]
        alpha = float(warnings[0].split("--alpha ")[1].split()[0])
        assert dataclasses.replace(options, alpha=alpha).warnings(context) == []  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "context", "flag"),
    [
        (FMICLOptions(), SIMCLR, "Raise --alpha"),
        (FMICLOptions(), MOCO_V3, "Raise --alpha"),
        (FMICLOptions(), MOCO, "Lower --alpha"),
        (FMICLOptions(divergence="tsallis", alpha=403.0), MOCO, "Lower --alpha"),  # collapsed, in docs/reproduction.md
        (FMICLOptions(negatives="cross"), MOCO_V3, "Lower --alpha"),
        (FMICLOptions(shift="optimal"), SIMCLR, "Change --gamma"),
        (FMICLOptions(shift="optimal"), MOCO, "Change --gamma"),
        (FMICLOptions(shift="optimal", divergence="js"), SIMCLR, "Raise --alpha"),
        (FMICLOptions(divergence="neyman"), SIMCLR, "neyman is not convex"),
        (FMICLOptions(divergence="reverse_kl"), SIMCLR, "reverse_kl is convex but not strictly"),
        (AlignUniformOptions(), SIMCLR, "Raise --uniformity-weight"),
        (AlignUniformOptions(), MOCO, "Lower --uniformity-weight"),
        (AlignUniformOptions(negatives="cross"), MOCO_V3, "Lower --uniformity-weight"),
        (InfoNCEOptions(), SIMCLR, "--temperature"),
        (SpectralOptions(), SIMCLR, "--mu"),
    ],
)
def test_advice_names_options_of_the_objective(options: ObjectiveOptions, context: ObjectiveContext, flag: str) -> None:
    advice = options.collapse_advice(context)
    assert flag in advice
    assert "--learning-rate" in advice
    known = {f"--{each.name.replace('_', '-')}" for each in options_of(type(options))} | {"--learning-rate"}
    assert {word.strip(".,") for word in advice.split() if word.startswith("--")} <= known


class Ignorant(nn.Module):
    negatives = "anchor"


@pytest.fixture
def ignorant() -> Iterator[None]:
    @register_objective("ignorant", summary="A third party's objective.")
    @dataclass(frozen=True)
    class IgnorantOptions(ObjectiveOptions):
        patience: int = option(3, "Its own option.")

        def build(self, context: ObjectiveContext) -> nn.Module:
            del context
            return Ignorant()

    yield
    OBJECTIVES.unregister("ignorant")


@pytest.mark.usefixtures("ignorant")
def test_a_third_party_registers_an_objective() -> None:
    options = OBJECTIVES["ignorant"].value(patience=4)  # type: ignore[call-arg]
    assert isinstance(options.build(SIMCLR), Ignorant)
    assert options.warnings(MOCO) == []
    assert "--learning-rate" in options.collapse_advice(SIMCLR)
    with pytest.raises(ValueError, match="patience"):
        OBJECTIVES["ignorant"].value(patience="long")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="'ignorant'"):
        register_objective("ignorant", summary="Another one.")(InfoNCEOptions)
