"""vLLM's times from its own profile: twelve measured rows, four of which the fit has not seen."""

import itertools
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeplan.planner.export.engine_profile import EngineProfile, EngineStep, engine_profile, error, fit, measured_rows
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape

LLAMA, H200 = load_shape("meta-llama/Llama-3.1-8B"), load_hardware("h200")
ROWS = measured_rows("vllm").rows


def median_error(profile: EngineProfile, rows: tuple) -> float:
    return statistics.median(abs(error(profile, row)) for row in rows)


def test_twelve_rows_four_of_them_held_out() -> None:
    assert len(ROWS) == 12
    assert sum(row.held_out for row in ROWS) == 4


def test_measured_times_are_predicted() -> None:
    """The median error of all rows, and of those that the fit has not seen, is at most 4%."""
    profile = engine_profile("vllm")
    assert median_error(profile, ROWS) <= 0.04
    assert median_error(profile, tuple(row for row in ROWS if row.held_out)) <= 0.04


def test_whichever_four_rows_are_held_out() -> None:
    """Of all choices that leave the row of INT8 KV and both of fp8 with much KV, the median is at most 4%."""
    medians = []
    for held in itertools.combinations(range(12), 4):
        kept = tuple(row for index, row in enumerate(ROWS) if index not in held)
        long_fp8 = [row for row in kept if row.kv == "fp8" and row.context > 32768]
        if len(long_fp8) == 2 and any(row.kv == "int8_per_token_head" for row in kept):
            medians.append(median_error(fit("vllm", kept), tuple(ROWS[index] for index in held)))
    assert len(medians) > 100
    assert statistics.median(medians) <= 0.04


def test_a_fitted_profile_is_within_the_machine() -> None:
    profile = engine_profile("vllm")
    assert all(0 < share < 1 for share in (profile.weight_utilization, *profile.kv_utilization.values()))
    assert 0 < profile.launch_s < 2e-5
    assert profile.kv_utilization["fp8"] < profile.kv_utilization["bf16"]  # codes are unpacked


def test_a_step_counted_by_hand() -> None:
    """7.50 billion weights of 2 bytes, and 128 KiB of KV a token, at full speed and without launches."""
    ideal = EngineProfile("vllm", "none", "h200", 0.0, 1.0, {"bf16": 1.0, "fp8": 1.0}, 1.0, 1.0, 0.0)
    weights = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 128256 * 4096
    for batch, context in ((1, 32768), (4, 131072)):
        expected = (2 * weights + batch * context * 131072) / 4.8e12
        assert ideal.step_s(EngineStep(batch, context), LLAMA, H200) == pytest.approx(expected, rel=0.003)
    halved = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 2 * 128256 * 4096  # the head stays in 16 bits
    expected = (halved + 32768 * 65536) / 4.8e12
    assert ideal.step_s(EngineStep(1, 32768, 8, "fp8"), LLAMA, H200) == pytest.approx(expected, rel=0.003)


def test_only_launches_take_time_where_nothing_is_read() -> None:
    """9 launches a layer (2 norms, QKV, RoPE, attention, output, gate and up, SwiGLU, down) and 4 others."""
    launching = EngineProfile("vllm", "none", "h200", 1.0, 1e9, {"bf16": 1e9}, 1e9, 1e9, 0.0)
    assert launching.step_s(EngineStep(1, 1), LLAMA, H200) == pytest.approx(9 * 32 + 4)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 256), st.integers(1, 200_000), st.sampled_from(["auto", "fp8", "int4_per_token_head"]))
def test_more_work_never_takes_less_time(batch: int, context: int, kv: str) -> None:
    profile = engine_profile("vllm")
    first = profile.step_s(EngineStep(batch, context, 16, kv), LLAMA, H200)
    for other in (
        EngineStep(batch + 1, context, 16, kv),
        EngineStep(batch, 2 * context, 16, kv),
        EngineStep(batch, context, 16, kv, 4),
    ):
        assert profile.step_s(other, LLAMA, H200) >= first
