"""The paper's theory: uniformity certificates, the regular simplex, the estimation error of the bound."""

from fmicl.theory.uniformity import Uniformity, estimation_error, push, simplex, table, uniformity

__all__ = ["Uniformity", "estimation_error", "push", "simplex", "table", "uniformity"]
