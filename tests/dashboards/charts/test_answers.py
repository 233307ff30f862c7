"""The figures hold what the predictions say."""

from dataclasses import replace
from typing import Any

import pytest

from ridgeplan.dashboards import charts
from ridgeplan.dashboards.charts import rooflines, rounds
from ridgeplan.planner import Recommendation, recommend
from ridgeplan.roofline.catalog.profile import Profile, Rates
from ridgeplan.roofline.latency import GIB


def traces(figure: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


def test_parts_of_a_round_add_up_to_the_time_per_token(recommendation: Recommendation) -> None:
    figure = charts.round_parts(recommendation)
    lengths = [sum(trace.x[index] for trace in figure.data) for index in range(2)]
    assert lengths == pytest.approx([recommendation.predicted.best.tpot_ms, recommendation.baseline.best.tpot_ms])
    assert figure.layout.barmode == "stack"
    assert figure.data[0].y == (recommendation.name, charts.PLAIN)


def test_the_waterfall_leads_from_plain_decoding_to_the_plan(recommendation: Recommendation) -> None:
    (trace,) = charts.waterfall(recommendation.predicted, recommendation.baseline, recommendation.name).data
    assert (trace.measure[0], trace.measure[-1]) == ("absolute", "total")
    assert sum(trace.x[:-1]) == pytest.approx(trace.x[-1])
    ends = recommendation.baseline.best.tpot_ms, recommendation.predicted.best.tpot_ms
    assert (trace.x[0], trace.x[-1]) == pytest.approx(ends, rel=0.02)
    saved = dict(zip(trace.y, trace.x, strict=True))
    assert saved["attention"] < saved["linear layers"] < 0  # at a long context the KV cache weighs most


def test_time_without_kernels_is_in_both_charts(profile: Profile) -> None:
    """Half a millisecond after each round is its overhead, of which no operation knows."""
    gaps = replace(profile, classes={**profile.classes, "gap": Rates(1.0, 1.0, 1e-5, 0.0)}, round_s=5e-4)
    slow = recommend("Llama-3.1-8B", "h200", 120_000, profile=gaps)
    parts = traces(charts.round_parts(slow))
    assert parts["overhead"].x == pytest.approx([0.5 / slow.predicted.tokens_per_round, 0.5])
    assert rounds.operation_ms(slow.baseline)["between kernels"] == pytest.approx(32 * 0.01)  # 10 us in each layer


def test_plain_decoding_drafts_nothing(recommendation: Recommendation) -> None:
    parts = traces(charts.round_parts(recommendation))
    assert parts["draft"].x[1] == 0
    assert parts["draft"].x[0] == pytest.approx(
        recommendation.predicted.gamma
        * recommendation.predicted.draft_step_ms
        / recommendation.predicted.tokens_per_round
    )


def test_roofline_has_a_dot_per_operation_under_its_roof(recommendation: Recommendation, profile: Profile) -> None:
    hardware = profile.hardware
    found = traces(charts.roofline(recommendation.predicted, hardware))
    assert set(found) == {"roof", "prefill", "draft", "target", "ridge"}
    dots = [dot for part in rooflines.PASS_COLORS for dot in zip(found[part].x, found[part].y, strict=True)]
    assert len(dots) == sum(op.flops > 0 for op in recommendation.predicted.breakdown)  # copies compute nothing
    for intensity, reached in dots:
        assert reached <= min(hardware.compute_flops, intensity * hardware.bandwidth_bytes_per_s)
    assert found["ridge"].x == (hardware.ridge_point,)
    assert max(found["roof"].y) == hardware.compute_flops


def test_roofline_of_plain_decoding_has_no_drafts(recommendation: Recommendation, profile: Profile) -> None:
    assert "draft" not in traces(charts.roofline(recommendation.baseline, profile.hardware))


def test_every_alternative_has_a_bar_with_its_reason(recommendation: Recommendation) -> None:
    figure = charts.alternatives(recommendation)
    shown = {name: reason for trace in figure.data for name, reason in zip(trace.y, trace.customdata, strict=True)}
    assert shown == {recommendation.name: "recommended"} | {
        other.preset: other.rejected for other in recommendation.alternatives
    }
    verdicts = traces(figure)
    assert verdicts["recommended"].y == (recommendation.name,)
    assert "dapq" in verdicts["quality"].y
    assert min(min(trace.error_x.array) for trace in figure.data) >= 0


@pytest.mark.parametrize("objective", ["latency", "total", "memory"])
@pytest.mark.parametrize("memory_limit", [None, 34 * GIB])
def test_every_verdict_has_a_colour(profile: Profile, objective: str, memory_limit: float | None) -> None:
    one = recommend(
        "meta-llama/Llama-3.1-8B", "h200", 120_000, profile=profile, objective=objective, memory_limit=memory_limit
    )
    bars = sum(len(trace.y) for trace in charts.alternatives(one).data)
    assert bars == len(one.alternatives) + 1


def test_operations_never_exceed_the_round(recommendation: Recommendation) -> None:
    shorter = replace(recommendation.predicted, round_s={"draft": 0.0, "verification": 1e-9})
    assert rounds.operation_ms(shorter)["sampling, flush and host"] == 0
