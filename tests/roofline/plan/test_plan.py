"""The plan: exact round trip, and every way untrusted JSON can be wrong."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import degrees, plans

from ridgeplan.roofline.catalog.parallel import Parallel
from ridgeplan.roofline.catalog.validation import INVISIBLE, UNPRINTABLE
from ridgeplan.roofline.plan.plan import (
    DraftCodes,
    Eviction,
    KVCache,
    KVFormat,
    Placement,
    Plan,
    PlanError,
    Speculation,
    TargetAttention,
    Weights,
    Workload,
)
from ridgeplan.roofline.plan.policies.selections import Quest, SpecAttn
from ridgeplan.roofline.plan.policy import AllTokens, make_selection
from ridgeplan.roofline.plan.presets import PRESETS, preset

WORKLOAD = Workload("model", "h200", 4096)


SHOWN = st.characters(exclude_categories=["C"]).filter(
    lambda character: not re.match(f"[{INVISIBLE}{UNPRINTABLE}]", character)
)
NAMES = st.text(SHOWN, min_size=1, max_size=255)
WORKLOADS = st.builds(Workload, NAMES, st.just("h200"), st.integers(1, 1 << 24), batch=st.integers(1, 4096))


@given(plans(WORKLOADS, degrees(1, 2, 3, 64)))
def test_json_round_trip_is_exact(plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["schema"] == 1


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_round_trips_at_any_context(name):
    for context in (1, 100, 131072):
        plan = preset(name, Workload("model", "h200", context))
        assert Plan.from_json(plan.to_json()) == plan


def edited(path, value):
    data = preset("quantspec", WORKLOAD).to_dict()
    *parents, last = path.split(".")
    target = data
    for parent in parents:
        target = target[parent]
    target[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 2, "schema 2 is newer than this version reads"),
        ("schema", 0, "schema is 0"),
        ("schema", "1", "schema is '1'"),
        ("schema", True, "schema is True"),
        ("workload.context", 0, "context is 0; allowed: a whole number from 1"),
        ("workload.context", 1.5, "context is 1.5"),
        ("workload.batch", -1, "batch is -1"),
        ("workload.batch", True, "batch is True"),
        ("workload.model", "", "model is ''"),
        ("workload.yarn_factor", 0.5, "workload.yarn_factor is 0.5; allowed: a number from 1 to 64"),
        ("weights.target_bits", 5, "weights.target_bits is 5; allowed: 16, 8, 4"),
        ("weights.draft_bits", 8, "weights: draft_bits is 8; allowed: 4, or 16 as target_bits"),
        ("kv.format", "int3", "kv.format is 'int3'; allowed: bf16, bf16+int4, int8, int4x2"),
        ("kv.group", 100, "kv.group is 100; allowed: 32, 64, 128, 256"),
        ("speculation.gamma", 16, "gamma is 16; allowed: a whole number from 0 to 15"),
        ("speculation.selection.ratio", 0.5, "speculation.selection.all.ratio is 0.5; allowed: a number from 1 to 1"),
        (
            "speculation.selection",
            {"name": "specattn", "ratio": 0},
            "specattn.ratio is 0; allowed: a number from 1e-06",
        ),
        (
            "speculation.selection",
            {"name": "specattn", "page": 16},
            "specattn.page is not a field; allowed: name, ratio",
        ),
        (
            "speculation.selection",
            {"name": "best"},
            "allowed: an object whose name is one of all, streamingllm, snapkv",
        ),
        ("speculation.selection", "best", "speculation.selection is {'name': 'best'}; allowed: an object whose name"),
        ("speculation.selection", None, "speculation.selection is None; allowed: an object with named fields"),
        ("eviction.budget", 64, "eviction: budget is 64; allowed: 0 when eviction is off"),
        ("placement.offload", 1, "placement.offload is 1; allowed: true or false"),
        ("placement.offload", True, "placement: budget is 0; allowed: 1 to 16777216"),
        ("tensor_parallel", 0, "workload.parallel.tensor is 0"),
        ("colour", "red", "colour is not a field; allowed: workload, weights"),
        ("weights.colour", "red", "weights.colour is not a field; allowed: target_bits, draft_bits, group"),
        ("workload", 3, "workload is 3; allowed: an object with named fields"),
    ],
)
def test_every_wrong_value_is_named_with_what_is_allowed(path, value, message):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(edited(path, value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_not_finite_are_refused(number):
    text = preset("specattn", WORKLOAD).to_json().replace("0.07", number)
    with pytest.raises(PlanError, match="finite numbers"):
        Plan.from_json(text)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null", "{}", b"\xff\xfe", "[" * 100_000])
def test_text_that_is_no_plan(text):
    with pytest.raises(PlanError):
        Plan.from_json(text)


def test_all_mistakes_of_a_file_are_listed():
    data = json.loads(preset("quantspec", WORKLOAD).to_json())
    data["workload"] |= {"context": 0, "batch": True}
    data["kv"]["format"] = "int3"
    data["speculation"]["selection"]["ratio"] = 0.5
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    assert str(caught.value) == (
        "4 mistakes: (1) workload.context is 0; allowed: a whole number from 1 to 16777216; "
        "(2) workload.batch is True; allowed: a whole number from 1 to 4096; "
        "(3) kv.format is 'int3'; allowed: bf16, bf16+int4, int8, int4x2; "
        "(4) speculation.selection.all.ratio is 0.5; allowed: a number from 1 to 1"
    )


@pytest.mark.parametrize(
    ("kind", "field", "low", "high"),
    [
        (Workload, "context", 1, 2**24),
        (Workload, "new_tokens", 1, 2**24),
        (Workload, "batch", 1, 4096),
        (Speculation, "gamma", 0, 15),
        (Parallel, "pipeline", 1, 64),
    ],
)
def test_whole_numbers_are_checked_at_both_ends_of_their_range(kind, field, low, high):
    required = {Workload: {"model": "m", "hardware": "h", "context": 1}}.get(kind, {})
    for value in (low, high):
        assert getattr(kind(**{**required, field: value}), field) == value
    for value in (low - 1, high + 1, float(low), 10**400):
        with pytest.raises(ValueError, match=rf"^{field} is .*; allowed: a whole number from {low} to {high}$"):
            kind(**{**required, field: value})


def test_other_numbers_are_checked_at_both_ends_of_their_range():
    for factor in (1, 64):
        assert Workload("m", "h", 1, yarn_factor=factor).yarn_factor == factor
    for factor in (0.999, 64.001, float("inf"), float("nan"), 10**400):
        with pytest.raises(PlanError, match=r"^yarn_factor is .*; allowed: a number from 1 to 64$"):
            Workload("m", "h", 1, yarn_factor=factor)
    for ratio in (1e-6, 1):
        assert Speculation(1, selection=Quest(ratio=ratio)).ratio == ratio
    for ratio in (9e-7, 1.001):
        with pytest.raises(PlanError, match=r"^ratio is .*; allowed: a number from 1e-06 to 1$"):
            Quest(ratio=ratio)


@pytest.mark.parametrize(
    ("make", "on"),
    [
        (Eviction, "h2o"),
        (Placement, True),
        (TargetAttention, Quest()),
    ],
)
def test_a_budget_goes_with_a_policy(make, on):
    assert make(on, 1).budget == 1
    assert make(on, 2**24).budget == 2**24
    assert make().budget == 0
    with pytest.raises(PlanError, match=r"^budget is 0; allowed: 1 to 16777216$"):
        make(on, 0)
    with pytest.raises(PlanError, match=r"^budget is 1; allowed: 0 when .* is off$"):
        make(budget=1)


def test_a_target_reads_its_budget_whatever_its_selection_would_read_as_a_drafts():
    reads = TargetAttention(Quest(page=32, recent=64), 512)
    assert (reads.active, reads.chosen) == (True, Quest(page=32, recent=64, ratio=1e-6, floor=512))
    assert (TargetAttention().active, TargetAttention().chosen) == (False, AllTokens())
    for options in ({"ratio": 0.5}, {"floor": 300}):
        with pytest.raises(PlanError, match=r"of the target's selection is .*; allowed: a budget instead$"):
            TargetAttention(Quest(**options), 512)


def test_plans_of_the_first_files_name_a_targets_selection_by_a_text():
    for name in ("autoregressive", "quest"):
        plan = preset(name, WORKLOAD)
        data = plan.to_dict()
        data["attention"]["selection"] = {"autoregressive": "full", "quest": "quest"}[name]
        assert Plan.from_dict(data) == plan


def test_a_target_that_chooses_by_codes_needs_them():
    with pytest.raises(PlanError, match=r"^selection is 'progressive' with kv format 'bf16'; allowed: formats with"):
        Plan(WORKLOAD, attention=TargetAttention(make_selection("progressive"), 512))
    assert preset("progressive-target", WORKLOAD).gathers_codes
    assert not preset("quest", WORKLOAD).gathers_codes


def test_code_may_name_a_format_by_its_value():
    assert KVCache("int8").format is KVFormat.INT8
    with pytest.raises(PlanError, match=r"^format is 'int9'; allowed: bf16, bf16.int4, int8, int4x2$"):
        KVCache("int9")


@pytest.mark.parametrize("bits", [(16, 16), (16, 4), (8, 8), (8, 4), (4, 4)])
def test_drafts_have_the_targets_bits_or_four(bits):
    assert Weights(*bits).draft_differs == (bits[0] != bits[1])


@pytest.mark.parametrize("bits", [(16, 8), (8, 16), (4, 16), (4, 8)])
def test_drafts_have_no_other_bits(bits):
    with pytest.raises(PlanError, match=f"^draft_bits is {bits[1]}; allowed: 4, or {bits[0]} as target_bits$"):
        Weights(*bits)


def test_axes_that_exclude_each_other():
    for stored in (KVFormat.SHADOW, KVFormat.HIERARCHICAL):
        Plan(WORKLOAD, kv=KVCache(stored), speculation=Speculation(4, DraftCodes.UPPER))
    for stored in (KVFormat.FULL, KVFormat.INT8):
        with pytest.raises(PlanError, match=f"^codes is 'upper' with kv format '{stored.value}'; allowed: 'bf16"):
            Plan(WORKLOAD, kv=KVCache(stored), speculation=Speculation(4, DraftCodes.UPPER))
    with pytest.raises(PlanError, match="gamma is 0 with draft"):
        Plan(WORKLOAD, weights=Weights(draft_bits=4))


@pytest.mark.parametrize(
    "old, selection",
    [
        ({"selection": "specattn", "ratio": 0.1}, SpecAttn(ratio=0.1)),
        ({"selection": "quest"}, Quest()),
        ({"selection": "all", "ratio": 1.0}, AllTokens()),
        ({"ratio": 1.0}, AllTokens()),
    ],
)
def test_the_first_plans_named_a_ratio_beside_the_selection(old, selection):
    data = preset("specattn", WORKLOAD).to_dict()
    data["speculation"] = {"gamma": 3, "codes": "full"} | old
    assert Plan.from_dict(data).speculation == Speculation(3, selection=selection)


def test_a_policy_keeps_its_hyperparameters_at_another_ratio():
    speculation = Speculation(3, selection=SpecAttn(rows="all", sinks=7))
    assert speculation.with_ratio(0.2) == Speculation(3, selection=SpecAttn(rows="all", sinks=7, ratio=0.2))
    with pytest.raises(PlanError, match=r"^draft selection is 'best'; allowed: all, streamingllm, "):
        make_selection("best")


def test_two_bit_keys_need_codes():
    for stored in (KVFormat.SHADOW, KVFormat.HIERARCHICAL, KVFormat.INT8):
        Plan(WORKLOAD, kv=KVCache(stored), speculation=Speculation(4, selection=make_selection("progressive")))
    with pytest.raises(PlanError, match=r"^selection is 'progressive' with kv format 'bf16'; allowed: formats with"):
        Plan(WORKLOAD, speculation=Speculation(4, selection=make_selection("progressive")))


def test_derived_values():
    plan = preset("quantspec", WORKLOAD)
    assert plan.workload.final_context == 4096 + 1024
    assert plan.weights.draft_differs
    assert plan.kv.target_bits == 8


def test_degrees_are_in_files_of_several_gpus_alone_and_files_of_tensor_parallelism_are_read() -> None:
    """A plan of one GPU is written as before; `tensor_parallel` beside the axes is the degree of earlier files."""
    plain, parallel = preset("int8", WORKLOAD), Parallel(2, 4, 1, expert=True)
    assert "parallel" not in plain.to_dict()["workload"] and plain.to_dict()["tensor_parallel"] == 1
    divided = replace(plain, workload=replace(WORKLOAD, parallel=parallel))
    assert Plan.from_json(divided.to_json()) == divided and divided.to_dict()["tensor_parallel"] == 2
    assert Plan.from_dict(plain.to_dict() | {"tensor_parallel": 8}).parallel == Parallel(8)
