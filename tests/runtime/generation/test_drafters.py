"""Suffix drafters and cascades: greedy output is the target's own. Sampled output is tested in test_distribution.py."""

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.roofline.execution import RoundShape, round_shape
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind

NEW = 70  # with groups of 32: two flushes
TO_TARGET = Drafter(DrafterKind.SUFFIX, depth=4, min_match=1)
CASCADE = Drafter(DrafterKind.SUFFIX, depth=3, passes=2, min_match=1)


@pytest.fixture(scope="module")
def repetitive(tiny_model, make_plan, prompts):
    """Ragged prompts, two of which end as they begin and have the model's own text in the middle."""
    first, second, third = prompts(25, 37, 14)
    engine = runtime.load(make_plan(batch=3), tiny_model(agreeable=True).folder)
    written = engine.generate([first, second, third], 50).tokens
    return [first + written[0] + first, second, third + written[2][:37] + third]


@pytest.mark.parametrize(
    "kv, gamma, drafter, options, batch",
    [
        ("bf16", 4, TO_TARGET, {}, 3),
        pytest.param("int4x2", 4, TO_TARGET, {}, 1, marks=pytest.mark.slow),
        ("int4x2", 6, CASCADE, {"draft_bits": 4}, 3),
        ("int4x2", 8, CASCADE, {}, 1),
        pytest.param("bf16", 3, CASCADE, {"draft_bits": 4}, 3, marks=pytest.mark.slow),
        pytest.param("bf16", 4, TO_TARGET, {"evict": "streamingllm", "budget": 32}, 3, marks=pytest.mark.slow),
    ],
    ids=["target", "codes", "cascade", "cascade of one", "few drafts", "evicted"],
)
def test_greedy_output_is_the_targets(kv, gamma, drafter, options, batch, tiny_model, make_plan, repetitive):
    folder, ids = tiny_model(agreeable=True).folder, repetitive[:batch]
    kept = {name: value for name, value in options.items() if name != "draft_bits"}
    plain = runtime.load(make_plan(kv, batch=3, **kept), folder).generate(ids, NEW)
    engine = runtime.load(make_plan(kv, gamma, batch=3, drafter=drafter, **options), folder)
    for _ in range(2 if drafter is TO_TARGET else 1):  # the second generation forgets the first
        drafted = engine.generate(ids, NEW)
        assert drafted.tokens == plain.tokens
    figures = drafted.statistics
    assert 0 < figures.hit_rate <= 1
    assert 0 < figures.proposals_matched < figures.proposals_compared
    assert figures.tokens_per_round > 1
    if drafter.cascades:
        assert 1 < figures.drafts_per_pass <= drafter.depth + 1
        assert figures.drafted <= gamma * figures.sequence_rounds


def test_tiers_may_change_from_round_to_round(tiny_model, make_plan, repetitive, monkeypatch):
    folder = tiny_model(agreeable=True).folder
    plain = runtime.load(make_plan("int4x2", batch=3), folder).generate(repetitive, NEW)
    engine = runtime.load(make_plan("int4x2", 8, batch=3, drafter=CASCADE, draft_bits=4), folder)
    kinds = [RoundShape(8, 2, 3), 0, RoundShape(2, 0, 2), 3, RoundShape(4, 1, 3)]
    order = cycle(kinds)
    monkeypatch.setattr(
        engine, "_schedule", lambda request: SimpleNamespace(next=lambda: next(order), add=lambda kind, rows: None)
    )
    generation = engine.generate(repetitive, NEW)
    assert generation.tokens == plain.tokens
    counts = dict(generation.statistics.rounds_of)
    assert set(counts) == set(map(round_shape, kinds)) and sum(counts.values()) == generation.statistics.rounds


def test_tiers_that_adapt_change_nothing(tiny_model, make_plan, repetitive, h200_profile):
    """A text of unknown kind, of whose proposals little is expected until they are seen."""
    folder = tiny_model(agreeable=True).folder
    plain = runtime.load(make_plan("int4x2", batch=3), folder).generate(repetitive, NEW)
    plan = make_plan("int4x2", 8, batch=3, drafter=CASCADE, draft_bits=4, adaptive=True)
    engine = runtime.load(plan, folder, profile=h200_profile)
    generation = engine.generate(repetitive, NEW)
    assert generation.tokens == plain.tokens
    figures = generation.statistics
    assert figures.hit_rate > 0 and sum(figures.rounds_at) == figures.rounds
    assert sum(rounds for _, rounds in figures.rounds_of) == figures.rounds
    assert {shape for shape, _ in figures.rounds_of} <= {*map(round_shape, plan.speculation.round_kinds)}


@pytest.mark.gpu
@pytest.mark.parametrize("drafter, gamma", [(TO_TARGET, 4), (CASCADE, 8)], ids=["target", "cascade"])
def test_graphs_generate_what_plain_decoding_does(drafter, gamma, tiny_model, make_plan, repetitive):
    folder, options = tiny_model(agreeable=True).folder, {"device": "cuda", "dtype": torch.float32}
    plain = runtime.load(make_plan("int4x2", batch=3), folder, **options).generate(repetitive, 100)
    engine = runtime.load(make_plan("int4x2", gamma, batch=3, drafter=drafter), folder, **options)
    for _ in range(2):
        drafted = engine.generate(repetitive, 100)
        assert drafted.tokens == plain.tokens
        assert drafted.statistics.tokens_per_round > 1
