"""The paper's theory: uniformity certificates, the regular simplex, estimation error, push of negatives."""

from fmicl.theory.estimation import estimation_error
from fmicl.theory.push import push
from fmicl.theory.simplex import simplex
from fmicl.theory.uniformity import Uniformity, table, uniformity

__all__ = ["Uniformity", "estimation_error", "push", "simplex", "table", "uniformity"]
