"""Time and tokens of one speculative round or plain step: its passes, its selection of tokens, and its sampling.

Acceptance is conditional throughout: the probability that a drafted token is accepted, given that all earlier ones of
its round were (Leviathan et al. 2023; SpecAttn, section 3.2). QuantSpec's tables report accepted / (gamma x rounds)
instead, which `conditional_acceptance` converts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

import numpy as np

from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.families import executable_architectures
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Cost, Term, indicator, is_symbolic, maximum, minimum, where
from ridgeplan.roofline.drafters import (
    capped_cascade_tokens,
    chances_of_drafts,
    pass_tokens,
    proposal_seconds,
    proposed_tokens,
    proposes,
)
from ridgeplan.roofline.execution import (
    HELD_ATTENTION_SHARE,
    PREFILL_CHUNK_TOKENS,
    PROMPT_EXPERTS_SPREAD,
    UNTIMED_PROMPT_SPREAD,
    RoundKind,
    library_rows,
    mean_quantized_tokens,
    mean_splits,
    round_shape,
    short_attention_factor,
)
from ridgeplan.roofline.host_link import HostLink, small_kernel_seconds
from ridgeplan.roofline.latency import (
    Machine,
    PassRates,
    RateTerms,
    StrategyRates,
    attention_kind,
    integer_kind,
    prefill_attention_kind,
    scan_kind,
    select_rates,
    slower_rates,
)
from ridgeplan.roofline.memory import NO_LAYERS, HostLayers, coded_layers, final_tokens, hides, prompt_expert_rows
from ridgeplan.roofline.ops import TOP_K_PASSES, two_bit_scan, two_bit_top_k
from ridgeplan.roofline.passes import MANY_CHANNELS, SINKS_IN_FLASH, WINDOWED_ATTENTION, Op, PassTerms, decode_pass
from ridgeplan.roofline.strategy import PassStrategy, Strategy
from ridgeplan.roofline.torch_prompts import rates_as_executed

# Of the time that single tokens, which lie apart, cost attention beyond a stream of the same bytes, pages of them save
# this share but for their first tokens. On an H200 attention to pages of 16 takes 0.47 to 0.61 of that to single ones.
PAGE_GAIN = 0.6

# Most that a launch of attention to single tokens loses against a stream of the same bytes. Its class, calibrated with
# up to 16 sequences, has a loss that grows with the bytes. On an H200, 2048 tokens of 32 sequences lose 3 to 14 us
# whether they are two thirds or 6% of a text (specontext_h200.json, generation and placements without layers on the
# host, which this was fitted to; table3: 0 to 8).
MAX_GATHER_LOSS_S = 10e-6

# How many times as long latent attention's instructions take over codes, which it decodes to 16 bits first. Fitted to
# steps of DeepSeek-V2-Lite with 8-bit weights on an H200: INT8 latents take 0.55, 1.17 and 2.54 ms more than 16-bit
# ones at 32k x 1, 120k x 1 and 32k x 8, the last by the kernel before today's tiles.
DECODED_LATENTS = 3.5


def draft_choice_seconds(shape: ModelShape, machine: Machine, strategy: Strategy, tokens: Term) -> Term:
    """What one draft chooses of `tokens` cached ones, in all layers; 0 where it chooses none."""
    scan = two_bit_scan(strategy.batch, shape.q_heads, shape.kv_heads, shape.head_dim, tokens, strategy.kv_group)
    scanned_bytes = strategy.draft.scans_two_bit * strategy.draft.top_k_launches * scan.read_bytes
    key_bytes = strategy.draft.scored_keys * _key_bytes(shape, machine, strategy, tokens)
    projected_s = _scan_seconds(machine, strategy.draft.projected_params * machine.element_bytes)
    per_token = strategy.draft.score_bytes, strategy.draft.ranked_scores
    ranked_s = _top_k_seconds(machine, strategy.batch * tokens, *per_token, strategy.draft.top_k_launches)
    small_s = strategy.draft.small_kernels * small_kernel_seconds(machine)
    return projected_s + _scan_seconds(machine, key_bytes + scanned_bytes) + ranked_s + small_s


def round_choice_seconds(machine: Machine, strategy: Strategy, tokens: Term) -> Term:
    """What is chosen of `tokens` cached ones once for all drafts of a round; 0 where nothing is."""
    moved_bytes = strategy.draft.round_score_bytes + strategy.gamma * strategy.draft.query_score_bytes
    per_token = moved_bytes, strategy.draft.ranked_scores
    return _top_k_seconds(machine, strategy.batch * tokens, *per_token, 1)


def target_choice_seconds(shape: ModelShape, machine: Machine, strategy: Strategy, tokens: Term) -> Term:
    """What a pass of the target chooses of `tokens` cached ones: for each of its queries, after one projection."""
    heads = shape.q_heads, shape.kv_heads, shape.head_dim
    tokens = strategy.target_candidates(tokens)
    chosen = strategy.target_selected(tokens)
    choice = two_bit_top_k(strategy.batch, *heads, tokens, strategy.kv_group, chosen)
    scanning = scan_kind("two_bit_scan", *heads)
    key_bytes = strategy.target.scored_keys * _key_bytes(shape, machine, strategy, tokens)
    key_bytes = key_bytes + 2 * strategy.batch * tokens * strategy.target.logit_bytes
    two_bit_s = strategy.target.top_k_launches * machine.seconds(choice, machine.rates[scanning])
    scored_s = where(strategy.target.scans_two_bit, two_bit_s, _scan_seconds(machine, key_bytes))
    per_token = strategy.target.score_bytes, strategy.target.ranked_scores
    ranked_s = _top_k_seconds(machine, strategy.batch * tokens, *per_token, strategy.target.top_k_launches)
    projected_s = _scan_seconds(machine, strategy.target.projected_params * machine.element_bytes)
    small_s = strategy.target.small_kernels * small_kernel_seconds(machine)
    return projected_s + strategy.kv_reads * (scored_s + ranked_s + small_s)


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
    first come closer to the rate of streams, by PAGE_GAIN. On a CPU nothing is saved: there the loss is the time of
    small operations that gather, mask and join, which pages and runs need as well.
    """
    lost = _total(lost for _, lost in _losses(machine, ops, rates))
    return machine.asynchronous * PAGE_GAIN * (1 - 1 / page_tokens) * lost


def saved_by_size(machine: Machine, strategy: Strategy, ops: Iterable[Op], rates: Mapping[str, RateTerms]) -> Term:
    """What the target's attention to tokens in full precision takes less than its class has for so many bytes.

    It loses up to MAX_GATHER_LOSS_S a launch against a stream. Codes, and CPUs, were not measured so.
    """
    capped = machine.asynchronous * strategy.target.selects * (1 - minimum(strategy.target.bits, 1))
    losses = _losses(machine, ops, rates)
    return capped * _total(maximum(lost - op.launches * MAX_GATHER_LOSS_S, 0) for op, lost in losses)


def _total(seconds: Iterable[Term]) -> Term:
    return sum(seconds)


def _losses(machine: Machine, ops: Iterable[Op], rates: Mapping[str, RateTerms]) -> Iterator[tuple[Op, Term]]:
    """Each op of attention, and what it takes beyond a stream of the same bytes."""
    streaming = machine.rates["attention"].bandwidth_utilization
    for op, read_bytes, utilization in _attention_reads(machine, ops, rates):
        yield op, read_bytes * maximum(1 / utilization - 1 / streaming, 0) / machine.bandwidth_bytes_per_s


def gathered_seconds(machine: Machine, ops: Iterable[Op], rates: Mapping[str, RateTerms]) -> Term:
    """What a kernel that scans, and reads what it chose, takes for the latter beyond the rate of its class.

    That class covers both. The scan counts as a stream of its own, so that what is chosen counts as a gather.
    """
    gather = machine.rates["gather"].bandwidth_utilization
    reads = _attention_reads(machine, ops, rates)
    lost: Term = sum(read_bytes * maximum(1 / gather - 1 / utilization, 0) for _, read_bytes, utilization in reads)
    return lost / machine.bandwidth_bytes_per_s


def _attention_reads(
    machine: Machine, ops: Iterable[Op], rates: Mapping[str, RateTerms]
) -> Iterator[tuple[Op, Term, Term]]:
    """Each op of attention, the bytes that it reads, and the share of the bandwidth at which its class does."""
    for op in ops:
        if op.category == "attention":
            yield op, op.total.read_bytes, machine.rates_for(op, rates).bandwidth_utilization


@dataclass(frozen=True)
class Round:
    """Seconds of a round's parts. Without speculation `passes` is 0 and `verify_s` is the plain step."""

    passes: Term  # of the self-draft
    draft_s: Term  # one of them
    verify_s: Term
    accept_s: Term
    select_s: Term
    flush_s: Term  # this round's share of a flush
    overhead_s: Term = 0.0  # beyond all of these
    propose_s: Term = 0.0  # all proposals of a drafter

    @property
    def total_s(self) -> Term:
        """Proposals, drafts, one verification, acceptance, selection, flush and overhead."""
        steps_s = self.propose_s + self.passes * self.draft_s + self.verify_s
        return steps_s + self.accept_s + self.select_s + self.flush_s + self.overhead_s


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round by gamma, the first of which is 0: a plain step of the same target.

    acceptance: the predicted conditional acceptance of the self-drafts. hit, proposal_acceptance: of the plan's
    drafter, if it has one (roofline/drafters.py). always_proposed: whether it also proposes before rounds that do not
    use it.
    """

    seconds: dict[RoundKind, float]
    acceptance: float
    hit: float = 0.0
    proposal_acceptance: float = 0.0
    always_proposed: bool = True

    @property
    def gammas(self) -> tuple[RoundKind, ...]:
        """All rounds, from plain decoding."""
        return tuple(self.seconds)

    @property
    def drafter_known(self) -> bool:
        """Whether any round has the proposals of a drafter."""
        return any(round_shape(kind).depth for kind in self.seconds)

    @property
    def plain_s(self) -> float:
        """A plain step."""
        return self.seconds[0]


def tokens_per_round(acceptance: Term, gamma: Term) -> Term:
    """Expected tokens per round, the target's own included: (1 - a^(gamma + 1)) / (1 - a) at acceptance a.

    Leviathan et al., Eq 1. The limit at a = 1 is gamma + 1; numbers are clamped to just below 1.
    """
    below_one = acceptance if is_symbolic(acceptance) else minimum(acceptance, 1 - 1e-9)
    return (1 - below_one ** (gamma + 1)) / (1 - below_one)


def tokens_at(acceptance_at: Sequence[float], gamma: int) -> float:
    """Expected tokens per round from the conditional acceptance of each position: 1 + a1 + a1 a2 + ... a_gamma.

    `tokens_per_round` is the case of equal ones (Leviathan et al., Eq 1).
    """
    return 1 + sum(accumulate(acceptance_at[:gamma], mul))


def expected_tokens(kind: RoundKind, acceptance: Term, hit: Term, proposal_acceptance: Term) -> Term:
    """Expected tokens of a round of any kind, at one acceptance of its drafts by the target, a number or an array."""
    gamma, passes, depth = round_shape(kind)
    if not depth:
        return tokens_per_round(acceptance, gamma)
    if not passes:
        return pass_tokens(hit, acceptance, depth)
    return capped_cascade_tokens(acceptance, hit, proposal_acceptance, depth, passes, gamma)


def tokens_of(kind: RoundKind, acceptance_at: Sequence[float], hit: float, proposal_acceptance: float) -> float:
    """Expected tokens of a round of any kind, from the acceptance of self-drafts by position and of proposals."""
    shape = round_shape(kind)
    if not shape.depth:
        return tokens_at(acceptance_at, shape.gamma)
    if shape.proposes_to_target:
        return float(pass_tokens(hit, proposal_acceptance, shape.depth))
    chances = chances_of_drafts(hit, proposal_acceptance, shape.depth, shape.passes, shape.gamma)
    reached = accumulate(acceptance_at[: shape.gamma], mul)
    return 1 + sum(accepted * chance for accepted, chance in zip(reached, chances, strict=False))


def conditional_acceptance(share: float, gamma: int) -> float:
    """The acceptance at which a `share` of the drafted tokens is accepted, for gamma of 1 or more (QuantSpec-6).

    QuantSpec calls this share the acceptance rate. a + a^2 + ... + a^gamma = gamma x share has one positive root.
    """
    roots = np.roots([*[1.0] * gamma, -gamma * share])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-9))


def flush_capped(tokens: Term, group: Term) -> Term:
    """Tokens per round where rounds end at flush boundaries, every `group` tokens (QuantSpec-4).

    A round that would cross a boundary loses the tokens beyond it: (tokens - 1) / 2 per boundary, if rounds are alike.
    Where they differ it is a little more: 0.1 to 0.4% of the tokens, by simulation with groups of 128.
    """
    return tokens * group / (group + (tokens - 1) / 2)


def round_tokens(strategy: Strategy) -> Term:
    """Tokens per round, minus the loss at flush boundaries if the target reads codes, or loads what it chooses."""
    tokens = tokens_per_round(strategy.acceptance, strategy.gamma)
    if proposes(strategy):
        tokens = where(strategy.proposing, proposed_tokens(strategy), tokens)
    flushes = maximum(minimum(strategy.target.bits, 1), strategy.target_loads)
    return strategy.adaptation * (flushes * flush_capped(tokens, strategy.kv_group) + (1 - flushes) * tokens)


PassRatesByKind = Mapping[str, RateTerms]


def round_rates(
    shape: ModelShape, machine: Machine, strategy: Strategy, rates: StrategyRates
) -> tuple[PassRatesByKind, PassRatesByKind]:
    """Rates of the drafts' passes and of the target's, by kind of op. They do not depend on the context."""
    return draft_rates(shape, machine, strategy, rates), target_rates(shape, machine, strategy, rates)


def round_at(
    shape: ModelShape,
    machine: Machine,
    strategy: Strategy,
    rates: tuple[PassRatesByKind, PassRatesByKind],
    context: Term,
    host: HostLayers = NO_LAYERS,
) -> Round:
    """A round whose sequences hold `context` tokens before it, with layers on the `host`.

    rates: as `round_rates` makes them.
    """
    tokens, link = cached_tokens(strategy, context), HostLink(shape, machine, strategy, host)
    draft = decode_pass(shape, draft_terms(shape, machine, strategy, context))
    target = decode_pass(shape, target_terms(shape, machine, strategy, context))
    drafting_rates, verifying_rates = rates
    draft_s = machine.pass_seconds(draft, drafting_rates, shape.layers, machine.draft_gap_s)
    draft_s = draft_s - saved_by_pages(machine, draft, drafting_rates, strategy.draft.page_tokens)
    draft_s = draft_s + strategy.draft.scans_two_bit * gathered_seconds(machine, draft, drafting_rates)
    draft_s = draft_s + draft_choice_seconds(shape, machine, strategy, tokens)
    draft_s = draft_s + link.draft_seconds(tokens, _draft_tokens(strategy, tokens))
    sampling_s = sampling_seconds(shape, machine, strategy.batch)
    propose_s: Term = 0.0
    if proposes(strategy):
        propose_s = proposal_seconds(shape, machine, strategy, context, sampling_s)
        sampling_s = where(strategy.cascades, cascade_sampling_seconds(shape, machine, strategy), sampling_s)
    draft_s = draft_s + sampling_s
    target_s = machine.pass_seconds(target, verifying_rates, shape.layers, machine.target_gap_s)
    target_pages = strategy.target.page_tokens / (1 - strategy.streamed_share(tokens))
    target_s = target_s - maximum(
        saved_by_pages(machine, target, verifying_rates, target_pages),
        saved_by_size(machine, strategy, target, verifying_rates),
    )
    # Outputs of a pass's queries, each with a selection of its own, are joined in every layer.
    target_s = target_s + strategy.target.selects * shape.kv_layers * small_kernel_seconds(machine)
    choice_s = target_choice_seconds(shape, machine, strategy, tokens)
    drafting = minimum(strategy.draft_passes, 1)
    drafts_s = strategy.draft_passes * draft_s
    return Round(
        passes=strategy.draft_passes,
        draft_s=drafting * draft_s,
        verify_s=link.target_seconds(tokens, target_s, choice_s, drafts_s),
        accept_s=rejection_sampling_seconds(shape, machine, strategy),
        select_s=drafting * round_choice_seconds(machine, strategy, tokens),
        flush_s=flush_seconds(shape, machine, strategy) * round_tokens(strategy) / strategy.kv_group,
        overhead_s=machine.round_s + drafting * machine.drafted_round_s,
        propose_s=propose_s,
    )


def cached_tokens(strategy: Strategy, context: Term) -> Term:
    """Tokens in the cache: what eviction left of the prompt, and everything generated since."""
    return strategy.kept_tokens + context - strategy.context


def target_terms(shape: ModelShape, machine: Machine, strategy: Strategy, context: Term) -> PassTerms:
    """What the target's pass (a plain step, or verification of gamma + 1 queries) reads."""
    cached = cached_tokens(strategy, context)
    tokens = strategy.target_tokens(cached)
    terms = _pass_terms(shape, machine, strategy, strategy.target, strategy.queries, tokens)
    held = _window_tokens(shape, cached, strategy.queries)
    return replace(terms, reads=strategy.kv_reads, replayed=strategy.queries, held=held)


def draft_terms(shape: ModelShape, machine: Machine, strategy: Strategy, context: Term) -> PassTerms:
    """What one draft step reads. A round writes recurrent states once, which counts as part of the target's pass."""
    cached = cached_tokens(strategy, context)
    terms = _pass_terms(
        shape, machine, strategy, strategy.draft, strategy.draft_queries, _draft_tokens(strategy, cached)
    )
    replayed = maximum(strategy.queries - 2, 0) / 2
    return replace(terms, replayed=replayed, commits=0, held=_window_tokens(shape, cached, strategy.draft_queries))


def _window_tokens(shape: ModelShape, cached: Term, queries: Term) -> Term | None:
    """`PassTerms.held`: this package's cache keeps windows as it says; other engines treat all layers alike."""
    if not shape.window_tokens or shape.architecture not in executable_architectures():
        return None
    return cached + queries


def _draft_tokens(strategy: Strategy, cached: Term) -> Term:
    """Of `cached` tokens, those that a draft step reads."""
    budget = maximum(strategy.draft.ratio * cached, strategy.draft.min_tokens)
    return minimum(budget + strategy.draft.unbudgeted_tokens, cached)


def target_rates(shape: ModelShape, machine: Machine, strategy: Strategy, rates: StrategyRates) -> dict[str, RateTerms]:
    """Rates of the target's products, head and attention, by kind of op."""
    passes = _pass_rates(shape, machine, rates.target, strategy.batch, strategy.queries, strategy.target)
    return passes | _window_rates(shape, machine, strategy, strategy.queries, passes["attention"])


def draft_rates(shape: ModelShape, machine: Machine, strategy: Strategy, rates: StrategyRates) -> dict[str, RateTerms]:
    """Rates of the drafts' products, head and attention, by kind of op."""
    passes = _pass_rates(shape, machine, rates.draft, strategy.batch, strategy.draft_queries, strategy.draft)
    return passes | _window_rates(shape, machine, strategy, strategy.draft_queries, passes["attention"])


def _window_rates(
    shape: ModelShape, machine: Machine, strategy: Strategy, queries: Term, attention: RateTerms
) -> dict[str, RateTerms]:
    """Rates of layers with a sliding window: of full precision where it hides tokens, whatever other layers read."""
    final = final_tokens(shape, strategy)
    if final is None or not shape.window_tokens:
        return {}
    full = machine.rates[attention_kind(0, shape.head_dim)].at_rows(queries * shape.q_heads / shape.cached_rows)
    return {WINDOWED_ATTENTION: select_rates(hides(shape.window_tokens, final), full, attention)}


def _pass_rates(
    shape: ModelShape, machine: Machine, formats: PassRates, batch: Term, queries: Term, part: PassStrategy
) -> dict[str, RateTerms]:
    rows = batch * queries
    beyond = where(part.dense, library_rows(rows), rows)
    query_rows = queries * shape.q_heads / shape.cached_rows
    attention_rates, latent_rates = (
        rates.at_rows(query_rows) for rates in (formats.attention, machine.rates["attention_mla"])
    )
    if shape.is_mla:
        slower = slower_rates(latent_rates, attention_rates)
        coded = replace(slower, compute_utilization=slower.compute_utilization / DECODED_LATENTS)
        latent_rates = select_rates(minimum(part.bits, 1), coded, latent_rates)
    by_row = {kind: machine.rates[kind].at_rows(rows) for kind in ("elementwise", "state", "rope", "gap")}
    return by_row | {
        "linear": machine.gemm_rates(rows, part.dense, formats.linear),
        MANY_CHANNELS: machine.gemm_rates(beyond, part.dense, formats.linear),
        "grouped_linear": formats.experts.at_rows(rows),
        "head": machine.gemm_rates(rows, part.head_dense, formats.head),
        integer_kind("linear"): formats.integers.at_rows(rows),
        integer_kind("head"): formats.head_integers.at_rows(rows),
        "attention": attention_rates,
        "attention_mla": latent_rates,
    }


def prefill_rates(
    shape: ModelShape, machine: Machine, strategy: Strategy, target_linear: RateTerms | None = None
) -> dict[str, RateTerms]:
    """Rates of operations over many rows; the head has one row.

    target_linear: rates of the target's products in decode passes. A CPU multiplies by codes in prompts as well, at
    these rates; a GPU multiplies by dense copies, except in routed experts. Without it, all weights are dense.
    """
    linear = machine.rates["prefill_linear"]
    if target_linear is not None:
        dense = maximum(machine.asynchronous, strategy.target.dense)
        linear = select_rates(dense, linear, slower_rates(linear, target_linear.at_rows(PREFILL_CHUNK_TOKENS)))
    rates = {"linear": linear, "grouped_linear": linear}
    attention, chunks = machine.rates[prefill_attention_kind(shape.head_dim)], strategy.prompt_chunks
    first_chunk: Term = 1  # times as long as cuDNN takes; all others see earlier tokens
    if machine.engine is None:
        rows, target = prompt_expert_rows(shape, strategy, machine.asynchronous), strategy.target
        grouped = target.grouped_experts * indicator(target.grouped_rows, rows)
        share = where(grouped, rows / (rows + target.expert_extra_rows), target.experts_share)
        share = where(machine.asynchronous, share, 1)
        experts = replace(linear, compute_utilization=linear.compute_utilization * share)
        rates["grouped_linear"] = _at_least(PROMPT_EXPERTS_SPREAD, experts)
        attention = _at_least(UNTIMED_PROMPT_SPREAD, attention) if shape.is_mla else attention
        first_chunk = short_attention_factor(chunks.tokens, machine.asynchronous)
    all_chunks = first_chunk + (chunks.count - 1) / HELD_ATTENTION_SHARE
    rates["prefill_attention"] = _slowed(attention, all_chunks / chunks.count)
    rates[SINKS_IN_FLASH] = _slowed(attention, 1 / HELD_ATTENTION_SHARE)
    rates |= {kind: machine.rates[kind].at_rows(PREFILL_CHUNK_TOKENS) for kind in ("elementwise", "rope")}
    return rates | rates_as_executed(rates["elementwise"], attention, machine.asynchronous)


def _at_least(spread: float, rates: RateTerms) -> RateTerms:
    return replace(rates, spread=maximum(rates.spread, spread))


def _slowed(rates: RateTerms, factor: Term) -> RateTerms:
    """Rates at which arithmetic takes `factor` times as long."""
    return replace(rates, compute_utilization=rates.compute_utilization / factor)


def sampling_seconds(shape: ModelShape, machine: Machine, rows: Term) -> Term:
    """Drawing a token for each of `rows` rows of logits, at a temperature; greedy is faster."""
    sizes = rows, shape.vocab, machine.element_bytes
    return machine.seconds(ops.filter_logits(*sizes) + ops.draw(*sizes), machine.rates["sampling"], rows, depth=1)


def cascade_sampling_seconds(shape: ModelShape, machine: Machine, strategy: Strategy) -> Term:
    """Acceptance of proposals in a pass of the self-draft, and a copy of its logits, which the target's needs later."""
    accept_s = rejection_sampling_seconds(shape, machine, replace(strategy, gamma=strategy.proposals))
    logits = strategy.batch * strategy.draft_queries * shape.vocab
    copy = ops.copy(logits, machine.element_bytes) + ops.filter_logits(logits, 1, machine.element_bytes)
    return accept_s + machine.seconds(copy, machine.rates["elementwise"])


def rejection_sampling_seconds(shape: ModelShape, machine: Machine, strategy: Strategy) -> Term:
    """Filtering of all queries' logits, then one token per sequence, drawn from the residual distribution."""
    rows = strategy.batch * strategy.queries
    filtered = ops.filter_logits(rows, shape.vocab, machine.element_bytes)
    distributions = 1 + minimum(strategy.gamma, 1)  # the residual needs the draft's beside the target's
    drawn = ops.draw(strategy.batch, shape.vocab, machine.element_bytes, distributions)
    rates = machine.rates["sampling"].at_rows(strategy.queries)
    return machine.seconds(filtered + drawn, rates, rows, depth=strategy.queries)


def quantize_cost(shape: ModelShape, machine: Machine, strategy: Strategy, batch: Term, tokens: Term) -> Cost:
    """Quantization of `tokens` tokens of one layer into the planes that the strategy stores."""
    group, planes = strategy.kv_group, strategy.code_planes
    heads, width, values = shape.coded_sizes
    return ops.quantize(batch, heads, width, tokens, machine.element_bytes, group, planes, values)


def flush_seconds(shape: ModelShape, machine: Machine, strategy: Strategy) -> Term:
    """A flush: one group of tokens of every sequence and layer is quantized in one launch; 0 without codes.

    Where only codes are stored, the buffer's remaining tokens then move up by a group.
    """
    rows, group = coded_layers(shape, strategy) * strategy.batch, strategy.kv_group
    quantize_s = machine.seconds(quantize_cost(shape, machine, strategy, rows, group), machine.rates["quantize"])
    kept = group + strategy.queries
    heads, width, values = shape.coded_sizes
    shift = ops.shift_slots(rows, heads, width, kept, machine.element_bytes, values)
    shift_s = (1 - strategy.stores_full_kv) * machine.seconds(shift, machine.rates["elementwise"])
    return minimum(strategy.code_planes, 1) * (quantize_s + shift_s)


def _pass_terms(
    shape: ModelShape, machine: Machine, strategy: Strategy, part: PassStrategy, queries: Term, tokens: Term
) -> PassTerms:
    codes = minimum(part.bits, 1) * mean_quantized_tokens(tokens, strategy.kv_group)
    return PassTerms(
        batch=strategy.batch,
        queries=queries,
        quantized_tokens=codes,
        full_tokens=tokens - codes + queries,
        bits=part.bits,
        group=strategy.kv_group,
        splits=mean_splits(strategy.batch, shape.kv_heads, strategy.kept_tokens, machine.num_sms),
        weight_bytes=part.weight_bytes,
        head_bytes=part.head_bytes,
        element_bytes=machine.element_bytes,
        fused_swiglu=indicator(strategy.batch * queries, machine.fused_swiglu_rows),
    )
