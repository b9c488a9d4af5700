"""Wrong arguments of the Python API, as a table: the call, the type of the error, the key facts of its message."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

import fmicl
from fmicl import functional, information, theory
from fmicl.divergences import DivergenceName
from fmicl.divergences.catalogue import __name__ as catalogue
from fmicl.divergences.special import log_hyp0f1
from fmicl.losses.similarities import log_mu

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
ROWS = {
    "kl": fmicl.FMICLLoss("kl"),
    "infonce": fmicl.InfoNCELoss(),
    "au": fmicl.AlignUniformLoss(),
    "spectral": fmicl.SpectralContrastiveLoss(),
}
Call = Callable[[], Any]


def generator(f: Callable[[Tensor], Any]) -> fmicl.Divergence:
    return fmicl.Divergence.from_generator(f, name="mine")


def numpy_f(u: Tensor) -> Tensor:
    return torch.from_numpy(u.numpy() * np.log(u.numpy()))


INPUTS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("other batch", lambda f: f(X, X[:3]), "(4, 3)|(3, 3)"),
    ("other width", lambda f: f(X, X[:, :2]), "(4, 3)|(4, 2)"),
    ("one sample", lambda f: f(X[:1], X[:1]), "two samples|(1, 3)|drop_last"),
    ("no sample", lambda f: f(X[:0], X[:0]), "(0, 3)"),
    ("no dimension", lambda f: f(X[:, :0], X[:, :0]), "(4, 0)"),
    ("one row", lambda f: f(X[0], X[0]), "(N, d)|(3,)"),
    ("three dimensions", lambda f: f(X[None], X[None]), "(N, d)|(1, 4, 3)"),
    ("integers", lambda f: f(X.long(), X), "x |torch.int64"),
    ("booleans", lambda f: f(X, X > 0), "y |torch.bool"),
    ("eight bits", lambda f: f(X, X.to(torch.float8_e4m3fn)), "y |torch.float8_e4m3fn"),
    ("complex numbers", lambda f: f(X, X.to(torch.complex64)), "y |torch.complex64"),
    ("an array", lambda f: f(X.numpy(), X), "x |ndarray"),
    ("a list", lambda f: f(X, X.tolist()), "y |list"),
    ("nothing", lambda f: f(None, X), "x |NoneType"),
    ("other device", lambda f: f(X, X.to("meta")), "y |meta|cpu"),
    ("no negatives", lambda f: f(X, X, negatives=X[:0]), "(0, 3)"),
    ("narrow negatives", lambda f: f(X, X, negatives=X[:, :2]), "(4, 2)|(4, 3)"),
    ("integer negatives", lambda f: f(X, X, negatives=X.long()), "negatives |torch.int64"),
    ("flat negatives", lambda f: f(X, X, negatives=X[0]), "negatives |(3,)"),
]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("call", "facts"), [pytest.param(call, facts, id=what) for what, call, facts in INPUTS])
def test_wrong_embeddings(name: str, call: Callable[[Any], Any], facts: str) -> None:
    refused(lambda: call(ROWS[name]), ValueError, facts)


def refused(call: Call, kind: type[Exception], facts: str) -> None:
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert [fact for fact in facts.split("|") if fact not in message] == [], message
    assert len(message) < 800, "a message, not a dump"


ARGUMENTS: list[tuple[Call, type[Exception], str]] = [
    # losses
    (lambda: fmicl.FMICLLoss("lk"), ValueError, "divergence 'lk'|'kl'"),
    (lambda: fmicl.FMICLLoss("KL"), ValueError, "divergence 'KL'|'kl'"),
    (lambda: fmicl.FMICLLoss("jensen"), ValueError, "divergence 'jensen'|js"),
    (lambda: fmicl.FMICLLoss(torch.log), TypeError, "from_generator"),  # type: ignore[arg-type]
    (lambda: fmicl.FMICLLoss(None), ValueError, "divergence None"),  # type: ignore[arg-type]
    (lambda: fmicl.FMICLLoss("kl", alpha=0.0), ValueError, "alpha=0.0"),
    (lambda: fmicl.FMICLLoss("kl", alpha=-1.0), ValueError, "alpha=-1.0"),
    (lambda: fmicl.FMICLLoss("kl", alpha=math.nan), ValueError, "alpha=nan"),
    (lambda: fmicl.FMICLLoss("kl", alpha="40"), ValueError, "alpha='40'"),  # type: ignore[arg-type]
    (lambda: fmicl.FMICLLoss("kl", gamma=math.inf), ValueError, "gamma=inf"),
    (lambda: fmicl.FMICLLoss("kl", gamma=0.0), ValueError, "gamma=0.0"),
    (lambda: fmicl.FMICLLoss("kl", mu=0.0), ValueError, "mu=0.0"),
    (lambda: fmicl.FMICLLoss("kl", mu="norm"), ValueError, "mu |'norm'"),  # type: ignore[arg-type]
    (lambda: fmicl.FMICLLoss("kl", similarity="dot"), ValueError, "similarity|'dot'"),
    (lambda: fmicl.FMICLLoss("kl", similarity="cosine", mu=2.0), ValueError, "cosine|mu=2.0"),
    (lambda: fmicl.FMICLLoss("kl", similarity=fmicl.Cosine(), gamma=2.0), ValueError, "Cosine|leave out gamma=2.0"),
    (lambda: fmicl.FMICLLoss("kl", similarity=fmicl.Cosine(), mu=2.0), ValueError, "Cosine|leave out mu=2.0"),
    (lambda: fmicl.FMICLLoss("kl", negatives="all"), ValueError, "'anchor', 'both', 'cross' or a tensor|'all'"),  # type: ignore[arg-type]
    (lambda: fmicl.FMICLLoss("kl", shift="best"), ValueError, "shift|'best'"),  # type: ignore[arg-type]
    (lambda: fmicl.FMICLLoss("kl", kernel="fast"), ValueError, "kernel|'fast'"),  # type: ignore[arg-type]
    (lambda: fmicl.FMICLLoss("kl", precision="low"), ValueError, "precision|'low'"),  # type: ignore[arg-type]
    (lambda: fmicl.FMICLLoss("kl", normalised=1), ValueError, "normalised|1"),  # type: ignore[arg-type]
    (lambda: fmicl.FMICLLoss("kl", gather="no"), ValueError, "gather|'no'"),  # type: ignore[arg-type]
    (lambda: fmicl.FMICLLoss("tsallis", order=2.0), TypeError, "order|fmicl.divergence("),  # type: ignore[call-arg]
    (lambda: fmicl.FMICLLoss(generator(lambda u: (u - 1).abs())), ValueError, "mine|piecewise linear"),
    (lambda: fmicl.InfoNCELoss(temperature=0.0), ValueError, "temperature=0.0"),
    (lambda: fmicl.InfoNCELoss(temperature=math.inf), ValueError, "temperature=inf"),
    (lambda: fmicl.InfoNCELoss(temperature=True), ValueError, "temperature=True"),
    (lambda: fmicl.AlignUniformLoss(power=0.5), ValueError, "power=0.5"),
    (lambda: fmicl.AlignUniformLoss(gamma=-2.0), ValueError, "gamma=-2.0"),
    (lambda: fmicl.AlignUniformLoss(gamma=math.inf), ValueError, "gamma=inf"),
    (lambda: fmicl.AlignUniformLoss(weight=0.0), ValueError, "weight=0.0"),
    (lambda: fmicl.SpectralContrastiveLoss(mu=-1.0), ValueError, "mu=-1.0"),
    (lambda: fmicl.BarlowTwinsLoss(0.0), ValueError, "weight=0.0"),
    (lambda: fmicl.BarlowTwinsLoss(scale=0.0), ValueError, "scale=0.0"),
    (lambda: fmicl.VICRegLoss(covariance=-1.0), ValueError, "covariance=-1.0"),
    (lambda: fmicl.DCLLoss(0.0), ValueError, "temperature=0.0"),
    (lambda: fmicl.DHELLoss(0.0), ValueError, "temperature=0.0"),
    (lambda: fmicl.IConLoss("kl", 0.0), ValueError, "temperature=0.0"),
    (lambda: fmicl.IConLoss("reverse_kl"), ValueError, "reverse_kl"),
    (lambda: fmicl.RenyiLoss(order=0.0), ValueError, "order=0.0"),
    (lambda: fmicl.RenyiLoss(skew=1.0), ValueError, "skew=1.0"),
    (lambda: fmicl.RPCLoss(beta=-1.0), ValueError, "beta=-1.0"),
    (lambda: fmicl.RPCLoss(gamma=0.0), ValueError, "gamma=0.0"),
    (lambda: fmicl.RPCLoss(similarity="gaussian"), ValueError, "'gaussian'"),  # type: ignore[arg-type]
    (lambda: fmicl.SigLIPLoss(0.0), ValueError, "scale=0.0"),
    (lambda: fmicl.SigLIPLoss(bias=math.inf), ValueError, "bias=inf"),
    (lambda: fmicl.Gaussian(gamma=0.0), ValueError, "gamma=0.0"),
    (lambda: fmicl.Gaussian(mu=-1.0), ValueError, "mu=-1.0"),
    (lambda: fmicl.Gaussian(mu="x"), ValueError, "mu |'x'"),  # type: ignore[arg-type]
    (lambda: fmicl.Cosine(temperature=-1.0), ValueError, "temperature=-1.0"),
    (lambda: fmicl.Cosine(temperature=math.nan), ValueError, "temperature=nan"),
    (lambda: fmicl.Cosine(1.0, "tanh"), ValueError, "activation|'tanh'"),  # type: ignore[arg-type]
    (lambda: fmicl.FMICLLoss("kl", similarity="cosine_identity", mu=2.0), ValueError, "no mu"),
    (lambda: log_mu(1.0, 1), ValueError, "d=1"),
    (lambda: log_hyp0f1(-1.0, 1.0), ValueError, "order=-1"),
    (lambda: functional.fmicl_loss(X, X, "kl", negatives="some"), ValueError, "'some'"),  # type: ignore[arg-type]
    (lambda: functional.fmicl_loss(X, X, "kl", alpha=0.0), ValueError, "alpha=0.0"),
    (lambda: functional.fmicl_loss(X, X, "kl", kernal="tiled"), TypeError, "kernal|normalised, kernel"),  # type: ignore[call-arg]
    (lambda: functional.infonce_loss(X, X, temperature=-1.0), ValueError, "temperature=-1.0"),
    # divergences
    (lambda: fmicl.divergence("pearsn"), ValueError, "'pearsn'|'pearson'"),
    (lambda: fmicl.divergence(3), ValueError, "divergence 3"),  # type: ignore[arg-type]
    (lambda: fmicl.divergence("tsallis", order=1.0), ValueError, "order=1.0|kl"),
    (lambda: fmicl.divergence("tsallis", order=0.0), ValueError, "order=0.0"),
    (lambda: fmicl.divergence("tsallis", order=math.inf), ValueError, "order=inf"),
    (lambda: fmicl.divergence("tsallis", ordr=2.0), TypeError, "takes order|ordr"),
    (lambda: fmicl.divergence("kl", order=2.0), TypeError, "'kl'|no parameters|order"),
    (lambda: fmicl.divergence(fmicl.divergence("kl"), order=2.0), TypeError, "KL()|order"),
    (lambda: fmicl.register_divergence("x", summary="")(int), TypeError, "dataclass|int"),  # type: ignore[type-var]
    (lambda: generator(lambda u: -u * u.log()), ValueError, "mine|not convex"),
    (lambda: generator(torch.sin), ValueError, "mine|f(1)"),
    (lambda: generator(lambda u: (3 * (u - 1)).sin()), ValueError, "mine|not convex"),
    (lambda: generator(lambda u: u * u.log() + 1), ValueError, "mine|f(1)|1"),
    (lambda: generator(lambda u: u * u.log() + 1e-7), ValueError, "mine|f(1)|float32"),
    (lambda: generator(lambda u: (u - 1) / (u - 1) - 1), ValueError, "mine|u = 1"),
    (lambda: generator(lambda u: (u - 2).sqrt()), ValueError, "mine|f(1)|nan"),
    (lambda: generator(numpy_f), TypeError, "mine|torch"),
    (lambda: generator(lambda u: math.log(u)), TypeError, "mine|torch operations"),
    (lambda: generator(lambda u: 0.0), TypeError, "mine|float"),  # noqa: ARG005
    (lambda: generator(lambda u: u.sum()), TypeError, "mine|shape|()"),
    (lambda: generator(lambda u: (u - 1) ** 2 * u.mean()), TypeError, "mine|elementwise"),
    (lambda: fmicl.divergence("kl").f(torch.tensor([1j])), ValueError, "complex64"),
    (lambda: pickle.dumps(generator(lambda u: u * u.log())), pickle.PicklingError, "mine|lambda|top level"),
    # theory
    (lambda: theory.uniformity("k"), ValueError, "divergence 'k'|'kl'"),
    (lambda: theory.uniformity("kl", gamma=0.0), ValueError, "gamma=0.0"),
    (lambda: theory.uniformity("kl", mu=math.inf), ValueError, "mu=inf"),
    (lambda: theory.push("kl", alpha=0.0), ValueError, "alpha=0.0"),
    (lambda: theory.push("kl", gamma=-1.0), ValueError, "gamma=-1.0"),
    (lambda: theory.push("kl", mu=0.0), ValueError, "mu=0.0"),
    (lambda: theory.monotonicity("kl", checked=0), ValueError, "checked=0"),
    (lambda: theory.push(generator(lambda u: (u - 1).abs())), ValueError, "mine|piecewise linear"),
    (lambda: theory.simplex(1, 3), ValueError, "n=1"),
    (lambda: theory.simplex(5, 3), ValueError, "n=5|d=3"),
    (lambda: theory.estimation_error("kl", n=1, delta=0.1), ValueError, "n=1"),
    (lambda: theory.estimation_error("kl", n=10, delta=0.0), ValueError, "delta=0.0"),
    (lambda: theory.estimation_error("kl", n=10, delta=1.5), ValueError, "delta=1.5"),
    (lambda: theory.estimation_error("kl", n=10, delta=0.1, alpha=-1.0), ValueError, "alpha=-1.0"),
    *[
        (lambda size=size: theory.estimation_error("kl", 10, 0.1, log_class_size=size), ValueError, "log_class_size")
        for size in (-1.0, math.inf, math.nan)
    ],
    # information
    (lambda: information.f_mutual_information([[1.0]], "kl"), TypeError, "joint|list"),  # type: ignore[arg-type]
    (lambda: information.f_mutual_information(torch.ones(3), "kl"), ValueError, "(3,)"),
    (lambda: information.f_mutual_information(torch.ones(2, 2).long(), "kl"), ValueError, "torch.int64"),
    (lambda: information.f_mutual_information(torch.ones(2, 2), "kl"), ValueError, "sum of 4|divide"),
    (lambda: information.f_mutual_information(torch.tensor([[2.0, -1.0]]), "kl"), ValueError, "-1"),
    (lambda: information.f_mutual_information(torch.full((2, 2), math.nan), "kl"), ValueError, "nan"),
    (lambda: information.f_mutual_information(torch.full((2, 2), 0.25), "k"), ValueError, "divergence 'k'"),
    (lambda: information.variational_bound("kl", X[:0], X), ValueError, "no scores"),
    (
        lambda: information.variational_bound("kl", X, X, joint_weights=X[:1].abs()),
        ValueError,
        "joint_weights|(4, 3)|(1, 3)",
    ),
    (
        lambda: information.variational_bound("kl", X, X, independent_weights=-X.abs()),
        ValueError,
        "independent_weights|negative",
    ),
    (
        lambda: information.variational_bound("kl", X, X, joint_weights=torch.zeros(4, 3)),
        ValueError,
        "joint_weights|all 0",
    ),
    (lambda: information.label_information("kl", X, torch.zeros(3).long()), ValueError, "(4, 3)|(3,)"),
    (lambda: information.label_information("kl", X, torch.zeros(4)), ValueError, "integers|torch.float32"),
    (lambda: information.label_information("kl", X, torch.full((4,), 3)), ValueError, "0 to 2|3"),
    (lambda: information.label_information("kl", X, torch.full((4,), -1)), ValueError, "0 to 2|-1"),
    # runs and recipes
    (lambda: fmicl.recipe("cifar"), ValueError, "recipe 'cifar'|'cifar10'"),
    (lambda: fmicl.recipe("digits", epoch=3), ValueError, "'epoch'|'epochs'"),
    (lambda: fmicl.recipe("digits", epochs="3"), ValueError, "epochs|'3'"),
    (lambda: fmicl.recipe("digits", divergence="k"), ValueError, "divergence 'k'"),
    (lambda: fmicl.recipe("digits", learning_rate=math.inf), ValueError, "learning_rate|finite|inf"),
    (lambda: fmicl.load_encoder("nowhere"), FileNotFoundError, "nowhere"),
    (lambda: fmicl.FMICLoss, AttributeError, "'FMICLoss'|FMICLLoss"),
]


@pytest.mark.parametrize(("call", "kind", "facts"), ARGUMENTS)
def test_wrong_arguments(call: Call, kind: type[Exception], facts: str) -> None:
    refused(call, kind, facts)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ROWS)
def test_embeddings_that_are_not_finite_give_a_loss_that_is_not(name: str, value: float) -> None:
    """Without a check in the loss, which would synchronise a GPU; training checks the loss."""
    x = X.clone()
    x[0, 0] = value
    assert not ROWS[name](x, X).isfinite()


def test_the_names_for_completion_are_those_of_the_catalogue() -> None:
    literals = get_args(get_args(DivergenceName)[0])
    known = [name for name in fmicl.list_divergences() if type(fmicl.divergence(name)).__module__ == catalogue]
    assert list(literals) == known


def convex(u: Tensor) -> Tensor:
    return u * u.log()


def test_a_divergence_of_a_function_with_a_name_can_be_pickled_and_copied() -> None:
    mine = fmicl.Divergence.from_generator(convex, name="mine")
    r = torch.linspace(-1, 1, 5)
    for other in (pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine)):
        assert torch.equal(other.score(r), mine.score(r))
        assert other == mine
    same = copy.deepcopy(generator(lambda u: u * u.log()))
    assert torch.equal(same.score(r), mine.score(r))
