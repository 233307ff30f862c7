"""Reports of the suite: their JSON, what is refused, and how parts are merged."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from suite_results import REGRET, REPORT, ROW

from ridgeplan.validate.suite.report import TARGETS, Limits, SuiteError, SuiteReport, Summary, summaries


def test_regret_at_measured_acceptance_counts_a_rounds_tokens_anew():
    """At gamma 1 a round has 1 + a tokens: 1.0 ms at 0.9 are 1.9 ms a round, and 1.9 / 1.5 ms a token at 0.5."""
    drafting = {"plan": "quantspec", "gamma": 1, "acceptance": 0.9, "measured_ms": 1.0, "measured_acceptance": 0.5}
    plain = {"plan": "int8", "gamma": 0, "acceptance": 1.0, "measured_ms": 1.1, "measured_acceptance": 1.0}
    unknown = {"plan": "quest", "gamma": 1, "acceptance": 0.9, "measured_ms": 0.1}
    row = replace(REGRET, recommended_ms=1.0, best_ms=1.0, candidates=(drafting, plain, unknown))
    assert row.regret == 0
    assert row.regret_at_measured == pytest.approx(1.9 / 1.5 / 1.1 - 1)
    assert replace(row, recommended_ms=0.1).regret_at_measured is None
    assert REGRET.regret_at_measured is None
    names = {summary.name: summary for summary in summaries(replace(REPORT, regret=(row, REGRET)))}
    assert names["regret at measured acceptance"].count == 1
    assert "regret at measured acceptance" not in {summary.name for summary in summaries(REPORT)}


def test_errors_are_signed_and_regret_is_relative_to_the_best() -> None:
    assert ROW.relative_error == pytest.approx(0.1)
    assert replace(ROW, predicted=0.8).relative_error == pytest.approx(-0.2)
    assert REGRET.regret == pytest.approx(0.2)


def test_json_round_trip() -> None:
    assert SuiteReport.from_json(REPORT.to_json()) == REPORT
    data = json.loads(REPORT.to_json())
    assert data["schema"] == 1
    assert data["rows"][0]["relative_error"] == pytest.approx(0.1)
    assert data["regret"][0]["regret"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 9}, "schema 9 is newer"),
        ({"suite": "huge"}, "suite is 'huge'; allowed: smoke, full"),
        ({"rows": [{**ROW.to_dict(), "measured": 0}]}, "rows[0].measured is 0"),
        ({"rows": [{**ROW.to_dict(), "section": "other"}]}, "rows[0].section is 'other'"),
        ({"rows": [7]}, "rows[0] is 7"),
        ({"rows": {"0": 1}}, "rows is"),
        ({"regret": [{**REGRET.to_dict(), "batch": 0}]}, "regret[0].batch is 0"),
        ({"device": 3}, "device is 3"),
        ({"more": 1}, "more is not a field"),
    ],
)
def test_damaged_reports_are_refused_in_one_line(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(REPORT.to_dict() | change))
    with pytest.raises(SuiteError) as refused:
        SuiteReport.read(path)
    assert "results.json" in str(refused.value) and words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_not_json_or_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(SuiteError, match=r"cannot read report .*results\.json"):
        SuiteReport.read(path)
    path.write_text("{")
    with pytest.raises(SuiteError, match="not a JSON report"):
        SuiteReport.read(path)


def test_a_part_takes_the_place_of_its_own_sections_only() -> None:
    kernels = replace(ROW, section="kernels", kind="linear")
    earlier = replace(REPORT, methods={"kernels": "how", **REPORT.methods}, rows=(kernels, ROW))
    newer = replace(ROW, predicted=2.0)
    part = replace(REPORT, methods={"steps": "anew"}, rows=(newer,), regret=(), skipped=())
    merged = part.merged_into(earlier)
    assert merged.rows == (kernels, newer)
    assert merged.regret == (REGRET,)
    assert merged.methods == {"kernels": "how", "steps": "anew", "regret": "by rounds"}
    assert merged.sections == ("kernels", "steps", "regret")
    assert replace(part, methods={"regret": "anew"}, rows=()).merged_into(earlier).regret == ()


@pytest.mark.parametrize("name", ["suite", "device", "profile", "software"])
def test_parts_of_another_machine_or_calibration_are_not_merged(name: str) -> None:
    other = {"suite": "smoke", "device": "another GPU", "profile": "another", "software": {"torch": "3.0"}}[name]
    with pytest.raises(SuiteError, match=f"its {name} is .*; allowed: the same, or a new file"):
        replace(REPORT, **{name: other}).merged_into(REPORT)


# Summaries of errors against their targets, counted by hand.


def test_a_summary_has_the_signed_median_and_statistics_of_absolute_errors() -> None:
    summary = Summary.of("kernels", [-0.05, 0.01, 0.02, -0.03, -0.04])
    assert (summary.count, summary.signed_median) == (5, -0.03)
    assert (summary.median, summary.worst) == (0.03, 0.05)
    assert summary.mean == pytest.approx(0.03)
    assert summary.p90 == pytest.approx(0.046)  # between the fourth and the fifth of 0.01 to 0.05: 0.04 + 0.6 x 0.01


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
    summaries_by_name = {summary.name: summary for summary in summaries(replace(REPORT, rows=rows))}
    assert list(summaries_by_name) == ["steps", "draft step", "plain step", "regret"]
    assert summaries_by_name["steps"].worst == pytest.approx(0.2)
    assert summaries_by_name["draft step"].signed_median == pytest.approx(-0.2)
    assert summaries_by_name["regret"].mean == pytest.approx(0.2)
    assert summaries_by_name["regret"].met is False
    assert summaries_by_name["steps"].to_dict()["limits"] == {"median": 0.025, "p90": 0.06, "worst": 0.12, "mean": None}


def test_regret_is_met_by_its_mean_and_its_worst() -> None:
    small = replace(REGRET, recommended_ms=1.02)
    report = replace(REPORT, regret=(small, replace(REGRET, recommended_ms=1.0)))
    assert {summary.name: summary.met for summary in summaries(report)}["regret"] is True


def test_the_worst_rows_are_those_with_the_largest_absolute_errors() -> None:
    rows = tuple(replace(ROW, predicted=value) for value in (1.1, 0.5, 1.3))
    assert [row.predicted for row in replace(REPORT, rows=rows).worst_rows(2)] == [0.5, 1.3]
