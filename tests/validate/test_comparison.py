"""Predicted against measured, on figures made up and on a tiny model."""

from dataclasses import replace

import pytest

from ridgeplan.planner.lowering import round_costs
from ridgeplan.planner.prediction import predict
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile, Rates
from ridgeplan.roofline.execution import RoundShape
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime.statistics import Statistics
from ridgeplan.validate.comparison import Comparison, ComparisonRow, compare_measured, tpot_ms_at
from ridgeplan.validate.measure import Measured, Segment

SHAPE = load_shape("SmolLM2-135M")
PROFILE = Profile(
    hardware=load_hardware("h200"), device="NVIDIA H200", software={}, date="2026-11-21",
    classes={"linear": Rates(0.8, 0.7, 3e-6, 0.1), "elementwise": Rates(0.5, 0.5, 2e-6, 0.1)},
)  # fmt: skip
PLAN = preset("quantspec", Workload("SmolLM2-135M", "h200", 8192, 512, batch=4))


@pytest.fixture
def statistics() -> Statistics:
    """20 rounds of 4 drafts for 2 sequences: 144 of 160 drafts accepted, 64 of 80 at the last position."""
    return Statistics(
        gamma=4, prompt_tokens=(900, 1100), rounds=20, sequence_rounds=40,
        generated=182, decoded=180, verified_at=(40, 38, 36, 34),
        accepted_at=(38, 36, 34, 32), flushes=2, prefill_s=0.5, draft_s=0.002, verify_s=0.006, flush_s=0.001,
        decode_s=0.3, idle_s=0.0, capture_s=0.0, peak_memory_bytes=2 << 30,
    )  # fmt: skip


@pytest.fixture
def measured(statistics: Statistics) -> Measured:
    return Measured(context=1000, new_tokens=91, batch=2, statistics=statistics)


@pytest.fixture
def compared(measured: Measured) -> Comparison:
    return compare_measured(PLAN, SHAPE, PROFILE, measured)


def test_the_prediction_is_for_the_workload_that_ran(compared: Comparison) -> None:
    workload = replace(PLAN.workload, context=1000, new_tokens=91, batch=2)
    expected = predict(replace(PLAN, workload=workload), SHAPE, PROFILE)
    assert (compared.context, compared.new_tokens, compared.batch) == (1000, 91, 2)
    assert compared.row("tpot").predicted == expected.best.tpot_ms
    assert compared.row("prefill").predicted == expected.best.ttft_ms
    assert compared.row("draft step").predicted == expected.draft_step_ms
    assert compared.row("peak memory").predicted == expected.best.peak_memory_bytes


def test_proposals_are_compared_beside_the_passes_that_verify_them(measured: Measured) -> None:
    """To the target they are a row of their own; in a cascade they are part of the self-draft's passes."""
    drafted = replace(measured, statistics=replace(measured.statistics, propose_s=0.001, proposal_rounds=30))
    to_target, cascade = (
        compare_measured(preset(name, PLAN.workload), SHAPE, PROFILE, drafted) for name in ("suffix", "cascade")
    )
    assert to_target.predicted is not None and cascade.predicted is not None
    proposals, passes = to_target.row("proposals"), cascade.row("draft step")
    assert (proposals.predicted, proposals.measured) == (1e3 * to_target.predicted.round_s["proposals"], 1)
    assert passes.predicted == cascade.predicted.draft_step_ms + 1e3 * cascade.predicted.round_s["proposals"] / 2
    assert "draft step" not in {row.name for row in to_target.rows}
    assert "proposals" not in {row.name for row in cascade.rows}


def test_measured_figures_are_the_engines(compared: Comparison, statistics: Statistics) -> None:
    measured = {row.name: row.measured for row in compared.rows}
    assert measured == {
        "prefill": 500,
        "draft step": 2,
        "verification": 6,
        "acceptance": pytest.approx(140 / 148),
        "tokens per round": 4.5,
        "tpot": pytest.approx(15 / 4.5),
        "tpot at the measured acceptance": pytest.approx(15 / 4.5),
        "peak memory": 2 << 30,
        "speed-up over plain decoding": None,
    }
    assert measured["acceptance"] == statistics.acceptance


def test_verification_is_predicted_with_its_sampling(compared: Comparison) -> None:
    workload = replace(PLAN.workload, context=1000, new_tokens=91, batch=2)
    expected = predict(replace(PLAN, workload=workload), SHAPE, PROFILE)
    seconds = expected.round_s["verification"] + expected.round_s["acceptance"]
    assert compared.row("verification").predicted == pytest.approx(1e3 * seconds)


def test_errors_of_acceptance_and_of_the_cost_model_are_told_apart(measured: Measured) -> None:
    workload = replace(PLAN.workload, context=1000, new_tokens=91, batch=2)
    plan = replace(PLAN, workload=workload)
    known = predict(plan, SHAPE, PROFILE)
    assert tpot_ms_at(plan, SHAPE, PROFILE, known.acceptance.best) == pytest.approx(known.best.tpot_ms)
    row = compare_measured(PLAN, SHAPE, PROFILE, measured).row("tpot at the measured acceptance")
    assert row.predicted < known.best.tpot_ms  # more drafts were accepted than is known of


def test_rounds_that_adapt_are_predicted_as_those_that_were_taken(measured: Measured) -> None:
    """5 plain steps, 10 rounds of 4 proposals and 5 cascades of two passes, at the tokens that were counted."""
    workload = replace(PLAN.workload, context=1000, new_tokens=91, batch=2)
    plan = preset("adaptive-cascade", workload)
    seconds = round_costs(plan, SHAPE, PROFILE).seconds
    proposed, cascade = RoundShape(4, 0, 4), RoundShape(10, 2, 4)
    counts = ((RoundShape(0, 0, 0), 5), (proposed, 10), (cascade, 5))
    adapted = replace(measured, statistics=replace(measured.statistics, rounds_of=counts))
    row = compare_measured(plan, SHAPE, PROFILE, adapted).row("tpot at the measured acceptance")
    mean_s = (5 * seconds[0] + 10 * seconds[proposed] + 5 * seconds[cascade]) / 20
    assert row.predicted == pytest.approx(1e3 * mean_s / 4.5)


def test_the_measured_speed_up_needs_plain_decoding(measured: Measured, statistics: Statistics) -> None:
    plain = replace(statistics, gamma=0, decode_s=0.6, rounds=90, sequence_rounds=180, verified_at=(), accepted_at=())
    compared = compare_measured(PLAN, SHAPE, PROFILE, measured, replace(measured, statistics=plain))
    row = compared.row("speed-up over plain decoding")
    assert row.measured == pytest.approx(plain.tpot_ms / statistics.tpot_ms)
    assert row.predicted > 0
    assert compared.to_dict()["speedup"] == row.measured
    assert compared.to_dict()["busy"] is False


@pytest.mark.parametrize("busy", ["plain", "plan"])
def test_on_a_busy_machine_the_spread_stands_in_the_place_of_the_speed_up(measured: Measured, busy: str) -> None:
    """Another process slowed three of eight segments tenfold; which of the two runs it hit does not matter."""
    quiet = replace(measured, segments=(Segment(0.1, 10),) * 8)
    slowed = replace(measured, segments=(Segment(0.1, 10),) * 5 + (Segment(1.0, 10),) * 3)
    plain, planned = (slowed, quiet) if busy == "plain" else (quiet, slowed)
    compared = compare_measured(PLAN, SHAPE, PROFILE, planned, plain)
    comparison = compared.to_dict()
    assert compared.busy
    assert (comparison["speedup"], comparison["busy"], comparison["spread"]) == (None, True, pytest.approx(9))
    assert compared.row("speed-up over plain decoding").texts()[2:] == ("machine busy: spread 900%", "")
    assert compared.row("tpot").measured == pytest.approx(1e3 * 0.01 / 4.5)  # the median is the quiet machine's


def test_plain_decoding_has_no_rows_of_speculation(measured: Measured, statistics: Statistics) -> None:
    plain = replace(statistics, gamma=0, verified_at=(), accepted_at=(), peak_memory_bytes=None)
    plan = preset("autoregressive", PLAN.workload)
    compared = compare_measured(plan, SHAPE, PROFILE, replace(measured, statistics=plain))
    assert [row.name for row in compared.rows] == [
        "prefill", "decode step", "tpot", "peak memory", "speed-up over plain decoding"
    ]  # fmt: skip
    assert compared.row("speed-up over plain decoding").predicted == 1
    assert compared.row("peak memory").measured is None


def test_errors_are_relative_to_what_was_measured() -> None:
    assert ComparisonRow("a", "ms", 12, 10).error == pytest.approx(0.2)
    assert ComparisonRow("a", "ms", 12, None).error is None
    assert ComparisonRow("a", "ms", 12, 0.0).error is None


def test_the_table_is_plain_text(compared: Comparison) -> None:
    lines = str(compared).splitlines()
    assert lines[0] == "quantspec, context 1000, 91 new tokens, batch 2"
    assert lines[1].split() == ["predicted", "measured", "error"]
    assert len(lines) == 2 + len(compared.rows)
    assert "2.147 GB" in str(compared)
    assert lines[-1].endswith("not measured")


def test_a_comparison_is_plain_json(compared: Comparison) -> None:
    data = compared.to_dict()
    assert data["preset"] == "quantspec"
    row = next(row for row in data["rows"] if row["name"] == "tpot")
    assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    assert data["rows"][-1]["measured"] is None
