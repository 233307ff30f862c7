"""Sparse drafts change the speed, never the output: every policy on every cache, across flushes, in ragged batches."""

import functools
from itertools import product

import pytest
from grids import pairs

from ridgeplan import runtime

LENGTHS, NEW = [120, 57, 85], 45  # with groups of 32: two flushes of every row
SMALL = {"ratio": 0.2, "floor": 8, "sinks": 2, "recent": 6}
SELECTIONS = {
    "streamingllm": {},
    "snapkv": {"window": 8, "pooling": 3},
    "quest": {},
    "specextend": {"page": 16},
    "specattn": {"score": "logits"},
    "progressive": {},
    "oracle": {},
    "clusterkv": {"cluster": 8},
    "shadowkv": {"outliers": 1},
}
CACHES = [("int4x2", None), ("bf16+int4", None), ("bf16+int4", "full"), ("int8", "full"), ("bf16", "full")]
# 2-bit keys are those of codes, which a bf16 cache has none of.
# Every policy on one cache in turn, and on the target's own codes after an eviction (below).
CACHES_IN_TURN = [CACHES[4], CACHES[1], CACHES[0]]
DRAFTED = [
    *(case for case in pairs(list(SELECTIONS), CACHES_IN_TURN, always=0) if case.values[:2] != ("progressive", "bf16")),
    *(pytest.param(name, *cache, marks=pytest.mark.slow) for cache, name in product(CACHES[2:4], SELECTIONS)),
]


def generate(plan, folder, prompts, new_tokens=NEW):
    return runtime.load(plan, folder, device="cpu").generate(prompts, new_tokens)


@pytest.fixture(scope="module")
def once():
    """`generate`, which gives the same result again for what it was asked before: plans are compared with one."""
    return functools.cache(
        lambda plan, folder, prompts, new_tokens=NEW: generate(plan, folder, list(map(list, prompts)), new_tokens)
    )


def frozen(prompts):
    return tuple(map(tuple, prompts))


@pytest.fixture(scope="module")
def plain(tiny_model, make_plan, prompts):
    """Tokens of plain decoding by the KV format that the target reads."""
    folder = tiny_model(agreeable=True).folder
    formats = {"bf16": "bf16", "bf16+int4": "bf16", "int8": "int8", "int4x2": "int8"}
    plan = {kv: generate(make_plan(kv, batch=3), folder, prompts(*LENGTHS)) for kv in set(formats.values())}
    return {kv: plan[target].tokens for kv, target in formats.items()}


@pytest.mark.parametrize("selection, kv, codes", DRAFTED)
def test_sparse_drafts_change_nothing(selection, kv, codes, plain, tiny_model, make_plan, prompts):
    options = SMALL | SELECTIONS[selection]
    plan = make_plan(kv, 3, batch=3, codes=codes, selection=selection, **options)
    drafted = generate(plan, tiny_model(agreeable=True).folder, prompts(*LENGTHS))
    assert drafted.tokens == plain[kv]
    assert drafted.statistics.flushes >= (0 if kv == "bf16" else 6)
    assert 0 < drafted.statistics.accepted < drafted.statistics.num_draft_tokens_verified


@pytest.mark.parametrize("selection, kv, codes", DRAFTED)
def test_drafts_that_may_read_everything_do(selection, kv, codes, once, tiny_model, make_plan, prompts):
    """With a ratio of 1 every draft reads what one that selects nothing reads, across flushes."""
    folder, ids = tiny_model().folder, prompts(*LENGTHS)
    options = SELECTIONS[selection] | {"ratio": 1.0}
    every = once(make_plan(kv, 2, batch=3, codes=codes), folder, frozen(ids), 24)
    chosen = generate(make_plan(kv, 2, batch=3, codes=codes, selection=selection, **options), folder, ids, 24)
    assert chosen.tokens == every.tokens
    counted = "num_draft_tokens_verified", "accepted", "rounds", "flushes"
    assert [getattr(chosen.statistics, name) for name in counted] == [
        getattr(every.statistics, name) for name in counted
    ]


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("kv, codes", [("int4x2", "upper"), pytest.param("bf16+int4", "full", marks=pytest.mark.slow)])
def test_drafts_choose_among_what_an_eviction_left(kv, codes, selection, once, tiny_model, make_plan, prompts):
    """Output is that of the evicted target; and with a ratio of 1, drafts read all of its cache."""
    folder, ids, small = tiny_model(agreeable=True).folder, prompts(*LENGTHS), SMALL | SELECTIONS[selection]
    evicted = {"batch": 3, "evict": "dapq", "budget": 45}
    plain = once(make_plan(kv, **evicted), folder, frozen(ids))
    every = once(make_plan(kv, 3, codes=codes, **evicted), folder, frozen(ids))
    few, all_of_it = (
        generate(make_plan(kv, 3, codes=codes, selection=selection, **evicted, **options), folder, ids)
        for options in (small, small | {"ratio": 1.0})
    )
    assert plain.tokens == every.tokens == few.tokens == all_of_it.tokens
    assert all_of_it.statistics.accepted == every.statistics.accepted
    assert few.statistics.accepted > 0


def test_nonsense_is_corrected(plain, nonsense, tiny_model, make_plan, prompts):
    plan = make_plan("int4x2", 3, batch=3, selection=nonsense)
    drafted = generate(plan, tiny_model(agreeable=True).folder, prompts(*LENGTHS))
    assert drafted.tokens == plain["int4x2"]
    assert drafted.statistics.acceptance < 0.3
