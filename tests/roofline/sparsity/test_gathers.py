"""Selected tokens that lie apart cost more to read than pages of them."""

from dataclasses import replace

import pytest

from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.plan import Workload
from ridgeplan.planner.presets import preset
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Machine, RateTerms
from ridgeplan.roofline.passes import decode_pass
from ridgeplan.roofline.speculative_round import draft_terms, round_at, round_rates

SHAPE = load_shape("Llama-3.1-8B")  # 128 channels: 256 bytes a key


@pytest.fixture
def machine(ideal: Machine) -> Machine:
    """1 TB/s, a fifth of it where attention reads chosen tokens."""
    return replace(ideal, rates={**ideal.rates, "sparse_attention_full": RateTerms(0.2, 1.0, 0.0)})


def draft_s(machine: Machine, page_tokens: float) -> float:
    plan = preset("specattn", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = replace(strategy_of(plan, SHAPE, machine, 0.9), draft_page_tokens=page_tokens, round_score_bytes=0)
    rates = round_rates(SHAPE, machine, strategy, rates_of(plan, SHAPE, machine))
    return float(round_at(SHAPE, machine, strategy, rates, 32768).draft_s)


def read_s(machine: Machine) -> float:
    """Seconds to stream the drafts' KV."""
    plan = preset("specattn", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = strategy_of(plan, SHAPE, machine, 0.9)
    ops = decode_pass(SHAPE, draft_terms(SHAPE, machine, strategy, 32768))
    return float(sum(op.total.read_bytes for op in ops if op.name == "attention")) / 1e12


def test_single_tokens_are_read_as_calibration_read_them(machine: Machine) -> None:
    """5 times as long as a page without an end: 4 times the streaming time on top."""
    streamed = draft_s(machine, float(1 << 40))
    assert draft_s(machine, 1) - streamed == pytest.approx(4 * read_s(machine), rel=1e-6)


def test_of_a_page_all_but_the_first_token_stream(machine: Machine) -> None:
    streamed = draft_s(machine, float(1 << 40))
    assert draft_s(machine, 16) - streamed == pytest.approx(4 * read_s(machine) / 16, rel=1e-6)


def test_attention_to_all_tokens_has_no_pages(machine: Machine) -> None:
    plan = preset("quantspec-kv", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = strategy_of(plan, SHAPE, machine, 0.9)
    assert (strategy.draft_page_tokens, strategy.target_page_tokens) == (1, 1)


def test_scores_are_scanned_as_attention_streams(machine: Machine) -> None:
    """An eighth of 32 layers' keys of 32768 tokens, 8 heads of 128 channels: 268 MB at half of 1 TB/s."""
    slow = replace(machine, rates={**machine.rates, "attention": RateTerms(0.5, 1.0, 0.0)})
    plan = preset("magicdec-quest", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = strategy_of(plan, SHAPE, slow, 0.9)
    rates = round_rates(SHAPE, slow, strategy, rates_of(plan, SHAPE, slow))
    scored, free = (
        round_at(SHAPE, slow, replace(strategy, draft_scored_keys=keys), rates, 32768)
        for keys in (strategy.draft_scored_keys, 0)
    )
    keys_bytes = 32 * 32768 * 8 * 128 * 2 / 8
    assert scored.draft_s - free.draft_s == pytest.approx(keys_bytes / 0.5e12, rel=1e-6)
