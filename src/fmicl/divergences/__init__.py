r"""f-divergences, each as a handful of scalar functions.

An f-divergence D_f(p || q) = E_q[f(p/q)] comes from a convex f with f(1) = 0. Contrastive learning
sees it through two functions of the log density ratio r = log u, u = p(x, y) / (p(x) p(y)):

    score(r)   = f'(e^r)          what a positive pair earns
    penalty(r) = f*(f'(e^r))      what a negative pair costs;  = u f'(u) - f(u)  (Fenchel-Young)

where f*(t) = sup_u (t u - f(u)) is the convex conjugate. Both are written in r and never in u, so KL
is linear, JS is a softplus and chi-square is an expm1: nothing overflows or cancels on the way.

`divergence(name)` makes one, `list_divergences()` says which there are, and
`Divergence.from_generator(f)` makes one of a convex f of your own.
"""

from __future__ import annotations

import difflib
import fnmatch
from dataclasses import fields

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

__all__ = [
    "JS",
    "KL",
    "VLC",
    "Divergence",
    "Jeffrey",
    "Neyman",
    "Pearson",
    "ReverseKL",
    "SquaredHellinger",
    "Tsallis",
    "Weighted",
    "divergence",
    "list_divergences",
]

_KNOWN: dict[str, type[Divergence]] = {
    kind.name: kind for kind in (KL, ReverseKL, JS, Pearson, SquaredHellinger, Neyman, Jeffrey, Tsallis, VLC)
}


def list_divergences(pattern: str = "*") -> list[str]:
    """Names of the divergences that match a shell-style pattern.

    Example:
        >>> list_divergences("*kl")
        ['kl', 'reverse_kl']
    """
    return [name for name in _KNOWN if fnmatch.fnmatch(name, pattern)]


def divergence(name: str | Divergence, **parameters: float) -> Divergence:
    """Make a divergence by name; a `Divergence` passes through.

    Args:
        name: one of `list_divergences()`.
        parameters: of that divergence: `order` for tsallis, none for the others.

    Raises:
        ValueError: for an unknown name, with the near ones, or a parameter out of range.
        TypeError: for a parameter that this divergence doesn't have, or a function in place of a name.

    Example:
        >>> divergence("tsallis", order=2.0)
        Tsallis(order=2.0)
    """
    if isinstance(name, Divergence):
        if parameters:
            raise TypeError(f"{name!r} is a divergence already and takes no parameters, got {sorted(parameters)}")
        return name
    if callable(name):
        raise TypeError("a function is no divergence yet: fmicl.Divergence.from_generator(f) makes one of a convex f")
    kind = _KNOWN.get(name)
    if kind is None:
        near = difflib.get_close_matches(str(name).lower().replace("-", "_"), _KNOWN, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"unknown divergence {name!r}; {hint}known: {', '.join(_KNOWN)}")
    if not parameters:  # torch.compile can't trace the question which ones a class takes
        return kind()
    accepted = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(parameters) - set(accepted))
    if unknown:
        takes = f"takes {', '.join(accepted)}" if accepted else "takes no parameters"
        raise TypeError(f"divergence {name!r} {takes}, got {', '.join(unknown)}")
    return kind(**parameters)
