"""The paper's theory: uniformity for small and large batches, the regular simplex, estimation error, push."""

from fmicl.theory.estimation import estimation_error
from fmicl.theory.monotonicity import Monotonicity, monotonicity
from fmicl.theory.push import balanced_alpha, push
from fmicl.theory.simplex import simplex
from fmicl.theory.uniformity import Uniformity, table, uniformity

__all__ = [
    "Monotonicity", "Uniformity", "balanced_alpha", "estimation_error", "monotonicity", "push", "simplex", "table",
    "uniformity",
]  # fmt: skip
