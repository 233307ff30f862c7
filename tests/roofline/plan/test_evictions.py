"""Budgets of evictions: as tokens or shares, per layer, and hyperparameters from untrusted plans."""

from dataclasses import replace

import pytest

from ridgeplan.planner.quality import losses, published_loss, target_values
from ridgeplan.planner.recommend import preference, why_preferred
from ridgeplan.roofline.plan.plan import (
    Eviction,
    KVCache,
    KVFormat,
    Plan,
    PlanError,
    Speculation,
    Workload,
)
from ridgeplan.roofline.plan.policies.evictions import (
    PyramidKVEviction,
    aligned_budgets,
    kept_tokens,
    layer_budgets,
    rounding_text,
)
from ridgeplan.roofline.plan.policies.selections import SpecAttn
from ridgeplan.roofline.plan.policy import EVICTIONS
from ridgeplan.roofline.plan.presets import PRESETS, preset, preset_name
from ridgeplan.roofline.plan.support import missing_execution

WORKLOAD = Workload("m", "h", 4000)


def evicting(policy="snapkv", **values):
    return Plan(WORKLOAD, eviction=Eviction(policy, **values))


def test_sparse_drafts_need_layers_of_one_length():
    drafts = Speculation(3, selection=SpecAttn())
    for policy in ("snapkv", "dapq", "pyramidkv"):
        assert not missing_execution(evicting(policy, budget=1000))
        assert not missing_execution(replace(evicting(policy, budget=1000), speculation=Speculation(3)))
    for policy in ("snapkv", "dapq"):
        assert not missing_execution(replace(evicting(policy, budget=1000), speculation=drafts))
    ragged = replace(evicting("pyramidkv", budget=1000), speculation=drafts)
    assert missing_execution(ragged) == [
        "draft selection 'specattn' after an eviction that leaves layers of different lengths"
    ]
    assert not missing_execution(replace(ragged, eviction=replace(ragged.eviction, budget=4000)))  # nothing is evicted


@pytest.mark.parametrize("name", ["dapq", "dapq-quantspec"])
def test_dapq_has_2_and_30_pseudo_tokens_for_qwen(name):
    """DapQ, Table 10."""
    for model, sizes in {"Qwen/Qwen2.5-7B-Instruct": (2, 30), "meta-llama/Llama-3.1-8B": (4, 28)}.items():
        plan = preset(name, replace(WORKLOAD, model=model))
        assert (plan.eviction.method.prefix, plan.eviction.method.suffix) == sizes
        assert preset_name(plan) == name


def test_budgets_that_are_rounded_to_groups_say_so():
    """PyramidKV's layers on codes differ by whole groups of 128; none do at a budget of 64."""
    codes = replace(evicting("pyramidkv", budget=512), kv=KVCache(KVFormat.INT8, 128))
    assert rounding_text(codes, 4) == (
        "pyramidkv's layers keep 1024 to 128 tokens instead of 968 to 56, on average 544 instead of 512: "
        "on int8 KV they differ by whole groups of 128"
    )
    small = replace(codes, eviction=replace(codes.eviction, budget=64))
    assert "keep all 64 tokens" in rounding_text(small, 4)
    assert "by whole groups of 128" in rounding_text(small, 4)
    assert rounding_text(replace(codes, kv=KVCache()), 4) is None
    for policy in ("dapq", "snapkv"):
        assert rounding_text(replace(codes, eviction=Eviction(policy, 512)), 4) is None
    assert rounding_text(replace(codes, eviction=Eviction("pyramidkv", 5000)), 4) is None
    assert rounding_text(Plan(WORKLOAD), 4) is None


def test_a_budget_is_in_tokens_or_a_share_of_the_context():
    assert layer_budgets(evicting(budget=100), 2) == (100, 100)
    assert layer_budgets(evicting(share=0.25), 2) == (1000, 1000)
    assert layer_budgets(evicting(budget=5000), 2) == layer_budgets(evicting(share=1.0), 2) == (4000, 4000)
    assert layer_budgets(Plan(WORKLOAD), 2) == ()


@pytest.mark.parametrize(
    "values, message",
    [
        ({"budget": 0}, "budget is 0; allowed: 1 to"),
        ({"budget": 10, "share": 0.5}, "budget is 10 and share 0.5; allowed: one of them"),
        ({"share": 1.5}, "share"),
        ({"budget": 10, "settings": {"window": [1]}}, "settings"),
    ],
)
def test_wrong_budgets_are_named(values, message):
    with pytest.raises(PlanError, match=message):
        evicting(**values)


def test_without_a_policy_there_is_nothing_to_set():
    for values in ({"share": 0.5}, {"settings": {"window": 3}}, {"chunk": 512}):
        with pytest.raises(PlanError, match="share, settings or chunk without a policy"):
            Eviction(**values)


@pytest.mark.parametrize("policy, settings", [("snapkv", {"window": 8}), ("dapq", {"prefix": 2, "suffix": 30})])
def test_settings_travel_with_the_plan(policy, settings):
    plan = Plan.from_json(evicting(policy, budget=100, settings=settings).to_json())
    assert plan == evicting(policy, budget=100, settings=settings)
    method = plan.eviction.method
    assert {name: getattr(method, name) for name in settings} == settings


@pytest.mark.parametrize(
    "settings, message",
    [({"windows": 8}, "snapkv settings: .*windows"), ({"window": 0}, "window"), ({"window": 1.5}, "window")],
)
def test_unknown_and_wrong_settings_are_named(settings, message):
    with pytest.raises(PlanError, match=message):
        layer_budgets(evicting(budget=100, settings=settings), 2)


def test_a_chunk_travels_with_the_plan_and_counts_where_something_is_evicted():
    plan = evicting("dapq", budget=1000, chunk=512)
    assert Plan.from_json(plan.to_json()) == plan
    old = evicting("dapq", budget=1000).to_dict()
    del old["eviction"]["chunk"]  # plans from before there were chunks
    assert Plan.from_dict(old) == evicting("dapq", budget=1000)
    assert [plan.eviction.chunk_at(context) for context in (4000, 1001, 1000, 10)] == [512, 512, 0, 0]
    long = evicting("dapq", budget=100, chunk=512)  # a chunk that holds all of a prompt is none
    assert [long.eviction.chunk_at(context) for context in (513, 512, 101)] == [512, 0, 0]
    with pytest.raises(PlanError, match="chunk"):
        evicting("dapq", budget=1000, chunk=-1)


@pytest.mark.parametrize("policy", ["random", "oracle"])
def test_policies_that_need_the_whole_prompt_refuse_chunks(policy):
    message = f"^eviction chunk is 512; allowed: 0, as {policy} scores a whole prompt at once$"
    for plan in (evicting(policy, budget=1000, chunk=512), evicting(policy, share=1.0, chunk=512)):
        with pytest.raises(PlanError, match=message):
            missing_execution(plan)
    chunked = {name for name, policy in EVICTIONS.items() if policy.chunked}
    assert chunked == {"dapq", "snapkv", "h2o", "pyramidkv", "streamingllm", "lacache", "expected-attention"}
    assert not any(missing_execution(evicting(name, budget=1000, chunk=512)) for name in chunked)


def test_chunks_are_another_target_that_says_so():
    """Its measurements are not those of whole prompts, which are preferred where both fit."""
    policy, chunked = (evicting("dapq", budget=1000, chunk=chunk) for chunk in (0, 512))
    assert target_values(chunked) == {**target_values(policy), "eviction.chunk": 512}
    everything = [evicting("dapq", budget=4000, chunk=chunk) for chunk in (0, 512)]
    assert target_values(everything[0]) == target_values(everything[1])
    assert target_values(evicting("dapq", budget=1000, chunk=4000)) == target_values(policy)
    assert (preset_name(policy), preset_name(chunked)) == ("dapq", "dapq in chunks")
    assert preference(policy) < preference(chunked)
    assert why_preferred(policy, chunked) == "more exact"
    (loss,) = losses(chunked)
    assert loss.startswith("dapq keeps 1000 of 4000 prompt tokens, chosen after every 512: RULER 77.56 of 96.65")


@pytest.mark.parametrize("group", [1, 32])
@pytest.mark.parametrize("tokens_per_layer", [(250, 130, 40), (72, 40, 8), (500, 500, 500)])
def test_no_layer_keeps_more_than_it_had_and_a_chunk(tokens_per_layer, group):
    budgets = aligned_budgets(tokens_per_layer, sum(tokens_per_layer) // 3, group)
    kept = [(0, 0, 0), *(kept_tokens(tokens, budgets, group) for tokens in range(1, 700))]
    for chunk in (1, 7, 32, 100):
        for before, after in zip(kept, kept[chunk:], strict=False):
            assert all(now <= was + chunk for was, now in zip(before, after, strict=True))


@pytest.mark.parametrize("layers", [1, 2, 7, 32])
def test_pyramids_fall_evenly_to_a_twentieth_and_keep_the_mean(layers):
    budgets = PyramidKVEviction(window=32).budgets(1032, layers)
    assert sum(budgets) / layers == pytest.approx(1032, abs=0.5)
    assert list(budgets) == sorted(budgets, reverse=True)
    if layers > 1:
        assert (budgets[0], budgets[-1]) == (32 + 2 * 1000 - 50, 32 + 50)


def test_a_pyramid_smaller_than_its_window_is_flat():
    assert PyramidKVEviction(window=32).budgets(20, 4) == (20, 20, 20, 20)


def test_aligned_budgets_differ_by_whole_groups():
    assert aligned_budgets((1966, 1024, 82), 1024, 128) == (1920, 1024, 128)
    assert aligned_budgets((1998, 1024, 50), 1024, 128) == (2048, 1024, 128)  # 50 is nearer to 0
    assert aligned_budgets((110, 90, 70), 90, 32) == (122, 90, 58)
    assert aligned_budgets((94, 64, 34), 64, 128) == (64, 64, 64)
    assert aligned_budgets((50, 30, 9), 30, 1) == (50, 30, 9)


@pytest.mark.parametrize("group", [1, 32])
@pytest.mark.parametrize("tokens", [1, 5, 31, 33, 64, 100, 257, 300, 1000])
@pytest.mark.parametrize("tokens_per_layer", [(250, 130, 40), (72, 40, 8)])
def test_what_layers_keep(tokens_per_layer, tokens, group):
    budgets = aligned_budgets(tokens_per_layer, sum(tokens_per_layer) // 3, group)
    kept = kept_tokens(tokens, budgets, group)
    longest = min(tokens, max(budgets))
    assert kept[0] == longest
    for each, budget in zip(kept, budgets, strict=True):
        assert 1 <= each <= max(min(budget, longest), group)
        assert (longest - each) % group == 0
        assert longest == each or each > budget - group  # not less than it must be


def test_uniform_budgets_keep_all_they_can():
    assert kept_tokens(500, (100, 100), 32) == (100, 100)
    assert kept_tokens(70, (100, 100), 32) == (70, 70)


def test_codes_align_layers_and_full_precision_does_not():
    plan = evicting("pyramidkv", budget=300)
    coded = replace(plan, kv=KVCache(KVFormat.INT8, 64))
    assert len({each % 64 for each in layer_budgets(coded, 8)}) == 1
    assert len({each % 64 for each in layer_budgets(plan, 8)}) > 1


def test_what_loses_less_is_preferred_among_evictions():
    def rank(name):
        return preference(preset(name, WORKLOAD))

    order = ["autoregressive", "dapq", "snapkv", "pyramidkv", "h2o", "streamingllm", "lacache", "expected-attention"]
    assert sorted(order, key=rank) == order
    assert published_loss(preset("autoregressive", WORKLOAD)) == 0
    assert published_loss(preset("dapq", WORKLOAD)) == pytest.approx(1 - 77.56 / 96.65)


def test_random_is_only_run_where_asked_for():
    assert EVICTIONS["random"].executable
    assert not any(make(WORKLOAD).eviction.policy == "random" for make in PRESETS.values())
