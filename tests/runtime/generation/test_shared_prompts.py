"""Prompts that run once for several engines leave in each what its own run would."""

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind
from ridgeplan.roofline.plan.policies.evictions import OracleEviction
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.model.prefill import Destination, prefill, prefill_all
from ridgeplan.runtime.policies import SCORERS
from ridgeplan.runtime.policies.evictions import OracleScorer

LENGTHS, BUDGETS, NEW = [128, 70, 37], (45, 20), 28


@pytest.fixture(scope="module")
def model_of(tiny_model):
    return tiny_model(agreeable=True, num_hidden_layers=3)


@pytest.fixture(scope="module")
def model(model_of):
    return model_of.folder


@pytest.fixture
def opened(model, make_plan):
    """Engines of plans for three sequences that share weights."""
    first = runtime.load(make_plan(batch=3), model, device="cpu")

    def make(*plans):
        return [runtime.load(make_plan(batch=3, **plan), model, device="cpu", weights=first.weights) for plan in plans]

    return make


def evicting(kv="bf16", gamma=0, budgets=BUDGETS):
    """Plans of all policies at these budgets, that of DapQ with its pseudo tokens."""
    return [
        {"kv": kv, "gamma": gamma, "evict": policy, "budget": budget}
        for policy in SCORERS
        if policy != "oracle"
        for budget in budgets
    ]


@pytest.mark.parametrize("kv, gamma, budgets", [("bf16", 0, BUDGETS), ("int4x2", 3, BUDGETS[:1])])
def test_every_eviction_keeps_what_it_would_alone(kv, gamma, budgets, opened, prompts):
    ids = prompts(*LENGTHS)
    plans = [{}, {"kv": "int8"}, *evicting(kv, gamma, budgets)]
    engine, together = opened(*plans), opened(*plans)
    together[0].prefill_with(together[1:], ids, NEW)
    for separate, shared in zip(engine, together, strict=True):
        assert shared.generate(ids, NEW).tokens == separate.generate(ids, NEW).tokens
        assert torch.equal(shared.cache.lengths, separate.cache.lengths)


@pytest.mark.parametrize("kv, name", [("bf16", "quest"), ("int4x2", "streamingllm"), ("bf16+int4", "progressive")])
def test_targets_that_select_learn_from_shared_prompts(kv, name, opened, prompts):
    ids = prompts(*LENGTHS)
    plans = [{"kv": kv, "target": name, "target_budget": budget} for budget in (48, 64)]
    engine, together = opened(*plans), opened(*plans)
    together[0].prefill_with(together[1:], ids, NEW)
    for separate, shared in zip(engine, together, strict=True):
        assert shared.generate(ids, NEW).tokens == separate.generate(ids, NEW).tokens


def test_different_selections_and_formats_learn_from_the_same_prompts(opened, prompts):
    ids = prompts(*LENGTHS)
    kinds = ("bf16", "quest"), ("bf16", "clusterkv"), ("bf16+int4", "progressive"), ("int8", "streamingllm")
    plans = [{}, *({"kv": kv, "target": name, "target_budget": 64} for kv, name in kinds), *evicting()[:2]]
    engine, together = opened(*plans), opened(*plans)
    together[0].prefill_with(together[1:], ids, NEW)
    for separate, shared in zip(engine, together, strict=True):
        assert shared.generate(ids, NEW).tokens == separate.generate(ids, NEW).tokens


def test_drafters_learn_from_shared_prompts(opened, model_of, draft_head, prompts):
    ids, head = [text * 2 for text in prompts(64, 35, 18)], draft_head(model_of)
    drafters = Drafter(DrafterKind.SUFFIX, depth=4, min_match=1), Drafter(DrafterKind.HEAD, depth=4)
    to_target = [{"kv": "int8", "gamma": 4, "drafter": drafter, "drafter_head": head} for drafter in drafters]
    cascade = {"kv": "int4x2", "gamma": 6, "drafter": Drafter(DrafterKind.HEAD, 2, 2), "drafter_head": head}
    plans = [{}, *to_target, cascade]
    engine, together = opened(*plans), opened(*plans)
    together[0].prefill_with(together[1:], ids, NEW)
    for separate, shared in zip(engine, together, strict=True):
        assert shared.generate(ids, NEW).tokens == separate.generate(ids, NEW).tokens
        assert shared.statistics.proposals_matched == separate.statistics.proposals_matched
    assert all(each.statistics.proposals_matched for each in together[1:])


def test_teacher_forced_logits_go_on_from_shared_prompts(opened, prompts):
    ids = prompts(90, 90, 60)
    after = [list(range(40)), list(range(40, 80)), list(range(80, 120))]
    policy, together = (opened(*evicting()) for _ in range(2))
    together[0].prefill_with(together[1:], ids, 41)
    for separate, shared in zip(policy, together, strict=True):
        expected = separate.teacher_forced_logits(ids, after)
        assert torch.equal(shared.teacher_forced_logits(ids, after), expected)
        for row in range(3):
            single = separate.teacher_forced_logits([ids[row]], [after[row]])[0]
            torch.testing.assert_close(expected[row], single, rtol=1e-4, atol=1e-4)


def test_other_prompts_start_anew_and_shared_ones_serve_once(opened, prompts):
    (first, second), (ids, other) = opened(*evicting()[:2]), (prompts(90), prompts(80))
    expected = second.generate(ids, NEW).tokens, second.generate(other, NEW).tokens
    first.prefill_with([second], ids, NEW)
    assert second.generate(other, NEW).tokens == expected[1]
    first.prefill_with([second], ids, NEW)
    assert [second.generate(ids, NEW).tokens for _ in range(2)] == [expected[0]] * 2


def test_engines_that_cannot_share_are_refused(opened, model, make_plan, prompts):
    (first,) = opened(evicting()[0])
    other = runtime.load(make_plan(batch=3), model, device="cpu")
    with pytest.raises(runtime.WorkloadError, match="the engines have weights of their own"):
        first.prefill_with([other], prompts(90), NEW)
    fewer, more = opened(*({"evict": "dapq", "budget": 20, "settings": {"prefix": each}} for each in (2, 3)))
    with pytest.raises(ValueError, match="the policies append different tokens"):
        fewer.prefill_with([more], prompts(90), NEW)


def test_a_policy_sees_what_it_appends_and_no_more(opened, prompts):
    """One oracle knows five coming tokens, the other nine."""
    (engine,), text = opened({"evict": "dapq", "budget": 20}), torch.tensor(prompts(100)[0])
    config = KVCacheConfig(1, 120, budgets=(20,) * 3, new_tokens=20)

    def cache():
        return Cache(engine.config.shape, config, engine.device, torch.float32)

    oracles, target = [OracleScorer(OracleEviction(coming=count)) for count in (5, 9)], (engine.decoder, engine.weights)
    for oracle in oracles:
        oracle.tell(text[:90].tolist(), text[90:].tolist())
    to = [Destination(cache(), 0, oracle) for oracle in oracles]
    logits = prefill_all(*target, to, text[:90])
    for destination, oracle in zip(to, oracles, strict=True):
        oracle_cache = cache()
        torch.testing.assert_close(prefill(*target, oracle_cache, 0, text[:90], scorer=oracle), logits)
        for layer in range(3):
            for ours, theirs in zip(destination.cache.full(layer), oracle_cache.full(layer), strict=True):
                torch.testing.assert_close(ours[:, :, :20], theirs[:, :, :20])
