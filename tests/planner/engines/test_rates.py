"""An engine's rates: fitted to measured steps, some of which the fit has not seen."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeplan.planner import PlanError, estimate, recommend
from ridgeplan.planner.engines.formats import DTYPES
from ridgeplan.planner.engines.measurements import (
    BadEngineProfile,
    EngineMeasurements,
    MeasuredStep,
    load_measurements,
    shipped_measurements,
)
from ridgeplan.planner.engines.rates import EngineProfile, engine_profile, error, fit, transferred
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import profile_for, shipped_profiles
from ridgeplan.roofline.engine import (
    PROMPT_SHARE,
    EngineRates,
    EngineReserve,
    EngineStep,
    KVRate,
    padded_rows,
    wave_factor,
)

LLAMA, H200 = load_shape("meta-llama/Llama-3.1-8B"), load_hardware("h200")
MEASURED = shipped_measurements()
PROFILE = engine_profile("vllm", H200)
IDEAL = EngineRates(
    launch_s=0.0, small_launch_s=0.0, expert_launch_s=0.0, packed_expert_launch_s=0.0,
    linear_inverse={16: 1.0, 8: 1.0, 4: 1.0}, expert_inverse={16: 1.0, 8: 1.0, 4: 1.0},
    kv={"bf16": KVRate(1.0), "fp8": KVRate(1.0)}, linear_compute=1.0, attention_compute=1.0,
    reserve=EngineReserve(batched_tokens=0, other_bytes=0.0),
)  # fmt: skip


def step(batch: float, context: float, bits: float = 16, kv: str = "auto", queries: int = 1) -> EngineStep:
    row = MeasuredStep(model=LLAMA.name, context=int(context), batch=int(batch), tpot_ms=1.0, kv=kv,
                       weights="auto" if bits == 16 else "fp8")  # fmt: skip
    return replace(row.step(PROFILE.rates), queries=queries)


def test_measured_steps_are_predicted_within_5_percent_but_for_a_few() -> None:
    """The last wave of attention over 64 channels, which few rows show, takes longer than that over 128.

    Attention to the latent rows of one sequence takes longer than its bytes, and so do steps of recurrent states,
    which no row is fitted to.
    """
    errors = {(row.model, row.context, row.batch): abs(error(PROFILE.rates, MEASURED, row)) for row in MEASURED.rows}
    assert errors.pop(("openai/gpt-oss-20b", 32768, 12)) == pytest.approx(0.064, abs=0.005)
    assert errors.pop(("deepseek-ai/DeepSeek-V2-Lite", 120000, 1)) == pytest.approx(0.126, abs=0.005)
    hybrids = [errors.pop(row) for row in list(errors) if row[0] == "Qwen/Qwen3.5-9B"]
    assert len(hybrids) == 3
    assert max(hybrids) <= 0.06
    assert max(errors.values()) <= 0.05


def test_steps_that_the_fit_has_not_seen_are_within_the_spread() -> None:
    rows = [row for row in MEASURED.rows if row.held_out and not MEASURED.shape_of(row).is_mla]
    held_out = [abs(error(PROFILE.rates, MEASURED, row)) for row in rows]
    assert len(held_out) >= 40
    assert PROFILE.spread <= 0.025
    assert PROFILE.spread == pytest.approx(math.sqrt(np.mean(np.square(held_out))))


def test_a_fitted_engine_is_within_the_machine() -> None:
    rates = PROFILE.rates
    assert min(*rates.linear_inverse.values(), *rates.expert_inverse.values()) > 1
    assert min(rate.inverse for rate in rates.kv.values()) > 1
    assert 1e-6 < rates.small_launch_s < rates.launch_s < rates.expert_launch_s < 1e-4
    assert rates.kv_rate("fp8").inverse > rates.kv_rate("bf16").inverse  # codes are unpacked
    assert rates.kv_rate("never measured") == rates.kv_rate("per_token_head")  # the slowest


def test_a_step_counted_by_hand() -> None:
    """7.50 billion weights of 2 bytes, and 128 KiB of KV a token, at full speed and without launches."""
    weights = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 128256 * 4096
    for batch, context in ((1, 32768), (4, 131072)):
        expected = (2 * weights + batch * context * 131072) / 4.8e12
        ideal_step = EngineStep(batch, context, 16, 16, KVRate(1.0))
        assert IDEAL.step_s(LLAMA, H200, ideal_step) == pytest.approx(expected, rel=0.003)
    halved = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 2 * 128256 * 4096  # the head stays in 16 bits
    expected = (halved + 32768 * 65536) / 4.8e12
    assert IDEAL.step_s(LLAMA, H200, EngineStep(1, 32768, 8, 8, KVRate(1.0))) == pytest.approx(expected, rel=0.003)


def test_only_launches_take_time_where_nothing_is_read() -> None:
    """A layer: 4 products, attention, 4 small launches (2 norms, RoPE, SwiGLU). A step: the head, 3 small ones."""
    free = dict.fromkeys((16, 8, 4), 1e-12)
    launching = replace(IDEAL, launch_s=1.0, small_launch_s=0.1, linear_inverse=free, linear_compute=1e12,
                        attention_compute=1e12)  # fmt: skip
    assert launching.step_s(LLAMA, H200, EngineStep(1, 1, 16, 16, KVRate(1e-12))) == pytest.approx(
        (5 * 32 + 1) + 0.1 * (4 * 32 + 3)
    )


def test_batches_run_in_the_next_captured_graph() -> None:
    batches = np.array([1, 2, 3, 4, 5, 8, 9, 16, 17, 255, 256, 257, 512, 513])
    assert padded_rows(batches).tolist() == [1, 2, 4, 4, 8, 8, 16, 16, 24, 256, 256, 272, 512, 513]


def test_a_batch_whose_tiles_leave_a_short_wave_is_slower_than_a_larger_one() -> None:
    """Measured at 32k tokens: 13.15 ms at batch 6 and 12.89 at batch 8."""
    six, eight = (PROFILE.rates.step_s(LLAMA, H200, step(batch, 32768)) for batch in (6, 8))
    assert six > eight


def test_tiles_of_a_last_wave_counted_by_hand() -> None:
    """8 KV heads on 132 SMs. Batch 4: 4 splits, 128 tiles, one wave. Batch 6: 3 splits, 144 tiles, 12 in a second."""
    tokens = 128 * 1000
    assert wave_factor(4, 8, tokens, 132, 1.5) == pytest.approx(1.0)
    assert wave_factor(6, 8, tokens, 132, 1.5) == pytest.approx(132 / 144 + 132 / 144 / 1.5)
    assert wave_factor(6, 8, tokens, 132, 1e9) == pytest.approx(1.0)
    assert wave_factor(1, 1, tokens, 132, 1.5) == pytest.approx(132 / 32 / 1.5)  # at most 32 splits: 32 SMs read


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 256), st.integers(1, 200_000), st.sampled_from(["auto", "fp8"]))
def test_longer_contexts_and_more_queries_never_take_less_time(batch: int, context: int, kv: str) -> None:
    one = PROFILE.rates.step_s(LLAMA, H200, step(batch, context, kv=kv))
    for other in (step(batch, 2 * context, kv=kv), step(batch, context, kv=kv, queries=4)):
        assert PROFILE.rates.step_s(LLAMA, H200, other) >= 0.999 * one


def certainty(profile: EngineProfile, model: str = LLAMA.name, kind: str = "bf16", **sizes: float) -> tuple[str, float]:
    engine_step = step(sizes.get("batch", 4), sizes.get("context", 32768), sizes.get("bits", 16))
    return profile.certainty(engine_step, kind, load_shape(model))


def test_the_band_widens_with_the_distance_to_what_was_measured() -> None:
    """Another dense model, other sizes than were measured, a kind of cache, a machine and an engine."""
    source, spread = certainty(PROFILE)
    assert (source, spread) == ("calibrated", PROFILE.spread)
    ladder = [
        certainty(PROFILE),
        certainty(PROFILE, "Qwen/Qwen3-8B"),
        certainty(PROFILE, context=min(row.context for row in MEASURED.rows) / 4),
        certainty(PROFILE, batch=128),
        certainty(PROFILE, kind="turboquant"),
        certainty(engine_profile("vllm", load_hardware("a100"))),
        certainty(engine_profile("sglang", load_hardware("a100"))),
    ]
    spreads = [spread for _, spread in ladder]
    assert spreads == sorted(set(spreads))
    assert [source for source, _ in ladder] == [
        "calibrated", "calibrated", "extrapolated", "extrapolated", "prior", "transferred", "transferred"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "plan", "measured_ms"),
    [
        ("meta-llama/Llama-3.1-8B", "autoregressive", 1220),
        ("meta-llama/Llama-3.1-8B", "int8-weights-int8", 870),
        ("Qwen/Qwen3-30B-A3B", "autoregressive", 1140),
        ("openai/gpt-oss-20b", "autoregressive", 580),
    ],
)
def test_a_prompts_time_is_within_its_band(model: str, plan: str, measured_ms: float) -> None:
    """Prompts of 32k tokens in vLLM 0.24 on an H200."""
    result = estimate(model, "h200", 32768, preset=plan, new_tokens=1, backend="vllm").predicted
    assert result.best.ttft_ms == pytest.approx(measured_ms, rel=0.16)
    assert result.low.ttft_ms < measured_ms < result.high.ttft_ms


def test_a_format_measured_at_one_batch_is_extrapolated_to_others() -> None:
    """per_token_head has one row, of batch 1 at 32k tokens; 16-bit caches have batches up to 16."""
    of_kind = {
        (kv, batch): PROFILE.certainty(step(batch, 32768, kv=kv), DTYPES[kv].kind, LLAMA)
        for kv in ("int8_per_token_head", "auto")
        for batch in (1, 16)
    }
    assert [source for source, _ in of_kind.values()] == ["calibrated", "extrapolated", "calibrated", "calibrated"]
    assert of_kind["int8_per_token_head", 16][1] > 3 * of_kind["auto", 16][1]


def test_an_h100_reads_fp8_caches_at_its_full_bandwidth() -> None:
    """Instructions bind them on an H200 (4.8 TB/s); the H100 has the same SMs and 3.35 TB/s."""
    there = transferred(PROFILE.rates, H200, load_hardware("h100"))
    here = PROFILE.rates
    expected = max(here.kv_rate("bf16").inverse, here.kv_rate("fp8").inverse * 3.35 / 4.8)
    assert there.kv_rate("fp8").inverse == pytest.approx(expected, rel=0.01)
    assert there.kv_rate("bf16").sm_share == pytest.approx(here.kv_rate("bf16").sm_share * 4.8 / 3.35, rel=0.01)
    assert there.launch_s == PROFILE.rates.launch_s


def own_engine(slower: float, kv: str = "auto") -> EngineMeasurements:
    """A user's H200 whose steps all take `slower` times the shipped ones."""
    rows = tuple(
        MeasuredStep(model=LLAMA.name, context=context, batch=batch, kv=kv,
                     tpot_ms=float(1e3 * slower * PROFILE.rates.step_s(LLAMA, H200, step(batch, context, kv=kv))))
        for context, batch in itertools.product((2048, 8192, 32768), (1, 4, 8))
    )  # fmt: skip
    return EngineMeasurements(engine="vllm", version="9.9", device="NVIDIA H200", date="2026-11-24", hardware=H200,
                              rows=rows)  # fmt: skip


def test_a_users_measurements_replace_the_shipped_ones(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(own_engine(1.3).to_json(), encoding="utf-8")
    assert load_measurements(path) == own_engine(1.3)
    profile = engine_profile("vllm", H200, path)
    for row in own_engine(1.3).rows:
        assert abs(error(profile.rates, profile.measured, row)) < 0.02
    shipped, measured = (
        recommend("Llama-3.1-8B", "h200", 16384, batch=4, quality="exact", backend="vllm", engine_profile=file)
        for file in (None, path)
    )
    assert measured.predicted.best.tpot_ms / shipped.predicted.best.tpot_ms == pytest.approx(1.3, rel=0.02)
    assert "vLLM 9.9" in measured.notes[0]


def test_rates_that_a_user_did_not_measure_stay_the_shipped_ones(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(own_engine(1.0).to_json(), encoding="utf-8")
    profile = engine_profile("vllm", H200, path)
    assert profile.rates.kv_rate("fp8").inverse == pytest.approx(PROFILE.rates.kv_rate("fp8").inverse)
    assert certainty(profile, kind="fp8")[1] > certainty(profile)[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ('{"schema": 2}', "newer"),
        ('{"schema": 1, "engine": "tgi"}', "engine is 'tgi'; allowed: vllm"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "engine.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadEngineProfile, match=message):
        engine_profile("vllm", H200, path)
    with pytest.raises(BadEngineProfile, match="cannot read"):
        engine_profile("vllm", H200, tmp_path / "none.json")


def test_another_engines_file_and_a_cpu_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(own_engine(1.0).to_json(), encoding="utf-8")
    with pytest.raises(PlanError, match="is a profile of vllm; allowed: one of sglang"):
        engine_profile("sglang", H200, path)
    with pytest.raises(PlanError, match=r"has no profile for .*; allowed: a GPU"):
        engine_profile("vllm", replace(H200, kind="cpu", name="some CPU"))


def test_rows_that_fit_no_rate_are_not_fitted() -> None:
    assert fit(MEASURED, MEASURED.fitted).launch_s == pytest.approx(PROFILE.rates.launch_s)


@pytest.mark.parametrize(
    "gpu, share", [("a100", PROMPT_SHARE), ("a10g", PROMPT_SHARE), ("l40s", 2.0), ("rtx4090", 2.0), ("h200", 2.0)]
)
def test_prompts_use_fp8_tensor_cores_from_ada_on(gpu: str, share: float) -> None:
    """share: of the 16-bit products that the library alone reaches."""
    hardware = load_hardware(gpu)
    library = profile_for(hardware, shipped_profiles()).rates("prefill_linear").compute_utilization
    rates = engine_profile("vllm", hardware).rates
    assert rates.linear_compute * rates.coded_speedup == pytest.approx(share * library)


def test_fp8_kv_saves_memory_but_no_time_on_ampere() -> None:
    """One policy for plan and export, whose rule cites what was measured on an A100."""
    times = {
        gpu: [estimate("Llama-3.1-8B", gpu, 32_768, preset=preset, batch=8, backend="vllm").predicted.best
              for preset in ("autoregressive", "int8")]
        for gpu in ("a100-80gb", "h200")
    }  # fmt: skip
    (plain, coded), (hopper, coded_hopper) = times["a100-80gb"], times["h200"]
    assert coded.tpot_ms == pytest.approx(plain.tpot_ms, rel=0.01) and coded_hopper.tpot_ms < 0.9 * hopper.tpot_ms
    assert coded.peak_memory_bytes < plain.peak_memory_bytes - 10e9
