"""Selected tokens that lie apart cost more to read than pages of them."""

from dataclasses import replace

import pytest

from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Machine, RateTerms
from ridgeplan.roofline.passes import decode_pass
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import PAGE_GAIN, draft_terms, round_at, round_rates

SHAPE = load_shape("Llama-3.1-8B")  # 128 channels: 256 bytes a key


@pytest.fixture
def machine(ideal: Machine) -> Machine:
    """1 TB/s, a fifth of it where attention reads chosen tokens."""
    return replace(ideal, rates={**ideal.rates, "sparse_attention_full": RateTerms(0.2, 1.0, 0.0)})


def draft_s(machine: Machine, page_tokens: float) -> float:
    plan = preset("specattn", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = strategy_of(plan, SHAPE, machine, 0.9).with_terms(
        draft_page_tokens=page_tokens, draft_round_score_bytes=0
    )
    rates = round_rates(SHAPE, machine, strategy, rates_of(plan, SHAPE, machine))
    return float(round_at(SHAPE, machine, strategy, rates, 32768).draft_s)


def read_s(machine: Machine) -> float:
    """Seconds to stream the drafts' KV."""
    plan = preset("specattn", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = strategy_of(plan, SHAPE, machine, 0.9)
    ops = decode_pass(SHAPE, draft_terms(SHAPE, machine, strategy, 32768))
    return float(sum(op.total.read_bytes for op in ops if op.name == "attention")) / 1e12


def test_of_a_page_all_but_the_first_token_come_closer_to_streams(machine: Machine) -> None:
    """Single tokens take 5 times as long as a stream: pages save PAGE_GAIN of the 4 on top, but for the first token."""
    saved = draft_s(machine, 1) - draft_s(machine, 16)
    assert saved == pytest.approx(4 * PAGE_GAIN * (1 - 1 / 16) * read_s(machine), rel=1e-6)


def test_what_a_scan_chose_is_gathered(ideal: Machine) -> None:
    """A progressive draft reads its chosen codes at a quarter of the bandwidth, not at its class's half of it."""
    plan = preset("progressive", Workload("Llama-3.1-8B", "h200", 32768))
    taken_s = []
    for gather in (1.0, 0.25):
        both = {"gather": RateTerms(gather, 1.0, 0.0), "progressive_attention": RateTerms(0.5, 1.0, 0.0)}
        slower = replace(ideal, rates={**ideal.rates, **both})
        strategy = strategy_of(plan, SHAPE, slower, 0.9)
        rates = round_rates(SHAPE, slower, strategy, rates_of(plan, SHAPE, slower))
        taken_s.append(float(round_at(SHAPE, slower, strategy, rates, 32768).draft_s))
    ops = decode_pass(SHAPE, draft_terms(SHAPE, ideal, strategy, 32768))
    read_bytes = sum(float(op.total.read_bytes) for op in ops if op.category == "attention")
    assert taken_s[1] - taken_s[0] == pytest.approx((4 - 2) * read_bytes / ideal.bandwidth_bytes_per_s, rel=1e-6)


def test_attention_to_all_tokens_has_no_pages(machine: Machine) -> None:
    plan = preset("quantspec-kv", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = strategy_of(plan, SHAPE, machine, 0.9)
    assert (strategy.draft.page_tokens, strategy.target.page_tokens) == (1, 1)


def test_scores_are_scanned_as_attention_streams(machine: Machine) -> None:
    """An eighth of 32 layers' keys of 32768 tokens, 8 heads of 128 channels: 268 MB at half of 1 TB/s."""
    slow = replace(machine, rates={**machine.rates, "attention": RateTerms(0.5, 1.0, 0.0)})
    plan = preset("magicdec-quest", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = strategy_of(plan, SHAPE, slow, 0.9)
    rates = round_rates(SHAPE, slow, strategy, rates_of(plan, SHAPE, slow))
    scored, free = (
        round_at(SHAPE, slow, strategy.with_terms(draft_scored_keys=keys), rates, 32768)
        for keys in (strategy.draft.scored_keys, 0)
    )
    keys_bytes = 32 * 32768 * 8 * 128 * 2 / 8
    assert scored.draft_s - free.draft_s == pytest.approx(keys_bytes / 0.5e12, rel=1e-6)
