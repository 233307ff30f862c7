"""Time of choosing tokens, and what attention to them takes beyond the rates of its classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.latency import Machine, RateTerms, scan_kind
from ridgeplan.roofline.passes import Op
from ridgeplan.roofline.sparsity.sparse_ops import TOP_K_PASSES, two_bit_scan, two_bit_top_k
from ridgeplan.roofline.strategy import Strategy
from ridgeplan.roofline.term_math import maximum, minimum, where

# Of the time that single tokens, which lie apart, cost attention beyond a stream of the same bytes, pages of them save
# this share but for their first tokens. On an H200 attention to pages of 16 takes 0.47 to 0.61 of that to single ones.
PAGE_GAIN = 0.6


def draft_choice_seconds(shape: ModelShape, machine: Machine, strategy: Strategy, tokens: Term) -> Term:
    """What one draft chooses of `tokens` cached ones, in all layers; 0 where it chooses none."""
    scan = two_bit_scan(strategy.batch, shape.q_heads, shape.kv_heads, shape.head_dim, tokens, strategy.kv_group)
    scanned_bytes = strategy.draft_two_bit * strategy.draft_choices * scan.read_bytes
    key_bytes = strategy.draft_scored_keys * _key_bytes(shape, machine, strategy, tokens)
    projected_s = _scan_seconds(machine, strategy.draft_projected_params * machine.element_bytes)
    per_token = strategy.step_score_bytes, strategy.draft_ranked
    ranked_s = _top_k_seconds(machine, strategy.batch * tokens, *per_token, strategy.draft_choices)
    return projected_s + _scan_seconds(machine, key_bytes + scanned_bytes) + ranked_s


def round_choice_seconds(machine: Machine, strategy: Strategy, tokens: Term) -> Term:
    """What is chosen of `tokens` cached ones once for all drafts of a round; 0 where nothing is."""
    return _top_k_seconds(machine, strategy.batch * tokens, strategy.round_score_bytes, strategy.draft_ranked, 1)


def target_choice_seconds(shape: ModelShape, machine: Machine, strategy: Strategy, tokens: Term) -> Term:
    """What a pass of the target chooses of `tokens` cached ones: for each of its queries, after one projection."""
    heads = shape.q_heads, shape.kv_heads, shape.head_dim
    chosen = minimum(strategy.target_budget, tokens)
    choice = two_bit_top_k(strategy.batch, *heads, tokens, strategy.kv_group, chosen)
    scanning = scan_kind("two_bit_scan", shape.q_heads, shape.kv_heads)
    key_bytes = strategy.target_scored_keys * _key_bytes(shape, machine, strategy, tokens)
    two_bit_s = strategy.target_choices * machine.seconds(choice, machine.rates[scanning])
    scored_s = where(strategy.target_two_bit, two_bit_s, _scan_seconds(machine, key_bytes))
    per_token = strategy.target_score_bytes, strategy.target_ranked
    ranked_s = _top_k_seconds(machine, strategy.batch * tokens, *per_token, strategy.target_choices)
    projected_s = _scan_seconds(machine, strategy.target_projected_params * machine.element_bytes)
    return projected_s + strategy.reads * (scored_s + ranked_s)


def _key_bytes(shape: ModelShape, machine: Machine, strategy: Strategy, tokens: Term) -> Term:
    """Keys of one layer, of all sequences."""
    return strategy.batch * tokens * shape.kv_elements_per_token_per_layer / 2 * machine.element_bytes


def _scan_seconds(machine: Machine, read_bytes: Term) -> Term:
    """Traffic of a selection, which scans what it scores as attention streams; 0 where nothing is scored."""
    return read_bytes / (machine.bandwidth_bytes_per_s * machine.rates["attention"].bandwidth_utilization)


def _top_k_seconds(machine: Machine, tokens: Term, token_bytes: Term, token_scores: Term, choices: Term) -> Term:
    """`choices` launches of top-k, which move and rank so many bytes and scores of a token in all; 0 if none move."""
    rates = machine.rates["top_k"]
    moved_s = tokens * token_bytes / (machine.bandwidth_bytes_per_s * rates.bandwidth_utilization)
    counted_s = TOP_K_PASSES * tokens * token_scores / (machine.compute_flops * rates.compute_utilization)
    return minimum(tokens * token_bytes, 1) * (choices * rates.launch_s + maximum(moved_s, counted_s))


def saved_by_pages(machine: Machine, ops: Iterable[Op], rates: Mapping[str, RateTerms], page_tokens: Term) -> Term:
    """What a pass's attention to pages of `page_tokens` tokens takes less than to as many single ones.

    The classes of attention to chosen tokens were calibrated with single ones, which lie apart. Of a page all but the
    first come closer to the rate of streams, by PAGE_GAIN.
    """
    streaming = machine.rates["attention"].bandwidth_utilization
    reads = _attention_reads(machine, ops, rates)
    lost: Term = sum(read_bytes * maximum(1 / utilization - 1 / streaming, 0) for read_bytes, utilization in reads)
    return lost * PAGE_GAIN * (1 - 1 / page_tokens) / machine.bandwidth_bytes_per_s


def gathered_seconds(machine: Machine, ops: Iterable[Op], rates: Mapping[str, RateTerms]) -> Term:
    """What a kernel that scans, and reads what it chose, takes for the latter beyond the rate of its class.

    That class covers both. The scan counts as a stream of its own, so that what is chosen counts as a gather.
    """
    gather = machine.rates["gather"].bandwidth_utilization
    reads = _attention_reads(machine, ops, rates)
    lost: Term = sum(read_bytes * maximum(1 / gather - 1 / utilization, 0) for read_bytes, utilization in reads)
    return lost / machine.bandwidth_bytes_per_s


def _attention_reads(
    machine: Machine, ops: Iterable[Op], rates: Mapping[str, RateTerms]
) -> Iterator[tuple[Term, Term]]:
    """Bytes that each op of attention reads, and the share of the bandwidth at which its class does."""
    for op in ops:
        if op.category == "attention":
            yield op.total.read_bytes, machine.rates_for(op, rates).bandwidth_utilization
