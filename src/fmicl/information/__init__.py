"""f-mutual information: exact for discrete distributions, and variational lower bounds."""

from fmicl.information.bounds import label_information, variational_bound
from fmicl.information.tables import f_mutual_information

__all__ = ["f_mutual_information", "label_information", "variational_bound"]
