"""Pair functions of every divergence and similarity, for tests of the kernels."""

from __future__ import annotations

import fmicl
from fmicl.kernels import PairFunction, Square
from two_views import NAMES


def functions() -> dict[str, PairFunction]:
    made: dict[str, PairFunction] = {"square": Square(1.5)}
    for name in NAMES:
        kind = fmicl.divergence(name)
        made[name] = fmicl.Gaussian(gamma=0.8, mu=1.2).critic(kind, 4)
        made[f"{name}, cosine"] = fmicl.Cosine(temperature=0.4).critic(kind, 4)
    made["weighted"] = fmicl.Gaussian().critic(fmicl.divergence("js").weighted(3.0), 4)
    made["weighted, cosine"] = fmicl.Cosine().critic(fmicl.divergence("pearson").weighted(3.0), 4)
    for name in ("kl", "neyman", "tsallis"):  # powers, which have a Triton program
        made[f"{name}, skewed"] = fmicl.Gaussian(gamma=0.8, mu=1.2).critic(fmicl.divergence(name).skew(0.1), 4)
    weighted = fmicl.divergence("pearson").skew(0.3).weighted(3.0)
    made["skewed, weighted, cosine"] = fmicl.Cosine(temperature=0.4).critic(weighted, 4)
    return made


FUNCTIONS = functions()
