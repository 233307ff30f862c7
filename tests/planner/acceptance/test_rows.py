"""Rows: conversions of published figures by hand count, what ships, files, and names."""

import math
from dataclasses import asdict, replace

import pytest

from ridgeplan.planner.acceptance import AcceptanceModel, row_name
from ridgeplan.planner.acceptance.rows import (
    DRAFTS,
    AcceptanceRow,
    commands_of,
    core_name,
    differences,
    load_rows,
    merged,
    plan_differences,
    rows_json,
    shipped_rows,
    variant_name,
)
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import PlanError, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import conditional_acceptance, tokens_per_round

ROW = {
    "draft": "kv4",
    "model": "m",
    "parameters": 1.0,
    "context": 10,
    "acceptance": 0.9,
    "source": "measured",
    "where": "x",
}


def shipped(model, draft, where, context, gamma, text=None):
    """The one shipped row that these describe."""
    matching = [
        row
        for row in shipped_rows()
        if (row.model, row.draft, row.where, row.context, row.gamma) == (model, draft, where, context, gamma)
        and row.text == (text or row.text)
    ]
    assert len(matching) == 1
    return matching[0]


def test_accepted_over_drafted_is_the_conditional_acceptance_at_one_draft():
    assert shipped("Llama-2-7B-32K", "w4kv4", "QuantSpec, Table 6", 8192, 1, "PG-19").acceptance == pytest.approx(
        0.9188
    )


def test_accepted_over_drafted_at_two_drafts():
    """0.8988 of 2 drafts is 1.7976 = a + a^2, so a = (sqrt(1 + 4 x 1.7976) - 1) / 2."""
    row = shipped("Llama-2-7B-32K", "w4kv4", "QuantSpec, Table 6", 8192, 2, "PG-19")
    assert row.acceptance == pytest.approx((math.sqrt(1 + 4 * 1.7976) - 1) / 2)


def test_accepted_drafts_of_a_round():
    """SpecAttn's 6.11 drafts of 7 are a + ... + a^7, the bonus token not among them."""
    acceptance = shipped("Qwen3-8B", "specattn", "SpecAttn, Table 1", 110592, 7).acceptance
    assert sum(acceptance**power for power in range(1, 8)) == pytest.approx(6.11)


@pytest.mark.parametrize("gamma", [1, 2, 3, 6, 11, 15])
@pytest.mark.parametrize("acceptance", [0.02, 0.5, 0.93, 0.999])
def test_the_share_of_an_acceptance_leads_back_to_it(gamma, acceptance):
    share = (tokens_per_round(acceptance, gamma) - 1) / gamma
    assert conditional_acceptance(share, gamma) == pytest.approx(acceptance)


def test_all_accepted_is_an_acceptance_of_one_and_none_of_zero():
    assert conditional_acceptance(1.0, 5) == pytest.approx(1)
    assert conditional_acceptance(0.0, 5) == pytest.approx(0)


def test_every_gamma_of_the_published_tables_is_there():
    gammas = {}
    for row in shipped_rows():
        gammas.setdefault((row.where, row.model, row.draft, row.text), set()).add(row.gamma)
    for model, text in (
        ("Llama-2-7B-32K", "PG-19"), ("Llama-2-7B-32K", "Multi-LexSum"),
        ("LWM-Text-Chat-128K", "InfiniteBench Sum"), ("LWM-Text-Chat-128K", "Multi-LexSum"),
    ):  # fmt: skip
        assert gammas[("QuantSpec, Table 6", model, "w4kv4", text)] == {1, 2, 4, 6}
        assert gammas[("QuantSpec, Table 6", model, "snapkv", text)] == {1, 2, 3}
    for model in ("Qwen3-8B", "gpt-oss-20b"):
        assert gammas[("SpecAttn, Table 1", model, "specattn", "LongBench-v2")] == {7, 11}


def test_figures_of_decoded_ggufs_and_tuned_models_say_so():
    for row in shipped_rows():
        small = core_name(row.model) in ("smollm2-135m", "qwen2.5-0.5b")
        assert small == ("GGUF" in row.checkpoint) == ("-instruct" in variant_name(row.model))
        assert "GGUF" not in row.checkpoint or "GGUF" in str(row)


def test_measured_rows_say_of_which_text():
    assert all(row.text for row in shipped_rows())


def test_names_of_one_model():
    assert core_name("SmolLM2-135M") == core_name("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert core_name("SmolLM2-135M") == core_name("SmolLM2-135M-Instruct.Q4_1")
    assert core_name("Qwen2.5-0.5B") == core_name("qwen2.5-coder-0.5b-instruct.Q4_K_M")
    assert core_name("Qwen2.5-0.5B") != core_name("Qwen2.5-7B")
    assert variant_name("SmolLM2-135M-Instruct.Q4_1") == variant_name("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert variant_name("SmolLM2-135M") != variant_name("SmolLM2-135M-Instruct")


def test_the_position_of_a_round_is_the_mean_of_its_drafts():
    assert AcceptanceRow(**ROW, gamma=7).mean_position == 4
    assert AcceptanceRow(**ROW, gamma=7, position=6).mean_position == 6


def test_a_new_measurement_replaces_the_old_one_and_joins_others():
    old = AcceptanceRow(**ROW, text="a novel", date="2026-01-01")
    new, other = replace(old, acceptance=0.8, date="2026-11-01"), replace(old, context=20)
    assert merged([old, other], [new]) == (new, other)
    changes = {"text": "a report", "ratio": 0.5, "draft": "kv8", "model": "n", "gamma": 4, "position": 2}
    for change in ({name: value} for name, value in changes.items()):
        assert len(merged([old], [replace(old, **change)])) == 2, change


def test_weights_of_another_quantizer_are_another_row_but_only_where_weights_are_quantized():
    row = AcceptanceRow(**ROW)
    assert len(merged([row], [replace(row, quantizer="gptq")])) == 1
    weights = replace(row, draft="w4")
    assert len(merged([weights], [replace(weights, quantizer="gptq")])) == 2


def test_files_read_back_what_was_written(tmp_path):
    rows = shipped_rows()[:5]
    path = tmp_path / "rows.json"
    path.write_text(rows_json(rows, ["ridgeplan acceptance"]), encoding="utf-8")
    assert load_rows(path) == rows
    assert commands_of(path) == ("ridgeplan acceptance",)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not JSON: .*; allowed: JSON$"),
        ("", "not JSON: it is empty; allowed: JSON$"),
        ("\xff" * 3, "not JSON: .*; allowed: JSON$"),
        ('{"a": 1, "a": 2}', "not JSON: .*; allowed: once$"),
        ("[]", "rows.json"),
        ('{"schema": 9}', "schema 9 is newer"),
        ('{"schema": 1}', "rows is None; allowed: a list of acceptance rows"),
        ('{"schema": 1, "rows": [3]}', "rows is"),
        ('{"schema": 1, "rows": [{}]}', r"acceptance row: 7 mistakes: \(1\) draft is missing; allowed: kv8, kv4, "),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=message) as refused:
        load_rows(path)
    assert "rows.json" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"cannot read acceptance rows .*none\.json.*: No such file"):
        load_rows(tmp_path / "none.json")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"acceptance": 1.2}, "acceptance is 1.2"),
        ({"acceptance": float("nan")}, "acceptance is nan"),
        ({"context": 0}, "context is 0; allowed: a whole number from 1 to 16777216"),
        ({"ratio": 0}, "ratio is 0"),
        ({"gamma": 16}, "gamma is 16; allowed: a whole number from 1 to 15"),
        ({"draft": "kv3"}, "draft is 'kv3'; allowed: kv8, kv4"),
        ({"source": "guessed"}, "source is 'guessed'; allowed: measured"),
        ({"quantizer": "magic"}, "quantizer is 'magic'; allowed: nearest"),
        ({"model": 7}, "model is 7; allowed: a text of 1 to 255 characters"),
        ({"batch": 1}, "batch is not a field; allowed: draft, model, parameters, context"),
    ],
)
def test_rows_from_a_profile_are_validated(change, message):
    assert AcceptanceRow.read(ROW).ratio == 1
    with pytest.raises(PlanError, match=f"acceptance row: {message}"):
        AcceptanceRow.read({**ROW, **change})


def test_rows_from_a_profile_name_what_is_missing():
    missing = r"acceptance row: 2 mistakes: \(1\) source is missing; allowed: .*calibrated.*; \(2\) where is missing"
    with pytest.raises(
        PlanError, match=f"{missing}; allowed: a text of 1 to 4096 characters without control or invisible ones"
    ):
        AcceptanceRow.read({name: value for name, value in ROW.items() if name not in ("source", "where")})


def test_a_row_survives_a_profile():
    row = shipped_rows()[0]
    assert AcceptanceRow.read(asdict(row)) == row


# Rows of drafts that have fewer bits and read fewer tokens: one measurement of what a plan's drafts are together.

LLAMA = "Llama-3.1-8B"
WHOLE_ROW = AcceptanceRow(
    "w4kv4+specattn-weights", "meta-llama/Llama-3.1-8B", 8.03, 32768, 0.8, "measured", "here", ratio=0.07, gamma=4,
    quantizer="gptq", dtype="bfloat16", tokens=256, text="my text",
)  # fmt: skip


def plan_of(name, ratio=0.07):
    plan = preset(name, Workload(LLAMA, "h200", 32768))
    sparse = plan.speculation.ratio < 1
    return replace(plan, speculation=plan.speculation.with_ratio(ratio)) if sparse else plan


def known(name, own_rows=(), ratio=0.07):
    return AcceptanceModel.for_model(load_shape(LLAMA), 32768, [asdict(row) for row in own_rows]).of(
        plan_of(name, ratio)
    )


@pytest.mark.parametrize(
    "name, row",
    [
        ("autoregressive", ""), ("quantspec", "w4kv4"), ("quantspec-kv", "kv4"), ("quantspec-weights", "w4"),
        ("specattn", "specattn"), ("specattn-int4", "w4kv4+specattn-weights"),
    ],
)  # fmt: skip
def test_a_plans_row_is_named_by_all_its_differences(name, row):
    plan = plan_of(name)
    assert row_name(plan) == row
    if row:
        assert row in DRAFTS
        assert differences(row) == plan_differences(plan)


def test_a_row_of_the_whole_is_measured_and_moves_its_prediction():
    before, after = known("specattn-int4"), known("specattn-int4", [WHOLE_ROW])
    assert before.source != "measured"
    assert (after.source, after.where) == ("measured", str(WHOLE_ROW))
    assert abs(after.best - 0.8) < abs(before.best - 0.8)
    assert abs(after.best - 0.8) < 0.03


def test_it_speaks_only_for_its_own_plan_and_ratios_near_it():
    assert known("specattn-int4", [WHOLE_ROW], ratio=0.14).source == "measured"
    assert known("specattn-int4", [WHOLE_ROW], ratio=0.25).source != "measured"
    assert known("specattn", [WHOLE_ROW]).source != "measured"
    assert known("quantspec", [WHOLE_ROW]).source != "measured"
