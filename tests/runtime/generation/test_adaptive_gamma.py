"""Rounds of different gammas in one generation: the output is the target's own, wherever gamma changes."""

from itertools import cycle

import pytest
import torch
from grids import pairs

from ridgeplan import runtime
from ridgeplan.roofline.catalog.profile import shipped_profiles
from ridgeplan.runtime import engine as engine_module
from ridgeplan.runtime.policies.ranked import RankedSelector
from ridgeplan.runtime.sampling import SamplingParams

LENGTHS, NEW = [120, 57, 85], 78  # with groups of 32: three flushes of every row
PATTERNS = {
    "up and down": [0, 1, 4, 6, 4, 2],
    "plain between": [6, 0, 0, 6, 0],
    "mostly plain": [0, 0, 0, 0, 0, 0, 0, 1],
}
SPARSE = {  # selections with what differs from small budgets for all
    "streamingllm": {},
    "snapkv": {"window": 8, "pooling": 3},
    "quest": {},
    "specextend": {"page": 16},
    "specattn": {},
    "progressive": {},
    "oracle": {},
    "clusterkv": {"cluster": 8},
    "shadowkv": {"outliers": 1},
}
# Of each way to choose: once after the prompt, by a verification's scores, and for every query from an index or codes.
FAST = ("snapkv", "specattn", "quest", "progressive", "clusterkv", "nonsense")


class Forced:
    """Gammas in a given order, over and over."""

    def __init__(self, gammas):
        self._gammas = cycle(gammas)
        self.seen = []

    def next(self):
        return next(self._gammas)

    def add(self, gamma, rows):
        self.seen.append((gamma, len(rows)))


@pytest.fixture(scope="module")
def profile():
    """Rates by which drafts cost less than the target's steps."""
    return next(profile for profile in shipped_profiles() if profile.hardware.name == "h200")


@pytest.fixture(scope="module")
def plain(tiny_model, make_plan, prompts, generated):
    """Plain decoding of a KV format."""
    ids = prompts(*LENGTHS)
    return lambda kv, agreeable=True: generated(
        make_plan(kv, batch=3), tiny_model(agreeable=agreeable).folder, ids, NEW
    )


@pytest.fixture
def forced(monkeypatch):
    """Makes an engine's generations take gammas in a given order, read a round late as on a GPU."""
    monkeypatch.setattr(engine_module.EagerRounds, "depth", 2)

    def force(engine, gammas):
        schedule = Forced(gammas)
        monkeypatch.setattr(engine, "_schedule", lambda request: schedule)
        return schedule

    return force


@pytest.mark.parametrize(
    "kv, draft_bits, agreeable, name",
    pairs([("int4x2", 16, True), ("int4x2", 4, False), ("bf16+int4", 4, True), ("bf16", 4, False)], [*PATTERNS], 0),
)
def test_changes_of_gamma_change_nothing(
    kv, draft_bits, agreeable, name, plain, tiny_model, make_plan, prompts, profile, forced
):
    pattern = PATTERNS[name]
    folder, ids = tiny_model(agreeable=agreeable).folder, prompts(*LENGTHS)
    expected = plain(kv, agreeable)
    engine = runtime.load(make_plan(kv, 6, batch=3, draft_bits=draft_bits, adaptive=True), folder, profile=profile)
    schedule = forced(engine, pattern)
    generation = engine.generate(ids, NEW)
    assert generation.tokens == expected.tokens
    assert generation.statistics.flushes == expected.statistics.flushes
    assert kv == "bf16" or generation.statistics.flushes >= 9
    assert [gamma for gamma, _ in schedule.seen] == [gamma for gamma, _ in zip(cycle(pattern), schedule.seen)]
    assert {rows for _, rows in schedule.seen} == {3}
    rounds_at = generation.statistics.rounds_at
    assert sum(rounds_at) == generation.statistics.rounds
    assert {gamma for gamma, count in enumerate(rounds_at) if count} == set(pattern)
    assert agreeable or generation.statistics.accepted < generation.statistics.num_draft_tokens_verified


@pytest.mark.parametrize(
    "selection, kv, codes",
    [
        pytest.param(name, kv, codes, marks=[] if name in FAST and kv == "int4x2" else [pytest.mark.slow])
        for name in [*SPARSE, "nonsense"]
        for kv, codes in (("int4x2", "upper"), ("bf16+int4", "upper"), ("bf16+int4", "full"))
    ],
)
def test_changes_of_gamma_change_nothing_whatever_drafts_read(
    selection, kv, codes, request, plain, tiny_model, make_plan, prompts, profile, forced
):
    """What drafts read is chosen from verifications of one query to seven, and groups grow old between them."""
    name = request.getfixturevalue(selection) if selection == "nonsense" else selection
    options = {"ratio": 0.2, "floor": 8, "sinks": 2, "recent": 6} | SPARSE.get(selection, {})
    plan = make_plan(kv, 6, batch=3, codes=codes, adaptive=True, selection=name, **options)
    engine = runtime.load(plan, tiny_model(agreeable=True).folder, profile=profile)
    forced(engine, PATTERNS["up and down"])
    generation = engine.generate(prompts(*LENGTHS), 45)
    assert generation.tokens == [tokens[:45] for tokens in plain(kv).tokens]
    assert generation.statistics.flushes >= 6
    assert {gamma for gamma, count in enumerate(generation.statistics.rounds_at) if count} == {0, 1, 2, 4, 6}
    assert generation.statistics.accepted < generation.statistics.num_draft_tokens_verified


def test_rounds_of_plain_decoding_choose_nothing(tiny_model, make_plan, prompts, profile, forced, monkeypatch):
    """Choosing for no drafts would make a step slower than plain decoding's."""
    chosen = []
    choose = RankedSelector.before_drafts
    monkeypatch.setattr(RankedSelector, "before_drafts", lambda policy: (chosen.append(1), choose(policy)))
    plan = make_plan("bf16", 2, adaptive=True, selection="specattn", floor=8, sinks=2, recent=6)
    engine = runtime.load(plan, tiny_model().folder, profile=profile)
    forced(engine, [0, 2, 0, 0])
    rounds_at = engine.generate(prompts(60), 30).statistics.rounds_at
    assert rounds_at[0] > 5
    assert len(chosen) == sum(rounds_at[1:]) > 0


def test_tokens_drafted_and_verified_are_those_of_each_rounds_gamma(tiny_model, make_plan, prompts, profile, forced):
    """Drafts that read what the target reads are all accepted, so every round is known."""
    engine = runtime.load(make_plan("bf16", 6, adaptive=True), tiny_model().folder, profile=profile)
    forced(engine, [0, 2, 6])
    # 60 tokens after the prompt's own: 1, 3 and 7 five times, 1, 3, and the last.
    statistics = engine.generate(prompts(40), 61).statistics
    assert statistics.rounds_at == (6, 0, 6, 0, 0, 0, 6)
    assert statistics.drafted == 2 * 6 + 6 * 6
    # The last round needs one token alone, its first draft; the others are not compared.
    assert statistics.verified_at == (12, 11, 5, 5, 5, 5)
    assert statistics.acceptance == 1.0


@pytest.mark.parametrize("agreeable", [True, False], ids=["agreeable", "contrary"])
def test_its_own_choices_change_nothing_and_come_again(agreeable, plain, tiny_model, make_plan, prompts, profile):
    folder, ids = tiny_model(agreeable=agreeable).folder, prompts(*LENGTHS)
    engine = runtime.load(make_plan("int4x2", 6, batch=3, adaptive=True), folder, profile=profile)
    assert engine.generate(ids, NEW).tokens == plain("int4x2", agreeable).tokens
    sampling = SamplingParams(temperature=1.0, seed=7)
    first, second = (engine.generate(ids, NEW, sampling) for _ in range(2))
    assert first.tokens == second.tokens
    assert first.statistics.rounds_at == second.statistics.rounds_at


def test_a_machine_without_rates_is_refused_before_loading(tiny_model, make_plan, monkeypatch):
    from ridgeplan.planner import resolution
    from ridgeplan.roofline.catalog.profile import ProfileError

    monkeypatch.setattr(resolution, "existing_path", lambda path: None)
    monkeypatch.setattr(resolution, "detect_hardware", lambda: None)
    with pytest.raises(ProfileError, match="ridgeplan calibrate"):
        runtime.load(make_plan("bf16", 2, adaptive=True), tiny_model().folder)
    runtime.load(make_plan("bf16", 2), tiny_model().folder)


def test_rates_and_lengths_of_the_request_decide(tiny_model, make_plan, prompts, profile, monkeypatch):
    """The rates are those given, at the lengths and rows of the prompts instead of the plan's."""
    calls = {}

    def costs(plan, shape, used):
        calls.update(workload=plan.workload, shape=shape, used=used)
        return real(plan, shape, used)

    real = engine_module.round_costs
    monkeypatch.setattr(engine_module, "round_costs", costs)
    engine = runtime.load(make_plan("int4x2", 4, batch=3, adaptive=True), tiny_model().folder, profile=profile)
    engine.generate(prompts(100, 50), 9)
    workload = calls["workload"]
    assert (workload.context, workload.new_tokens, workload.batch) == (75, 9, 2)
    assert calls["used"] is profile
    assert calls["shape"].layers == 2


def test_the_cache_has_room_for_the_largest_gamma(tiny_model, make_plan, prompts, profile, forced):
    """To the last token of the plan's context, where a round of the largest gamma begins one token before the end."""
    engine = runtime.load(
        make_plan("int4x2", 6, context=60, new_tokens=70, adaptive=True), tiny_model().folder, profile=profile
    )
    forced(engine, [0, 6])
    plain = runtime.load(make_plan("int4x2", context=60, new_tokens=70), tiny_model().folder)
    ids = prompts(60)
    assert engine.generate(ids, 70).tokens == plain.generate(ids, 70).tokens
    assert torch.isfinite(engine.cache.keys).all()
