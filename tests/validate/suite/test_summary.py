"""Summaries of errors against their targets, counted by hand."""

from dataclasses import replace

import pytest
from suite_results import REGRET, REPORT, ROW

from ridgeplan.validate.suite.report import TARGETS, Limits, Summary, summaries


def test_a_summary_has_the_signed_median_and_statistics_of_absolute_errors() -> None:
    found = Summary.of("kernels", [-0.05, 0.01, 0.02, -0.03, -0.04])
    assert (found.count, found.signed_median) == (5, -0.03)
    assert (found.median, found.worst) == (0.03, 0.05)
    assert found.mean == pytest.approx(0.03)
    assert found.p90 == pytest.approx(0.046)  # between the fourth and the fifth of 0.01 to 0.05: 0.04 + 0.6 x 0.01


@pytest.mark.parametrize(
    ("errors", "met"),
    [([0.02] * 10, True), ([0.05] * 10, False), ([0.0] * 8 + [-0.5] * 2, False), ([0.0] * 19 + [0.5], True)],
)
def test_a_target_is_met_if_all_of_its_limits_are(errors: list[float], met: bool) -> None:
    assert TARGETS["kernels"] == Limits(median=0.04, p90=0.10)
    assert Summary.of("kernels", errors).met is met


def test_what_nothing_is_asked_of_is_neither_met_nor_missed() -> None:
    assert Summary.of("linear", [0.9]).met is None


def test_sections_come_before_their_kinds_and_regret_last() -> None:
    rows = tuple(
        replace(ROW, kind=kind, predicted=1 + error) for kind, error in (("draft step", -0.2), ("plain step", 0.1))
    )
    found = {one.name: one for one in summaries(replace(REPORT, rows=rows))}
    assert list(found) == ["steps", "draft step", "plain step", "regret"]
    assert found["steps"].worst == pytest.approx(0.2)
    assert found["draft step"].signed_median == pytest.approx(-0.2)
    assert found["regret"].mean == pytest.approx(0.2)
    assert found["regret"].met is False
    assert found["steps"].to_dict()["limits"] == {"median": 0.025, "p90": 0.06, "worst": 0.12, "mean": None}


def test_regret_is_met_by_its_mean_and_its_worst() -> None:
    small = replace(REGRET, recommended_ms=1.02)
    report = replace(REPORT, regret=(small, replace(REGRET, recommended_ms=1.0)))
    assert {one.name: one.met for one in summaries(report)}["regret"] is True


def test_the_worst_rows_are_those_with_the_largest_absolute_errors() -> None:
    rows = tuple(replace(ROW, predicted=value) for value in (1.1, 0.5, 1.3))
    assert [row.predicted for row in replace(REPORT, rows=rows).worst_rows(2)] == [0.5, 1.3]
