"""Questions: plans by name and budget, workloads, and what is refused."""

from dataclasses import replace

import pytest

from ridgeplan.planner.quality import HEAD
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Eviction, Plan, PlanError, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime import UnsupportedPlan
from ridgeplan.runtime.errors import ModelError
from ridgeplan.validate.quality.options import QualityOptions, cache_bytes, label, named_plan, of_file, with_budgets
from ridgeplan.validate.quality.ruler import TASKS

WORKLOAD = Workload("m", "this machine", 4000)


def question(folder, *plans, **options):
    return QualityOptions(str(folder), load_shape(str(folder)), plans, (512,), "text", "a text", **options)


def test_presets_with_a_budget_are_made_once_for_each():
    labels = [label(make(WORKLOAD)) for make in with_budgets(["int8", "dapq", "quest", "random"], [64, 9000])]
    assert labels == [  # no more than the prompt has
        "int8", "dapq 64", "dapq 4000", "quest 64", "quest 4000", "random 64", "random 4000",
    ]  # fmt: skip
    assert [label(make(WORKLOAD)) for make in with_budgets(["dapq", "quantspec"], [])] == [
        "dapq 1024", "quantspec gamma 4",
    ]  # fmt: skip
    with pytest.raises(PlanError, match="unknown preset"):
        list(with_budgets(["dapk"], [64]))
    with pytest.raises(PlanError, match="budget is 64; allowed: none, as int8 keeps and reads all tokens"):
        named_plan("int8", 64)(WORKLOAD)


def test_a_files_plan_is_made_for_other_lengths(tiny_folder):
    plan = preset("int8", Workload("other", "h200", 100))
    (plain, options) = question(tiny_folder, of_file(plan)).plans_at(512)
    assert (plain.kv.target_bits, options.kv.target_bits) == (16, 8)
    assert plain.workload == options.workload
    assert options.workload.final_context == 512


def test_plain_decoding_is_always_measured_and_once(tiny_folder):
    assert question(tiny_folder).plans_at(512) == question(tiny_folder, Plan).plans_at(512)
    assert len(question(tiny_folder, Plan, Plan).plans_at(512)) == 1


def test_prompts_leave_room_for_the_longest_answer(tiny_folder):
    # 16 tokens and one that is only predicted; 32 are generated for times; needles have answers of up to 128.
    assert question(tiny_folder, tokens=16).workload(512).context == 512 - 32
    assert question(tiny_folder, tokens=64).workload(512).context == 512 - 65
    assert question(tiny_folder, tokens=16, tasks=(TASKS["vt"], TASKS["niah_single_1"])).headroom == 128


def test_plans_that_are_only_estimated_are_left_out_with_a_line(tiny_folder):
    options = question(tiny_folder, named_plan("specontext"), named_plan("int8"))
    (line,) = options.refused()
    assert line.startswith("specontext 383: estimated only: it needs a retrieval head")
    assert [label(plan) for plan in options.plans_at(4096)] == ["autoregressive", "int8"]
    with pytest.raises(UnsupportedPlan, match="specontext"):
        list(question(tiny_folder, named_plan("specontext")).refused())


def test_a_head_that_is_no_file_of_one_is_refused_before_anything_runs(tiny_folder, tmp_path):
    wrong = tmp_path / "head.safetensors"
    wrong.write_bytes(b"nonsense")
    options = question(tiny_folder, named_plan("specontext"), retrieval_head=str(wrong))
    with pytest.raises(ModelError, match="cannot load the retrieval head"):
        options.require_head()
    question(tiny_folder, named_plan("int8"), retrieval_head=str(wrong)).require_head()  # which needs none


@pytest.mark.parametrize(
    ("options", "context", "message"),
    [
        ({"tokens": 0}, 512, "tokens is 0; allowed: 1 to"),
        ({"samples": 0}, 512, "samples is 0"),
        ({"passages": -1}, 512, "passages is -1"),
        ({"batch": 0}, 512, "batch is 0; allowed: 1 to"),
        ({"seed": -1}, 512, "seed is -1"),
        ({"tokens": 600}, 601, "context is 601; allowed: more than 601"),
        ({}, 16385, "context 16385 is beyond the model's limit of 16384; allowed: less, or more with --yarn"),
    ],
)
def test_values_out_of_range_are_refused(tiny_folder, options, context, message):
    with pytest.raises(PlanError, match=message):
        question(tiny_folder, **options).workload(context)


def test_yarn_reaches_beyond_the_limit(tiny_folder):
    assert question(tiny_folder, yarn=True).workload(20000).yarn_factor == 1.5


def test_plans_share_prompts_unless_weights_or_settings_of_an_eviction_differ(tiny_folder):
    def own_prefix(workload):
        return replace(preset("dapq", workload), eviction=Eviction("dapq", 64, settings={"prefix": 2}))

    makers = [*with_budgets(["dapq", "int8", "int8-weights", "quest"], [64, 128]), own_prefix]
    families = question(tiny_folder, *makers, tokens=16).families_at(512)
    assert [[label(plan) for plan in family] for family in families] == [
        ["autoregressive"], ["dapq 64", "dapq 128", "int8", "quest 64", "quest 128"], ["int8-weights"],
        ["dapq 64 (prefix 2)"],
    ]  # fmt: skip


def test_evictions_are_measured_for_each_chunk_and_alone(tiny_folder):
    makers = [*with_budgets(["snapkv", "random", "int8"], [64, 128], [0, 32])]
    families = question(tiny_folder, *makers, tokens=16).families_at(512)
    assert [[label(plan) for plan in family] for family in families] == [
        ["autoregressive"], ["snapkv 64", "snapkv 128", "random 64", "random 128", "int8"],
        ["snapkv 64 in chunks of 32"], ["snapkv 128 in chunks of 32"],
    ]  # fmt: skip


def test_chunks_that_hold_all_of_a_prompt_are_measured_as_none(tiny_folder):
    """Of 512 tokens 480 are a prompt; a budget of all of them evicts nothing, in whatever chunks."""
    makers = [*with_budgets(["snapkv"], [64], [0, 479, 480, 4096]), *with_budgets(["dapq"], [480], [0, 32])]
    plans = question(tiny_folder, *makers, tokens=16).plans_at(512)
    assert [label(plan) for plan in plans] == [
        "autoregressive", "snapkv 64", "snapkv 64 in chunks of 479", "dapq 480",
    ]  # fmt: skip


def test_the_memory_of_engines_is_counted_by_hand(tiny_folder):
    """tiny: 2 layers of 2 KV heads of 16; a context of 512 with 129 tokens at its end."""
    plain, dapq, quest = (
        next(with_budgets([name], [64]))(question(tiny_folder).workload(512)) for name in ("int8", "dapq", "quest")
    )
    shape = load_shape(str(tiny_folder))
    token_bytes = 4 * shape.layers * 2 * shape.kv_heads * shape.head_dim
    assert cache_bytes(plain, shape, 3, 4) == 3 * 512 * token_bytes
    assert cache_bytes(dapq, shape, 3, 4) == 3 * (64 + 129) * token_bytes
    assert cache_bytes(quest, shape, 3, 4) == 2 * 3 * 512 * token_bytes


def test_only_tasks_that_plain_decoding_does_not_solve_are_left_out(tiny_folder):
    options = question(tiny_folder, tasks=(TASKS["vt"], TASKS["cwe"]), only_solved=True)
    plain = {"vt": 0.4, "cwe": 0.5, "ttft_ms": 0.1}
    plan, oracle = (named_plan(name)(WORKLOAD) for name in ("dapq", "oracle"))
    assert [options.leaves_out(plan, name, plain) for name in (*plain, "fwe")] == [True, False, False, False]
    assert [options.leaves_out(oracle, name, {}) for name in ("vt", "ttft", "fidelity")] == [True, True, False]
    assert not question(tiny_folder, tasks=(TASKS["vt"],)).leaves_out(plan, "vt", plain)
    assert not options.leaves_out(plan, "vt", {})  # plain decoding itself


def test_settings_that_a_preset_has_otherwise_are_in_the_name():
    """Plans that differ in them alone would share a row of the table."""
    dapq, head = (preset(name, WORKLOAD) for name in ("dapq", "specontext-resident"))
    pooled = replace(dapq, eviction=replace(dapq.eviction, settings={"pooling": 7, "recent": 32, "prefix": 4}))
    selection = replace(head.attention.selection, recent=256)
    latest = replace(head, attention=replace(head.attention, selection=selection))
    assert [label(plan) for plan in (dapq, pooled, latest)] == [
        "dapq 1024", "dapq 1024 (recent 32, pooling 7)", "specontext-resident 2048 (recent 256)",
    ]  # fmt: skip


@pytest.mark.model
def test_plans_by_a_head_run_with_the_one_that_ships_and_name_it(smollm2):
    options = question(smollm2, named_plan("specontext-resident"))
    assert list(options.refused()) == []
    (plan,) = options.plans_at(512)[1:]
    assert options.head_of(plan) is None  # `load` recognizes the model
    assert options.head_named(plan)[HEAD].startswith("smollm2-135m-instruct ")
