"""Serve commands with the plugin: what vLLM's parser takes, and what the plugin reads of it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.planner import PlanError, recommend, resolve
from ridgeplan.planner.export import (
    ServeCommandOptions,
    engine_named,
    export_with_plugin,
    fastest_with_plugin,
    schema_for,
)
from ridgeplan.planner.export.plugin import VERSION
from ridgeplan.planner.feasibility import NothingFits
from ridgeplan.planner.prediction import predict_question
from ridgeplan.planner.question import ask
from ridgeplan.roofline.plan.plan import KVFormat, Plan, Workload
from ridgeplan.roofline.plan.presets import PRESETS, preset
from ridgeplan.roofline.plan.support import Backend, not_carried
from ridgeplan.runtime.vllm.weights import PlanWeights

MEASURED = json.loads(Path("validate/results/plugin_h200.json").read_text(encoding="utf-8"))["rows"]
WORKLOAD = Workload("meta-llama/Llama-3.1-8B", "h200", 32000, new_tokens=500, batch=4)


def options(plan: Plan, **changes: Any) -> ServeCommandOptions:
    shape, profile = resolve(plan.workload.model, "h200")
    vllm = engine_named("vllm")
    return replace(ServeCommandOptions(plan, shape, profile, vllm, schema_for("vllm", VERSION), shape.name), **changes)


def test_a_plan_with_drafts() -> None:
    plan = preset("quantspec-int8", WORKLOAD)
    exported = export_with_plugin(options(plan))
    assert exported.command.words[:5] == ("env", "VLLM_USE_V2_MODEL_RUNNER=0", "vllm", "serve", WORKLOAD.model)
    taken = schema_for("vllm", VERSION).parse(exported.command.options)
    assert taken["max_model_len"] == 32512 and taken["max_model_len"] % 128 == 0  # 32,500 tokens, in whole pages
    assert (taken["kv_cache_dtype"], taken["block_size"]) == ("int8_per_token_head", 128)
    assert taken["compilation_config"]["cudagraph_capture_sizes"] == [5, 10, 20]  # rounds of 1, 2 and 4 sequences
    drafts = taken["speculative_config"]
    assert drafts["num_speculative_tokens"] == plan.speculation.gamma and drafts["method"] == "custom_class"
    weights = PlanWeights.from_config(taken["hf_overrides"]["quantization_config"])
    assert (weights.format.bits, weights.format.group, weights.format.hierarchical) == plan.weights.target_format[:3]
    assert [axis.axis for axis in exported.carried] == ["weights", "KV cache", "drafts"]


@pytest.mark.parametrize(("context", "slower"), [(4096, True), (130_048, False)])
def test_drafts_that_slow_the_plugin_down_are_left_out(context: int, slower: bool) -> None:
    plan = preset("quantspec-int8", replace(WORKLOAD, context=context))
    drafting, exported = export_with_plugin(options(plan)), fastest_with_plugin(options(plan))
    assert drafting.times and exported.times and drafting.times.plain_ms == exported.times.plain_ms
    assert exported.times.tpot_ms == min(drafting.times.tpot_ms, drafting.times.plain_ms)
    assert (drafting.times.plain_ms < drafting.times.tpot_ms) == slower
    assert ("--speculative-config" in dict(exported.command.arguments)) != slower
    assert ("--keep-drafts" in exported.carried[-1].engine) == slower


def test_times_are_those_of_plan() -> None:
    best = recommend(WORKLOAD.model, "h200", 32000, batch=4, new_tokens=500, backend="vllm+plugin")
    assert best.predicted.source == "calibrated" and not best.plan.speculation.active
    assert any("`ridgeplan export --to vllm --plugin`" in note for note in best.notes)
    exported = export_with_plugin(options(best.plan))
    assert (exported.engine, exported.version) == ("ridgeplan's plugin of vLLM", VERSION)
    times, figures = exported.times, best.predicted
    assert times is not None
    assert (times.low_ms, times.tpot_ms, times.high_ms) == pytest.approx(
        [each.tpot_ms for each in (figures.low, figures.best, figures.high)]
    )
    assert times.low_ms < times.tpot_ms < times.high_ms


@pytest.mark.parametrize(
    ("case", "name", "error"), [("stage1", "int8-weights-int8", 0.03), ("stage2", "quantspec-int8", 0.07)]
)
def test_measured_rounds_are_predicted(case: str, name: str, error: float) -> None:
    """The table of docs/vllm.md; the band holds all of it."""
    rows = [row for row in MEASURED if row.get("case") == case]
    assert len(rows) == 6 and {row["gamma"] for row in rows} == {preset(name, WORKLOAD).speculation.gamma}
    for row in rows:
        question = ask(
            WORKLOAD.model, "h200", row["context"], batch=row["batch"], new_tokens=128, backend="vllm+plugin"
        )
        (predicted,) = predict_question([preset(name, question.workload)], question)
        assert predicted.round_ms == pytest.approx(row["step_ms"], rel=error)
        shares = (figures.tpot_ms / predicted.best.tpot_ms for figures in (predicted.low, predicted.high))
        low_ms, high_ms = (predicted.round_ms * share for share in shares)
        assert low_ms < row["step_ms"] < high_ms


def test_drafts_win_or_lose_by_their_times() -> None:
    answer = recommend(WORKLOAD.model, "h200", 4096, batch=8, backend="vllm+plugin")
    assert not answer.plan.speculation.active
    reasons = {row.preset: row.rejected for row in answer.alternatives}
    assert re.fullmatch(r"slower: 1\.\d\dx the recommended plan's time", reasons["quantspec-int8"] or "")


def test_a_wide_verification_is_warned_of() -> None:
    for batch, warned in ((12, []), (13, ["wide-verification"])):  # of 5 tokens each, in products of up to 64 rows
        exported = export_with_plugin(options(preset("quantspec-int8", replace(WORKLOAD, batch=batch))))
        assert [rule.name for rule in exported.rules] == warned


def test_weights_alone_leave_vllms_cache() -> None:
    exported = export_with_plugin(options(preset("int4-weights", WORKLOAD)))
    assert [name for name, _ in exported.command.arguments][4:] == ["--hf-overrides"]
    plain = export_with_plugin(options(preset("int8", WORKLOAD)))
    assert "--hf-overrides" not in dict(plain.command.arguments)


CARRIED = {
    "autoregressive", "int8", "int8-weights", "int8-weights-int8", "int4-weights", "int4-weights-int8", "quantspec-kv",
    "quantspec-int8", "quantspec-int4",
}  # fmt: skip


def test_which_presets_are_carried() -> None:
    shape, _ = resolve(WORKLOAD.model, "h200")
    assert {name for name in PRESETS if not_carried(preset(name, WORKLOAD), shape) is None} == CARRIED


@pytest.mark.parametrize(
    ("plan", "changes", "said"),
    [
        (preset("snapkv", WORKLOAD), {}, "snapkv: vllm.plugin carries no eviction 'snapkv'; allowed: export without"),
        (preset("quantspec", WORKLOAD), {}, "no second copy of the weights for drafts"),
        (preset("int8", WORKLOAD), {"engine": engine_named("sglang")}, "--plugin is for vLLM, not SGLang"),
        (preset("int8", WORKLOAD), {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype with --plugin"),
        (preset("int8", WORKLOAD), {"schema": schema_for("vllm", "0.33.0")}, "does not know vLLM 0.33.0; allowed:"),
    ],
)  # fmt: skip
def test_what_is_not_carried_is_refused_in_a_line(plan: Plan, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        export_with_plugin(options(plan, **changes))
    assert "\n" not in str(caught.value)


def test_a_model_that_the_plugin_does_not_carry_is_refused() -> None:
    with pytest.raises(NothingFits, match=r"carries no .*experts; allowed: backend vllm"):
        recommend("Qwen/Qwen3-30B-A3B", "h200", 32000, backend="vllm+plugin")
    with pytest.raises(PlanError, match=r"carries no experts; allowed: export without --plugin$"):
        export_with_plugin(options(preset("int8", replace(WORKLOAD, model="Qwen/Qwen3-30B-A3B"))))
    shape, _ = resolve(WORKLOAD.model, "h200")
    plan = replace(preset("int8", WORKLOAD), kv=replace(preset("int8", WORKLOAD).kv, group=64))
    assert not_carried(plan, shape) == f"{Backend.VLLM_PLUGIN} carries no KV in groups of 64"
    assert plan.kv.format is KVFormat.INT8
