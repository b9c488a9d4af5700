"""Options of the evaluation: defaults, roles and ranges."""

from __future__ import annotations

from typing import Any

import pytest

from fmicl.evaluation.options import EvaluationOptions
from fmicl.utils.options import options_of


def test_only_the_monitoring_interval_leaves_the_result_alone() -> None:
    assert EvaluationOptions() == EvaluationOptions(k=200, monitor_every=10, probe_views=0, baselines=False)
    roles = {option.name: option.role for option in options_of(EvaluationOptions)}
    assert roles == {"k": "compute", "monitor_every": "machine", "probe_views": "compute", "baselines": "compute"}


@pytest.mark.parametrize(
    "wrong", [{"k": 0}, {"k": 2.5}, {"monitor_every": -1}, {"probe_views": -1}, {"probe_views": True}, {"baselines": 1}]
)
def test_a_wrong_value_is_an_error_with_the_name_of_the_option(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{name} .*{value}"):
        EvaluationOptions(**wrong)
