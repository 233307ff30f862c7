"""Quality: which constraint admits which plan."""

import dataclasses
import json
from pathlib import Path

import pytest

from ridgeplan import planner
from ridgeplan.planner import quality as module
from ridgeplan.planner.engines.formats import FIDELITIES
from ridgeplan.planner.quality import (
    HEAD,
    Quality,
    QualityRow,
    load_rows,
    losses,
    measured_quality,
    parse_quality,
    quality_of,
    read_rows,
    rows_json,
    ruler_average,
    stated_losses,
    target_values,
)
from ridgeplan.roofline.plan.plan import KVCache, KVFormat, Plan, PlanError, Weights, Workload
from ridgeplan.roofline.plan.presets import preset

WORKLOAD = Workload("m", "h200", 32768)


@pytest.mark.parametrize(
    "name, quality, lost",
    [
        ("autoregressive", Quality.EXACT, 0),
        ("quantspec-exact", Quality.EXACT, 0),
        ("quantspec-weights", Quality.EXACT, 0),  # drafts never change the output
        ("specattn", Quality.EXACT, 0),
        ("int8", Quality.NEAR_LOSSLESS, 1),
        ("quantspec", Quality.NEAR_LOSSLESS, 1),
        ("int8-weights", Quality.NEAR_LOSSLESS, 1),
        ("int8-weights-int8", Quality.NEAR_LOSSLESS, 2),
        ("quantspec-int8", Quality.NEAR_LOSSLESS, 2),
        ("int4-weights", Quality.FOUR_BIT, 1),
        ("int4-weights-int8", Quality.FOUR_BIT, 2),
        ("snapkv", Quality.LOSSY, 1),
        ("quest", Quality.LOSSY, 1),
        ("specontext", Quality.LOSSY, 1),
        ("dapq-quantspec", Quality.LOSSY, 2),  # INT8 KV does not make an eviction near-lossless
    ],
)
def test_quality_of_presets(name, quality, lost):
    plan = preset(name, WORKLOAD)
    assert quality_of(plan) is quality
    assert len(losses(plan)) == lost


def test_losses_are_named_with_the_published_figure():
    assert losses(preset("dapq-quantspec", WORKLOAD)) == [
        "INT8 KV: perplexity +0.16% on WikiText-2, +0.004% on C4 (QuantSpec, Table 2)",
        "dapq keeps 1024 of 32768 prompt tokens: RULER 77.56 of 96.65 with 1024 tokens (DapQ, Table 11)",
    ]
    assert losses(preset("quest", WORKLOAD)) == ["quest reads 2048 tokens of the prompt a step"]
    assert losses(preset("shadowkv", WORKLOAD)) == [
        "shadowkv reads 2048 tokens of the prompt and 384 beside them a step"
    ]


def test_kinds_of_8_bit_weights_have_figures_of_their_own():
    plain, hierarchical = losses(preset("int8-weights", WORKLOAD))[0], losses(preset("quantspec-int8", WORKLOAD))[1]
    assert plain.startswith("INT8 weights (plain): ")
    assert hierarchical.startswith("INT8 weights (hierarchical): ")


def test_a_constraint_admits_its_own_quality_and_stricter_ones():
    admitted = {quality: [other for other in Quality if quality.allows(other)] for quality in Quality}
    assert admitted == {
        Quality.EXACT: [Quality.EXACT],
        Quality.NEAR_LOSSLESS: [Quality.EXACT, Quality.NEAR_LOSSLESS],
        Quality.FOUR_BIT: [Quality.EXACT, Quality.NEAR_LOSSLESS, Quality.FOUR_BIT],
        Quality.LOSSY: list(Quality),
    }


@pytest.mark.parametrize(
    ("floor", "admitted"),
    [
        ("fidelity>=0.99", {"autoregressive", "quantspec-exact"}),
        ("fidelity >= 0.98", {"autoregressive", "quantspec-exact", "int8", "int8-weights"}),
        ("Fidelity>=.8", {"autoregressive", "quantspec-exact", "int8", "int8-weights", "int4-weights"}),
        ("ruler>=70", {"autoregressive", "quantspec-exact", "int8", "int8-weights", "int4-weights", "dapq"}),
        ("ruler>=77", {"autoregressive", "quantspec-exact", "int8", "dapq"}),
        ("RULER>=80", {"autoregressive", "quantspec-exact", "int8"}),
    ],
)
def test_a_floor_admits_plans_whose_figure_reaches_it(floor, admitted, monkeypatch):
    monkeypatch.setattr(module, "saved_rows", lambda: ())
    names = ("autoregressive", "quantspec-exact", "int8", "int8-weights", "int4-weights", "dapq", "h2o", "quest")
    limit = parse_quality(floor)
    assert {name for name in names if limit.admits(preset(name, WORKLOAD))} == admitted
    assert parse_quality(str(limit)) == limit


def test_published_scores_are_of_evictions_at_once(monkeypatch):
    monkeypatch.setattr(module, "saved_rows", lambda: ())
    plan, limit = preset("dapq", WORKLOAD), parse_quality("RULER>=77")
    chunked = dataclasses.replace(plan, eviction=dataclasses.replace(plan.eviction, chunk=4096))
    assert limit.admits(plan)
    assert not limit.admits(chunked)


def test_a_score_of_8_bit_weights_is_a_lower_bound(monkeypatch):
    """They keep more than 4-bit ones, whose score was measured."""
    monkeypatch.setattr(module, "saved_rows", lambda: ())
    limit = parse_quality("RULER>=80")
    eight, four = (limit.verdict(preset(name, WORKLOAD)) for name in ("int8-weights", "int4-weights"))
    assert eight.startswith("RULER>=80: 70.17 of 96.65 or more, as kept by 4-bit weights on Qwen2.5-Coder-0.5B")
    assert four.startswith("RULER>=80: 70.17 of 96.65, as kept on Qwen2.5-Coder-0.5B")


def test_the_quality_of_an_engines_plan_is_that_of_the_formats_that_it_executes(monkeypatch):
    """Rows of this package's INT8 codes say nothing of fp8."""
    rows = (row("fidelity", 0.99, "int8-weights"), row("niah", 0.99, "int8-weights"))
    monkeypatch.setattr(module, "saved_rows", lambda: rows)
    plan, exact = preset("int8-weights", MEASURED), preset("autoregressive", MEASURED)
    for floor, admitted in (("fidelity>=0.92", True), ("fidelity>=0.95", False), ("RULER>=60", False)):
        limit = parse_quality(floor)
        assert limit.admits(plan) and limit.admits(exact, "vllm")
        assert limit.admits(plan, "vllm") is admitted
    (loss,) = stated_losses(plan, rows, "vllm")
    assert loss.startswith("fp8_per_channel weights: fidelity 0.922, with vLLM's rounding emulated on one small model")
    assert parse_quality("near-lossless").admits(plan, "vllm")


def test_fidelities_of_engines_are_those_of_the_stored_measurement():
    """Each to three digits."""
    results = Path(__file__).parents[2] / "validate" / "results" / "fidelity_fp8_smollm2.json"
    (measured,) = (value for value in json.loads(results.read_text()).values() if "rows" in value)
    stored = {"": 1.0, **{entry["format"]: round(entry["fidelity"], 3) for entry in measured["rows"]}}
    names = {("", "bf16"): "", ("", "fp8"): "fp8 KV"}
    for weights in ("fp8", "fp8_per_channel"):
        names |= {(weights, "bf16"): f"{weights} weights", (weights, "fp8"): f"{weights} weights and KV"}
    known = {(weights, kv): share for weights, by_kv in FIDELITIES.items() for kv, share in by_kv.items()}
    assert {key: stored[name] for key, name in names.items()} == known


def test_a_floor_prefers_what_was_measured(monkeypatch):
    rows = (row("fidelity", 0.97, "quest"), row("niah", 0.9, "quest"))
    monkeypatch.setattr(module, "saved_rows", lambda: rows)
    plan = preset("quest", MEASURED)
    assert parse_quality("fidelity>=0.97").admits(plan) and not parse_quality("fidelity>=0.98").admits(plan)
    assert parse_quality("RULER>=90").admits(plan) and not parse_quality("RULER>=91").admits(plan)


@pytest.mark.parametrize(
    "text", ["", "perfect", "fidelity>=1.5", "RULER>=101", "fidelity<=0.9", "perplexity>=3", None, 1]
)
def test_other_qualities_are_refused(text):
    with pytest.raises(PlanError, match=r"quality is .*; allowed: exact, near-lossless, 4-bit, lossy, or a floor"):
        parse_quality(text)


# Rows of measured quality: what identifies a target, files, and what they say of a plan.

MEASURED = Workload("meta-llama/Llama-3.1-8B", "h200", 30720)


def row(measure="fidelity", value=0.9, name="dapq", **changes):
    plan = preset(name, MEASURED)
    fields = {
        "model": "Llama-3.1-8B", "plan": name, "target": target_values(plan), "context": 32768, "measure": measure,
        "value": value, "plain": 1.0, "samples": 4, "tokens": 128, "seed": 0, "dtype": "bfloat16", "where": "H200",
        "date": "2026-11-22", "text": "a novel",
    }  # fmt: skip
    return QualityRow(**fields | changes)


def test_a_target_is_what_can_change_the_output():
    assert target_values(preset("autoregressive", MEASURED)) == {}
    assert target_values(preset("magicdec-streaming", MEASURED)) == {}  # speculation is exact
    assert target_values(preset("quantspec-exact", MEASURED)) == {}
    int8 = {"kv.target_bits": 8, "kv.group": 128}
    assert target_values(preset("int8", MEASURED)) == target_values(preset("quantspec", MEASURED)) == int8
    assert target_values(preset("dapq-quantspec", MEASURED)) == {
        **int8, "eviction.policy": "dapq", "eviction.budget": 1024,
    }  # fmt: skip
    assert target_values(preset("quest", MEASURED)) == {
        "attention.selection": "quest", "attention.budget": 2048, "attention.sinks": 4, "attention.recent": 128,
        "attention.page": 16, "attention.keep_generated": 1,
    }  # fmt: skip
    assert target_values(Plan(MEASURED, weights=Weights(4, 4, 64))) == {"weights.target_bits": 4, "weights.group": 64}
    groups = Plan(MEASURED, kv=KVCache(KVFormat.INT8, 64))
    assert target_values(groups) != int8
    stretched = dataclasses.replace(MEASURED, yarn_factor=2.0)
    assert target_values(Plan(stretched)) == {"yarn_factor": 2.0}


def test_rows_round_trip_and_files_name_their_mistakes(tmp_path):
    rows = (row(), row("perplexity", 12.5, plain=11.0), row("kv_bytes", 4e9, "int8"))
    assert read_rows(rows_json(rows)) == rows
    (tmp_path / "rows.json").write_text(rows_json(rows), encoding="utf-8")
    assert load_rows(tmp_path / "rows.json") == rows
    with pytest.raises(PlanError, match=r"cannot read quality rows .*nowhere"):
        load_rows(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": -0.1}, "value is -0.1"),
        ({"context": 0}, "context is 0"),
        ({"measure": ""}, "measure is ''"),
        ({"target": {"kv": [1]}}, "target"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"more": 1}, "more"),
    ],
)
def test_damaged_rows_are_refused_in_one_line(change, message):
    document = json.loads(rows_json([row()]))
    document["rows"][0].update(change)
    with pytest.raises(PlanError, match="quality row: ") as error:
        read_rows(json.dumps(document))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"schema": 2, "rows": []}', '{"schema": 1, "rows": 3}', '{"schema": 1}']
)
def test_damaged_files_are_refused(content):
    with pytest.raises(PlanError, match="; allowed: "):
        read_rows(content)


def test_a_cell_is_one_figure_of_one_run():
    assert row().cell == row(value=0.5, date="2026-11-23", plain=0.5).cell
    others = ({"context": 4096}, {"samples": 5}, {"tokens": 64}, {"seed": 1}, {"where": "CPU"}, {"text": "other"},
              {"measure": "perplexity"}, {"name": "snapkv"}, {"target": {}}, {"model": "m"})  # fmt: skip
    assert len({row(**other_row).cell for other_row in others} | {row().cell}) == len(others) + 1


def test_measured_figures_speak_for_plans_of_the_same_target_and_a_near_context():
    rows = [
        row(value=0.91234), row("perplexity", 12.0, plain=11.5), row("tpot_ms", 9.0),
        row("niah_single_1", 0.5, plain=1.0), row("vt", 0.1, plain=0.5), row("cwe", 0.9, plain=0.4),
        row(value=0.2, context=4096), row(value=0.3, name="snapkv"),
    ]  # fmt: skip
    quality = measured_quality(preset("dapq", MEASURED), rows)
    # RULER counts the tasks that plain decoding solves at half or more: (0.5 + 0.1) / 2 of (1.0 + 0.5) / 2.
    assert quality == (
        "fidelity 0.912 (1 - TV); perplexity 12.00 of 11.50; RULER 30.0 of 75.0 over 2 tasks; "
        "at 32768 tokens of a novel [measured]"
    )
    assert measured_quality(preset("dapq-quantspec", MEASURED), rows) is None
    assert measured_quality(preset("autoregressive", MEASURED), [row(name="autoregressive")]) is None
    far = dataclasses.replace(MEASURED, context=70_000)
    assert measured_quality(preset("dapq", far), rows) is None
    other = dataclasses.replace(MEASURED, model="Qwen2.5-7B")
    assert measured_quality(preset("dapq", other), rows) is None


def test_the_head_that_was_measured_last_speaks_for_plans_that_choose_by_one():
    plan = preset("specontext-resident", MEASURED)
    dates = {"old 1f": "2026-01-01", "new 2e": "2026-02-01"}
    rows = [
        dataclasses.replace(fidelity, target={**fidelity.target, HEAD: head}, date=date)
        for fidelity, (head, date) in zip(
            [row(value=0.5, name="specontext-resident"), row(value=0.75, name="specontext-resident")],
            dates.items(),
            strict=True,
        )
    ]
    message = "fidelity 0.750 (1 - TV); at 32768 tokens of a novel, with the retrieval head new 2e [measured]"
    assert measured_quality(plan, rows) == measured_quality(plan, rows[::-1]) == message
    assert rows[0].cell != rows[1].cell
    assert measured_quality(plan, [row(name="specontext-resident")]) == (
        "fidelity 0.900 (1 - TV); at 32768 tokens of a novel [measured]"
    )


def test_ruler_is_the_mean_over_solved_tasks_alone():
    assert ruler_average([row(), row("vt", 0.3, plain=0.49)]) is None
    assert ruler_average([row("vt", 0.25, plain=0.5), row("cwe", 0.75, plain=1.0)]) == (0.5, 0.75, 2)


def test_losses_are_measured_where_there_are_rows_and_published_otherwise():
    rows = [row()]
    assert stated_losses(preset("dapq", MEASURED), rows) == [
        "dapq keeps 1024 of 30720 prompt tokens: fidelity 0.900 (1 - TV); at 32768 tokens of a novel [measured]"
    ]
    (published,) = stated_losses(preset("int8", MEASURED), rows)
    assert published.startswith("INT8 KV: perplexity +0.16%")
    assert published.endswith("[not measured here]")
    assert stated_losses(preset("autoregressive", MEASURED), rows) == []


def test_recommend_states_what_the_user_measured(tmp_path, monkeypatch, h200_profile):
    path = tmp_path / "quality.json"
    monkeypatch.setattr(module, "user_quality_path", lambda: path)
    question = ("meta-llama/Llama-3.1-8B", "h200", 120_000)
    before = planner.recommend(*question, batch=4, profile=h200_profile)
    assert all(loss.endswith("[not measured here]") for loss in before.losses)
    target = target_values(before.plan)
    eight_bits = {"weights.target_bits": 8, "weights.group": 128, "kv.target_bits": 8, "kv.group": 128}
    assert target == {**eight_bits, "weights.hierarchical": 1}
    rows = [row(value=0.977, name=name, context=65536) for name in ("int8-weights-int8", "quantspec-int8")]
    path.write_text(rows_json([dataclasses.replace(rows[0], value=0.5), rows[1]]), encoding="utf-8")
    after = planner.recommend(*question, batch=4, profile=h200_profile)
    assert after.plan == before.plan
    (loss,) = after.losses
    assert "fidelity 0.977" in loss
    assert loss in after.explain()


@pytest.mark.parametrize("value, plain", [(1.5, 0.5), (0.5, 1.5)])
def test_shares_are_at_most_1_of_the_plan_and_of_plain_decoding(value, plain):
    with pytest.raises(PlanError, match=r"fidelity is 1\.5; allowed: a number from 0 to 1"):
        row(value=value, plain=plain)
    assert row("perplexity", value, plain=plain).value == value
