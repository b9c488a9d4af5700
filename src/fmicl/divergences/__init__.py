r"""f-divergences, each as a few scalar functions.

An f-divergence D_f(p || q) = E_q[f(p/q)] comes from a convex f with f(1) = 0. Contrastive learning uses it through two
functions of the log density ratio r = log u, u = p(x, y) / (p(x) p(y)):

    score(r)   = f'(e^r)          reward of a positive pair
    penalty(r) = f*(f'(e^r))      cost of a negative pair;  = u f'(u) - f(u)  (Fenchel-Young)

where f*(t) = sup_u (t u - f(u)) is the convex conjugate. Both are computed from r, never from u: KL is linear, JS is a
softplus and chi-square is an expm1, so nothing overflows or cancels.

`divergence(name)` makes one, `list_divergences()` lists them, `Divergence.from_generator(f)` makes one of any convex f,
and `register_divergence` adds a class under a name.
"""

from fmicl.divergences.base import Divergence, Weighted
from fmicl.divergences.catalogue import (
    JS,
    KL,
    VLC,
    Jeffrey,
    Neyman,
    Pearson,
    ReverseKL,
    SquaredHellinger,
    Tsallis,
)
from fmicl.divergences.learned import Learned
from fmicl.divergences.registry import DIVERGENCES, DivergenceName, divergence, list_divergences, register_divergence

__all__ = [
    "DIVERGENCES",
    "JS",
    "KL",
    "VLC",
    "Divergence",
    "DivergenceName",
    "Jeffrey",
    "Learned",
    "Neyman",
    "Pearson",
    "ReverseKL",
    "SquaredHellinger",
    "Tsallis",
    "Weighted",
    "divergence",
    "list_divergences",
    "register_divergence",
]
