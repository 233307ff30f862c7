"""Policies: the registry holds what plans can name, and each states its cost and its presets."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from ridgeplan import validate
from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.quality import losses
from ridgeplan.roofline.catalog.config_json import shape_from_config
from ridgeplan.roofline.catalog.families import families
from ridgeplan.roofline.catalog.models import list_models, load_shape
from ridgeplan.roofline.plan.plan import KVCache, KVFormat, Placement, Plan, Speculation, Weights, Workload
from ridgeplan.roofline.plan.policies.selections import Quest, SpecAttn, SpecExtend
from ridgeplan.roofline.plan.policy import (
    EVICTIONS,
    KV_BUDGET,
    SELECTIONS,
    SelectionCost,
    SparseSelection,
    make_selection,
    policy,
    policy_name,
)
from ridgeplan.roofline.plan.presets import PRESETS, collect_presets, preset
from ridgeplan.roofline.plan.support import missing_architecture, missing_execution

WORKLOAD = Workload("Llama-3.1-8B", "h200", 32768)


def test_every_policy_has_presets_of_its_own():
    for each in (*SELECTIONS.values(), *EVICTIONS.values()):
        for name, make in each.presets().items():
            plan = make(WORKLOAD)
            used = plan.speculation.selection.name, plan.attention.selection.name, plan.eviction.policy
            assert PRESETS[name](WORKLOAD) == plan  # no two of one name
            assert each.name in used if each.name in EVICTIONS else each().name in used


def test_two_presets_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two presets are named 'magicdec-quest'; rename the one of Quest"):
        collect_presets([Quest, Quest])


def test_plain_decoding_uses_no_policy():
    plan = Plan(WORKLOAD)
    assert (plan.speculation.selection.name, plan.attention.active, plan.eviction.method) == ("all", False, None)


@pytest.mark.parametrize(
    "name, layers_of_keys",
    [
        ("all", 0),
        ("streamingllm", 0),
        ("snapkv", 0),
        ("specattn", 0),
        ("quest", 4),  # 2 of 16 keys in each of 32 layers
        ("progressive", 0),  # 2-bit keys are no share of the keys: their scales depend on the cache's groups
        ("oracle", 32),
        ("shadowkv", 8 + 1 / 64),  # 2 equal bounds of 8 keys, and a byte beside them
        ("clusterkv", 0.9),  # 1 of 80, and a number of 32 bits beside 128 channels
        ("retrieval-head", 1),  # a head of its own scores once for all layers
    ],
)
def test_keys_scored_at_a_step_of_32_layers(name, layers_of_keys):
    assert cost_of(name).scored_keys_per_step(32) == pytest.approx(layers_of_keys)


def cost_of(name):
    """What choosing costs with the policy's own hyperparameters."""
    return make_selection(name).cost()


def test_hyperparameters_change_the_cost():
    """Of 8 KV heads: a set each is ranked from its own scores, a set for all from their sums."""
    shared, per_head = (SpecAttn(per_kv_head=each).cost() for each in (False, True))
    assert (shared.moved_score_bytes(8), per_head.moved_score_bytes(8)) == (4 * (8 + 8 + 7), 4 * 7 * 8)
    assert (shared.contiguous_on_host(8), per_head.contiguous_on_host(8)) == (8, 1)
    assert Quest(page=32).cost().scored_keys == 2 / 32
    assert SpecExtend(page=32).cost().contiguous_on_host(8) == 32 * 8


def test_a_selection_without_a_cost_is_an_error():
    with pytest.raises(TypeError, match=r"the selection Free has no cost\(\)"):

        @policy
        class Free(SparseSelection):
            name: str = policy_name("free")

    assert "free" not in SELECTIONS


def test_losses_name_the_policy_and_what_it_keeps():
    evicting, selecting = preset("snapkv", WORKLOAD), preset("clusterkv", WORKLOAD)
    assert losses(evicting)[0].startswith("snapkv keeps 1024 of 32768 prompt tokens: RULER 69.94 of 96.65")
    assert losses(selecting) == ["clusterkv reads 2048 tokens of the prompt a step"]


def test_something_is_known_of_every_draft_selections_acceptance():
    known = AcceptanceModel.for_model(load_shape("Llama-3.1-8B"), 32768)
    for name in SELECTIONS:
        if name != "all":
            drafts = Plan(WORKLOAD, kv=KVCache("int4x2"), speculation=Speculation(4, selection=make_selection(name)))
            assert 0 < known.of(drafts).best < 1


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run_unless_they_need_a_policy_that_is_only_estimated(name):
    plan = preset(name, WORKLOAD)
    eviction = plan.eviction.method
    selections = (plan.speculation.selection, plan.attention.selection)
    executed = all(selection.executable for selection in selections) and (eviction is None or eviction.executable)
    assert bool(missing_execution(plan)) == (not executed)


def test_what_is_missing_is_named():
    streamed = replace(preset("quantspec-exact", WORKLOAD), placement=Placement(True, 2048))
    assert missing_execution(streamed) == ["offloaded KV in 'bf16+int4'"]
    assert not missing_execution(preset("dapq", WORKLOAD))


def test_a_target_s_selection_of_offloaded_kv_runs_where_its_tokens_can_be_loaded_one_by_one():
    """With drafts that share the slots; not by a policy that scores every key, or 2-bit keys of codes that left."""
    placement = Placement(True, 2048)
    codes, oracle = (
        replace(preset(name, WORKLOAD), placement=placement) for name in ("progressive-target-int8", "oracle-target")
    )
    assert missing_execution(codes) == ["a target's selection by 'progressive' from offloaded KV in 'int8'"]
    assert missing_execution(oracle) == ["a selection by 'oracle' from offloaded KV"]
    eight_bit = replace(preset("specontext", WORKLOAD), kv=KVCache(KVFormat.INT8))
    for plan in (preset("specontext", WORKLOAD), preset("specontext-two-bit", WORKLOAD), eight_bit):
        same = replace(plan.attention.selection, ratio=0.02, floor=512)
        assert not missing_execution(plan)
        assert not missing_execution(replace(plan, speculation=Speculation(3, selection=same)))
        for other in (replace(same, sinks=8), Quest()):
            drafting = replace(plan, speculation=Speculation(3, selection=other))
            assert missing_execution(drafting) == [
                "drafts that choose by other means than a target that reads a selection of offloaded KV"
            ]
    evicted = replace(preset("dapq", WORKLOAD), attention=preset("quest", WORKLOAD).attention)
    assert missing_execution(evicted) == ["target selection 'quest' after an eviction"]
    scored = replace(preset("specattn", WORKLOAD), attention=preset("quest", WORKLOAD).attention)
    assert missing_execution(scored) == [
        "draft selection 'specattn', which chooses by what a verification of all tokens scores"
    ]
    assert missing_execution(Plan(WORKLOAD, Weights(8, 8))) == missing_execution(Plan(WORKLOAD, Weights(4, 4))) == []
    assert not missing_execution(preset("int4-weights", WORKLOAD))
    assert not missing_execution(preset("quantspec", WORKLOAD))


@pytest.mark.parametrize(
    "name, context, missing",
    [
        ("autoregressive", 8192, False),  # only reads less
        ("quantspec-weights", 3072, False),  # 4096 tokens in the end, all within the window
        ("quantspec-weights", 3073, True),
        ("int8", 3073, True),
        ("quest", 3073, True),
    ],
)
def test_codes_and_drafts_stay_within_a_sliding_window_of_4096(name, context, missing):
    shape = load_shape("mistralai/Mistral-7B-v0.1")
    reason = missing_execution(preset(name, Workload("m", "h200", context, new_tokens=1024)), shape)
    beyond = "codes, drafts, selections or evictions beyond a sliding window of 4096 tokens"
    assert reason == ([beyond] if missing else [])


def test_the_runtime_executes_dense_families():
    names = {"Llama-3.1-8B", "mistralai/Mistral-7B-v0.1", "Qwen2.5-0.5B", "Qwen3-8B"}
    assert all(missing_architecture(load_shape(name)) is None for name in names)
    needed = "its layers have states of Mamba-2, or that decay by channel, experts without a gate"
    instead = "`ridgeplan list models` shows what runs"
    message = f"the runtime does not execute 'nemotron_h' yet: {needed} ({instead})"
    assert missing_architecture(load_shape("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")) == message
    assert missing_architecture(load_shape("openai/gpt-oss-20b")) is None


@pytest.mark.parametrize("name", [name for name, family in families().items() if not family.executed])
def test_every_family_that_is_not_executed_has_a_reason(name):
    """Its layers, or what its checkpoints hold; one model of Granite 4 has attention alone."""
    keys = {
        "model_type": name, "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 128, "max_position_embeddings": 128,
        "num_experts_per_tok": 2, "full_attention_interval": 1,
    }  # fmt: skip
    models = [shape for shape in list_models() if shape.architecture == name] or [
        shape_from_config(keys, name, "a test")
    ]
    reasons = [missing_architecture(shape) for shape in models]
    assert all(f"{name!r} yet: its layers have" in each or "yet: it reads no checkpoints" in each for each in reasons)


def test_runs_of_a_shared_set_hold_every_heads_keys():
    """SpecAttn chooses one set per layer: a token's keys of 8 heads lie together. Quest's pages are a head's own."""
    runs = {name: cost_of(name).contiguous_on_host(8) for name in ("specattn", "quest", "retrieval-head")}
    assert runs == {"specattn": 8, "quest": 16, "retrieval-head": 1}
    assert cost_of("streamingllm").contiguous_on_host(8) > 1e9  # a run, however long


@pytest.mark.parametrize("weights", [Weights(8, 8), Weights(8, 4), Weights(4, 4)], ids=str)
def test_bits_of_weights_restrict_no_other_axis(weights):
    """Whatever runs with full-precision weights runs with fewer bits of them."""
    plans = [make(WORKLOAD) for make in PRESETS.values()]
    runnable = [plan for plan in plans if plan.weights.target_bits == 16 and not missing_execution(plan)]
    drafting = [plan for plan in runnable if plan.speculation.self_drafts]
    assert (
        {True, False} == {plan.speculation.sparse for plan in drafting} == {plan.eviction.active for plan in drafting}
    )
    for plan in drafting if weights.draft_differs else runnable:
        assert not missing_execution(replace(plan, weights=weights))


# The overlap of adjacent steps that policies are priced by, against what a study measured.

RESULTS = Path(validate.__file__).parent / "results"
METHODS = ["progressive", "quest", "clusterkv", "shadowkv", "streamingllm"]


def measured(model):
    rows = json.loads((RESULTS / f"study_retrieval_{model}_16k.json").read_text())["rows"]
    return {(row["method"], row["budget"]): row["overlap"] for row in rows}


def priced(method, budget=KV_BUDGET, **options):
    selection = make_selection(method, **options)
    return selection.cost().overlap_at(budget, selection.unbudgeted_tokens)


@pytest.mark.parametrize("method", METHODS)
def test_policies_are_priced_by_what_was_measured(method):
    """Of Qwen; the other model's is near it."""
    assert priced(method) == pytest.approx(measured("qwen")[method, KV_BUDGET], abs=0.006)
    assert priced(method) == pytest.approx(measured("smollm2")[method, KV_BUDGET], abs=0.03)


@pytest.mark.parametrize("level", ["head", "batch"])
def test_a_heads_choice_for_all_kv_heads_changes_less(level):
    fidelity = measured("smollm2")[f"retrieval-{level}", KV_BUDGET]
    assert priced("retrieval-head", level=level) == pytest.approx(fidelity, abs=0.006)


@pytest.mark.parametrize("model", ["qwen", "smollm2"])
def test_by_default_it_is_that_of_the_models_own_attention(model):
    assert SelectionCost().overlap == pytest.approx(measured(model)["model", KV_BUDGET], abs=0.015)


@pytest.mark.parametrize("budget", [512, 1024, 4096])
@pytest.mark.parametrize("method", METHODS)
def test_other_budgets_follow_from_it(method, budget):
    assert priced(method, budget) == pytest.approx(measured("qwen")[method, budget], abs=0.055)


def test_of_a_few_tokens_all_may_be_new():
    assert SelectionCost(overlap=0.5).overlap_at(1) == 0


def test_saved_plans_of_snapkv_load_with_the_old_name_of_pooling():
    plan = Plan(WORKLOAD, speculation=Speculation(2, selection=make_selection("snapkv", pooling=5)))
    saved = plan.to_dict()
    selection = saved["speculation"]["selection"]
    selection["pool"] = selection.pop("pooling")
    assert Plan.from_dict(saved) == plan


NEW_POLICY = """
    import sys
    from typing import ClassVar

    from ridgeplan.roofline.catalog.validation import whole
    from ridgeplan.roofline.plan.policies.selections import draft_preset
    from ridgeplan.roofline.plan.policy import SelectionCost, SparseSelection, policy, policy_name


    @policy
    class Strided(SparseSelection):
        name: str = policy_name("strided")
        stride: int = whole(1, 64, default=4)

        executable: ClassVar[bool] = False
        searched: ClassVar[bool] = sys.argv[2] == "searched"

        def cost(self):
            return SelectionCost(page_tokens=1)

        @classmethod
        def presets(cls):
            return {"strided-drafts": draft_preset(cls(stride=8), 3)}
"""
USE_OF_NEW_POLICY = """
    import sys
    from importlib import import_module

    from ridgeplan.roofline.plan import policies

    policies.__path__.append(sys.argv[1])
    import_module(f"{policies.__name__}.strided")

    from ridgeplan.planner import estimate
    from ridgeplan.planner.search import families
    from ridgeplan.roofline.plan.plan import Plan

    answer = estimate("Llama-3.1-8B", "h200", 32768, preset="strided-drafts", gamma=3)
    assert answer.plan.speculation.selection.stride == 8
    assert Plan.from_json(answer.plan.to_json()) == answer.plan
    assert 0 < answer.predicted.acceptance.best < 1
    assert answer.to_dict()["not_executable"] == ["draft selection 'strided'"]
    strided = [family.name for family in families(answer.plan.workload, offload=False) if "strided" in family.name]
    assert ("INT8 KV + drafts on tokens chosen by strided" in strided) is (sys.argv[2] == "searched")
    assert ("strided-drafts" in strided) is (sys.argv[2] == "searched")
"""


@pytest.mark.parametrize("rows", ["searched", "without rows"])
def test_a_new_file_is_all_that_a_draft_policy_needs_in_the_planner(tmp_path, rows):
    """Plans, presets and predictions find it in the registry, and the search does once its class says so.

    A process of its own keeps ours clean.
    """
    (tmp_path / "strided.py").write_text(dedent(NEW_POLICY), encoding="utf-8")
    command = [sys.executable, "-c", dedent(USE_OF_NEW_POLICY), str(tmp_path), rows]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
