"""f-mutual information: exact for discrete tables, and variational lower bounds."""

from fmicl.information.bounds import f_mutual_information, label_information, variational_bound

__all__ = ["f_mutual_information", "label_information", "variational_bound"]
