"""The figures hold what the predictions say."""

from dataclasses import replace
from typing import Any

import pytest

from ridgeplan.dashboards import charts
from ridgeplan.planner import Recommendation, recommend
from ridgeplan.planner.recommendation import GIB
from ridgeplan.roofline.catalog.profile import Profile, Rates


def traces(figure: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


def test_both_stacks_add_up_to_the_time_per_token(recommendation: Recommendation) -> None:
    figure = charts.round_breakdown(recommendation)
    for group in ("part", "operation"):
        bars = [trace for trace in figure.data if trace.legendgroup == group]
        heights = [sum(trace.y[index] for trace in bars) for index in range(2)]
        expected = [recommendation.predicted.best.tpot_ms, recommendation.baseline.best.tpot_ms]
        assert heights == pytest.approx(expected, rel=0.02)
    assert figure.layout.barmode == "stack"
    assert figure.data[0].x == (recommendation.name, charts.PLAIN)


def test_time_without_kernels_is_in_both_stacks(profile: Profile) -> None:
    """Half a millisecond after each round is its overhead, of which no operation knows."""
    gaps = replace(profile, classes={**profile.classes, "gap": Rates(1.0, 1.0, 1e-5, 0.0)}, round_s=5e-4)
    slow = recommend("Llama-3.1-8B", "h200", 120_000, profile=gaps)
    test_both_stacks_add_up_to_the_time_per_token(slow)
    stacks = traces(charts.round_breakdown(slow))
    assert stacks["overhead"].y == pytest.approx([0.5 / slow.predicted.tokens_per_round, 0.5])
    assert stacks["between kernels"].y[1] == pytest.approx(32 * 0.01)  # 10 us in each layer


def test_plain_decoding_drafts_nothing(recommendation: Recommendation) -> None:
    parts = traces(charts.round_breakdown(recommendation))
    assert parts["draft"].y[1] == 0
    assert parts["draft"].y[0] == pytest.approx(
        recommendation.predicted.gamma
        * recommendation.predicted.draft_step_ms
        / recommendation.predicted.tokens_per_round
    )


def test_memory_bars_add_up_to_the_peak(recommendation: Recommendation) -> None:
    predictions = {recommendation.name: recommendation.predicted, charts.PLAIN: recommendation.baseline}
    figure = charts.memory_bars(predictions, 80 * GIB)
    for index, predicted in enumerate(predictions.values()):
        total = sum(trace.x[index] for trace in figure.data)
        assert total == pytest.approx(predicted.best.peak_memory_bytes / GIB)
    assert figure.layout.shapes[0].x0 == 80
    assert figure.layout.xaxis.range[1] > 80


def test_roofline_has_a_dot_per_operation_under_its_roof(recommendation: Recommendation, profile: Profile) -> None:
    hardware = profile.hardware
    found = traces(charts.roofline(recommendation.predicted, hardware))
    assert set(found) == {"roof", "prefill", "draft", "target", "ridge"}
    dots = [dot for part in charts.PASS_COLORS for dot in zip(found[part].x, found[part].y, strict=True)]
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
    assert charts.operation_ms(shorter)["sampling, flush and host"] == 0
