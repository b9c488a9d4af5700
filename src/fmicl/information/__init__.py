"""f-mutual information: exact, by variational bounds, and estimated from samples with trained critics.

Exact: `f_mutual_information` (tables), `gaussian_information`, `sphere_information` (the paper's assumption).
From samples: `estimate(x, y)`, and the class behind it, `InformationEstimator`.
"""

from fmicl.information.bounds import label_information, variational_bound
from fmicl.information.critics import list_critics
from fmicl.information.estimation import Estimate, InformationEstimator, Training, estimate
from fmicl.information.estimators import Estimator, list_estimators
from fmicl.information.gaussian import GaussianCopula, correlations_for, gaussian_information
from fmicl.information.limits import largest_bound, largest_information
from fmicl.information.sphere import CosineLaw, fit_gamma, sphere_information
from fmicl.information.tables import f_mutual_information

__all__ = [
    "CosineLaw",
    "Estimate",
    "Estimator",
    "GaussianCopula",
    "InformationEstimator",
    "Training",
    "correlations_for",
    "estimate",
    "f_mutual_information",
    "fit_gamma",
    "gaussian_information",
    "label_information",
    "largest_bound",
    "largest_information",
    "list_critics",
    "list_estimators",
    "sphere_information",
    "variational_bound",
]
