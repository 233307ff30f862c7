"""Plain decoding and a plan on a tiny model, compared with predictions of a profile that is made up."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_files import write_gguf

from ridgeplan import runtime
from ridgeplan.roofline.catalog.profile import Profile, Rates
from ridgeplan.roofline.plan.plan import Plan, Weights, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.validate import RunOptions, compare, run_plans, validate_plan
from ridgeplan.validate.machine import cpu_hardware
from ridgeplan.validate.measure import Run
from ridgeplan.validate.prompts import prompt_tokens

PROFILE = Profile(
    hardware=cpu_hardware(2e10, 1e11), device="cpu", software={}, date="2026-11-21", asynchronous=False,
    classes={"linear": Rates(0.8, 0.5, 1e-5, 0.1), "elementwise": Rates(0.5, 0.5, 1e-5, 0.1)},
)  # fmt: skip
CONTEXT, NEW_TOKENS = 320, 12
PLAN = preset("quantspec", Workload("SmolLM2-135M", PROFILE.hardware.name, CONTEXT, NEW_TOKENS, batch=2))


def test_a_plan_is_validated_beside_plain_decoding(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeplan.validate.comparison.is_busy", lambda spread: False)  # whatever else runs here
    messages: list[tuple[int, int]] = []
    tokenizer = runtime.load(PLAN, str(tiny_folder)).tokenizer
    prompts = [prompt_tokens(tokenizer, CONTEXT), prompt_tokens(tokenizer, CONTEXT - 20)]
    options = RunOptions(
        str(tiny_folder), prompts, NEW_TOKENS, profile=PROFILE, on_progress=lambda *step: messages.append(step)
    )
    result = validate_plan(PLAN, options)
    assert (result.comparison.context, result.comparison.batch) == (CONTEXT - 10, 2)
    assert result.comparison.new_tokens == NEW_TOKENS
    assert result.comparison.row("acceptance").measured == result.planned.measured.statistics.acceptance
    speedup = result.comparison.row("speed-up over plain decoding").measured
    plain, planned = (run.measured.tpot_ms for run in (result.plain, result.planned))
    assert speedup == pytest.approx(plain / planned)
    texts = tokenizer.batch_decode([list(tokens) for tokens in result.planned.measured.tokens])
    assert list(result.planned.texts) == texts
    assert all(len(tokens) == NEW_TOKENS for tokens in result.planned.measured.tokens)
    assert {index: max(tokens for at, tokens in messages if at == index) for index in (0, 1)} == {
        0: 2 * NEW_TOKENS,
        1: 2 * NEW_TOKENS,
    }
    assert result.in_turns
    assert set(result.to_dict()) == {"plan", "plain", "in_turns"}


def test_a_plan_on_stored_weights_is_validated_beside_plain_decoding_on_them(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full precision an 8B model would not fit where its file does; the two share the weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ridgeplan.validate.comparison.is_busy", lambda spread: False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)
    write_gguf(tmp_path / "mixed.gguf", model, kinds=["Q4_0"])
    plan = replace(preset("int8", PLAN.workload), weights=Weights(stored=True))
    options = RunOptions(str(tmp_path / "mixed.gguf"), [[1, 2, 3] * 50], NEW_TOKENS, profile=PROFILE)
    result = validate_plan(plan, options)
    assert result.plain.comparison.preset == "stored weights"
    assert result.planned.comparison.preset == "stored weights + INT8 KV"
    assert result.plain.comparison.row("speed-up over plain decoding").predicted == 1
    plain, planned = (run.measured.tpot_ms for run in (result.plain, result.planned))
    assert result.comparison.row("speed-up over plain decoding").measured == pytest.approx(plain / planned)


def test_sampling_reaches_both_runs_but_not_its_stop_tokens(tiny_folder: Path) -> None:
    sampling = runtime.SamplingParams(temperature=1.5, seed=4, stop_token_ids=range(256))
    prompts = [[1, 2, 3] * 50, [4, 5, 6] * 40]
    result = validate_plan(PLAN, RunOptions(str(tiny_folder), prompts, NEW_TOKENS, sampling, profile=PROFILE))
    engine = runtime.load(preset("autoregressive", PLAN.workload), str(tiny_folder), device="cpu")
    expected = engine.generate(prompts, NEW_TOKENS, runtime.SamplingParams(temperature=1.5, seed=4)).tokens
    assert result.plain.measured.tokens == tuple(map(tuple, expected))
    assert [len(tokens) for tokens in result.planned.measured.tokens] == [NEW_TOKENS] * 2


def test_plans_that_do_not_fit_together_run_one_after_another(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for one engine at a time: a second one is refused while the first is open."""
    load, engines, order = runtime.load, [], []

    def one_at_a_time(plan: Plan, *arguments: Any, **options: Any) -> runtime.Engine:
        if any(engine.cache is not None for engine in engines):
            raise WorkloadError("out of memory")
        engines.append(load(plan, *arguments, **options))
        return engines[-1]

    monkeypatch.setattr(runtime, "load", one_at_a_time)
    options = RunOptions(
        str(tiny_folder), [[1, 2, 3] * 50], NEW_TOKENS, profile=PROFILE,
        on_progress=lambda index, tokens: order.extend([index] * (tokens > 0)),  # 0 while a model loads
    )  # fmt: skip
    result = validate_plan(PLAN, options)
    assert not result.in_turns
    assert not result.to_dict()["in_turns"]
    assert order == sorted(order)
    assert order.count(0) == NEW_TOKENS
    assert [len(run.measured.tokens[0]) for run in (result.plain, result.planned)] == [NEW_TOKENS] * 2
    assert engines[1].weights is engines[0].weights


@pytest.mark.parametrize("in_turns", [True, False])
def test_a_target_with_4_bit_weights_has_its_own(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, in_turns: bool
) -> None:
    loaded, load = [], runtime.load

    def remembered(plan: Any, *arguments: Any, weights: Any, **options: Any) -> Any:
        if not in_turns and len(loaded) == 1:
            loaded.append(None)
            raise WorkloadError("no memory beside the first")
        engine = load(plan, *arguments, weights=weights, **options)
        loaded.append((weights, options["calibration"], engine.weights))
        return engine

    monkeypatch.setattr(runtime, "load", remembered)
    int4 = preset("int4-weights", PLAN.workload)
    text = [1, 2, 3] * 20
    options = RunOptions(str(tiny_folder), [[1, 2, 3] * 5], 4, profile=PROFILE, calibration=text)
    result = run_plans([preset("autoregressive", PLAN.workload), int4, int4], options)
    assert result.in_turns == in_turns
    plain, first, second = (kwargs for kwargs in loaded if kwargs is not None)
    assert plain[:2] == (None, None)
    assert first[:2] == (None, text)
    assert second[0] is first[2]
    assert second[2].format.group == 64  # of 64 channels


def test_each_run_frees_what_the_later_ones_peaks_leave_out(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 MB for each engine that is not freed, the third of three runs leaves out 2 MB."""
    engines: list[weakref.ref[runtime.Engine]] = []
    left_out: list[int] = []
    load, measured = runtime.load, Run.measured

    def remembered(*arguments: Any, **options: Any) -> runtime.Engine:
        engine = load(*arguments, **options)
        engines.append(weakref.ref(engine))
        return engine

    def noted(run: Run, *, exclusive: bool, freed_bytes: int) -> Any:
        left_out.append(freed_bytes)
        return measured(run, exclusive=exclusive, freed_bytes=freed_bytes)

    monkeypatch.setattr(runtime, "load", remembered)
    monkeypatch.setattr(Run, "measured", noted)
    alive = "ridgeplan.validate.validation._Lanes._allocated_bytes"
    monkeypatch.setattr(alive, lambda lanes: 1_000_000 * sum(engine() is not None for engine in engines))
    plans = [preset(name, PLAN.workload) for name in ("autoregressive", "int8", "quantspec")]
    result = run_plans(plans, RunOptions(str(tiny_folder), [[1, 2, 3] * 50], NEW_TOKENS, profile=PROFILE))
    assert left_out == [0, 1_000_000, 2_000_000]
    assert [run.measured.statistics.gamma > 0 for run in result.runs] == [False, False, True]


def test_a_request_that_no_plan_allows_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(WorkloadError, match="max_new_tokens is 13"):
        validate_plan(PLAN, RunOptions(str(tiny_folder), [[1, 2, 3]], NEW_TOKENS + 1, profile=PROFILE))


def test_comparing_needs_a_generation_and_outlives_the_engines_caches(tiny_folder: Path) -> None:
    engine = runtime.load(PLAN, str(tiny_folder))
    with pytest.raises(WorkloadError, match="generate first"):
        compare(PLAN, engine, profile=PROFILE)
    engine.generate([[1, 2, 3]], 2)
    compared = compare(PLAN, engine, profile=PROFILE)
    assert (compared.context, compared.new_tokens, compared.batch) == (3, 2, 1)
    engine.close()
    assert compare(PLAN, engine, profile=PROFILE) == compared


@pytest.mark.gpu
def test_on_a_gpu_runs_in_turns_have_the_tokens_and_the_peak_that_they_have_alone(tiny_folder: Path) -> None:
    gc.collect()  # what earlier tests left in cycles would count to the first peak
    prompts = [[index % 250 for index in range(CONTEXT)]] * 2
    plans = [preset(name, PLAN.workload) for name in ("autoregressive", "int8")]
    options = RunOptions(str(tiny_folder), prompts, NEW_TOKENS, profile=PROFILE)
    together = run_plans(plans, options)
    assert together.in_turns
    for plan, run in zip(plans, together.runs, strict=True):
        torch.cuda.empty_cache()
        single = run_plans([plan], options).runs[0].measured
        assert run.measured.tokens == single.tokens
        assert run.measured.segments and all(segment.seconds > 0 for segment in run.measured.segments)
        peaks = [measured.statistics.peak_memory_bytes for measured in (run.measured, single)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.05)
