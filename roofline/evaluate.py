"""Latency and memory of a strategy: of one plan, of arrays of plans at once, or as a symbolic expression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Cost, Term, is_symbolic, maximum, minimum, where
from ridgeplan.roofline.drafters import proposes
from ridgeplan.roofline.engine import (
    HOST_S,
    SAMPLED_KINDS,
    EngineRates,
    eagle3_draft_seconds,
    launch_seconds,
    of_sequences,
    repeated,
)
from ridgeplan.roofline.execution import KV_CODE_LAUNCHES, LAYER_LAUNCHES, WEIGHT_COPY_LAUNCHES, prefill_chunk_tokens
from ridgeplan.roofline.host_link import HostLink
from ridgeplan.roofline.latency import Machine, RateTerms, StrategyRates
from ridgeplan.roofline.memory import MemoryBreakdown, coded_layers, layer_parameters, offload_layers, swapped_bytes
from ridgeplan.roofline.passes import Op, decode_pass, prefill_pass
from ridgeplan.roofline.round import (
    Round,
    draft_terms,
    prefill_rates,
    quantize_cost,
    round_at,
    round_rates,
    round_tokens,
    sampling_seconds,
    target_terms,
)
from ridgeplan.roofline.strategy import Strategy
from ridgeplan.roofline.torch_prompts import as_executed

# The context grows while tokens are generated, so costs are averaged over the generation by two-point Gauss-Legendre
# quadrature on [0, 1]: exact for polynomials up to cubic, and costs are piecewise linear in the context. Where layers
# leave one by one, what comes before the first is such a piece, and the staircase that follows is averaged over its
# middles.
GENERATION_NODES = (0.5 - 0.5 / 3**0.5, 0.5 + 0.5 / 3**0.5)
STAIRCASE_NODES = tuple((index + 0.5) / 8 for index in range(8))

TimedOp = tuple[Op, Term]  # with the seconds of all its launches


@dataclass(frozen=True)
class Estimate:
    """Latency and memory of a strategy, averaged over the generation. Seconds and bytes.

    ttft_s: of a batch's last prompt. request_ttft_s: of a request whose prompt is processed at once.
    """

    ttft_s: Term
    request_ttft_s: Term
    round: Round
    tokens_per_round: Term
    memory: MemoryBreakdown
    offloaded_layers: Term
    host_bytes: Term  # of offloaded layers

    @property
    def tpot_s(self) -> Term:
        """Time per output token of a sequence."""
        return self.round.total_s / self.tokens_per_round


def evaluate(shape: ModelShape, machine: Machine, strategy: Strategy, rates: StrategyRates) -> Estimate:
    """Latency, tokens per round and memory of `strategy` for `shape` on `machine` at `rates`.

    An engine's rounds are those halfway through the generation, at its own rates.
    """
    offloading = offload_layers(shape, machine, strategy)
    if machine.engine is not None:
        batched, single = strategy, replace(strategy, batch=1)
        ttft_s, request_s = (engine_prefill_seconds(shape, machine, machine.engine, each) for each in (batched, single))
        tokens = round_tokens(strategy) if proposes(strategy) else 1.0
        return Estimate(
            ttft_s, request_s, engine_round(shape, machine, machine.engine, strategy), tokens, offloading.memory, 0, 0.0
        )
    prefill_s = prefill_seconds(shape, machine, strategy, rates.target.linear)
    passes = round_rates(shape, machine, strategy, rates)

    def rounds(first: Term, last: Term, nodes: Sequence[float]) -> Round:
        contexts = [first + node * (last - first) for node in nodes]
        return _mean([
            round_at(shape, machine, strategy, passes, context, offloading.host_at(context)) for context in contexts
        ])  # fmt: skip

    start, end = strategy.context, strategy.context + strategy.new_tokens
    leaves = minimum(strategy.offload.adaptive * offloading.host.layers, 1)
    if is_symbolic(leaves) or np.any(leaves):
        first_leaves = minimum(maximum(offloading.departures.threshold(0), start), end)
        middle = where(leaves, first_leaves, end)
        share = (middle - start) / (end - start)
        resident, leaving = rounds(start, middle, GENERATION_NODES), rounds(middle, end, STAIRCASE_NODES)
        link = HostLink(shape, machine, strategy, offloading.host)
        moved_s = leaves * link.departure_seconds(offloading.departures) / strategy.new_tokens
        mean = _combined(resident, leaving, share)
        mean = replace(mean, flush_s=mean.flush_s + moved_s * round_tokens(strategy))
    else:
        mean = rounds(start, end, GENERATION_NODES)
    ttft_s = prefill_s + HostLink(shape, machine, strategy, offloading.host_at(start)).prompt_seconds()
    return Estimate(
        ttft_s=ttft_s,
        request_ttft_s=ttft_s / strategy.batch,
        round=mean,
        tokens_per_round=round_tokens(strategy),
        memory=offloading.memory,
        offloaded_layers=offloading.host.layers,
        host_bytes=offloading.host_bytes,
    )


def engine_round(shape: ModelShape, machine: Machine, engine: EngineRates, strategy: Strategy) -> Round:
    """A round of an engine, halfway through the generation: a plain step, or a pass that verifies proposals.

    A lookup is not priced, which engines do on the host. A head is priced as `eagle3_draft_seconds`, a block
    drafter like one step of it.
    """
    context = strategy.context + strategy.new_tokens / 2
    step = engine.step_of(strategy, context)
    plain_s = engine.step_s(shape, machine, step)
    if not proposes(strategy):
        return Round(0, 0.0, plain_s, 0.0, 0.0, 0.0)
    verify_s = engine.step_s(shape, machine, replace(step, queries=1 + strategy.proposals))
    steps = where(strategy.proposes_block, 1, strategy.proposals)
    step_verify_s = engine.step_s(shape, machine, replace(step, queries=1 + steps))
    head_s = plain_s + steps * eagle3_draft_seconds(strategy.batch, context) - step_verify_s
    propose_s = strategy.proposing * strategy.uses_head * maximum(head_s, 0)
    return Round(0, 0.0, verify_s, 0.0, 0.0, 0.0, propose_s=propose_s)


def engine_prompts(shape: ModelShape, machine: Machine, engine: EngineRates, strategy: Strategy) -> list[TimedOp]:
    """Every operation of a batch's prompts in an engine, on one stage of a pipeline, with its seconds.

    Prompts fill passes of the engine's largest size, and what remains has a pass of its own. The sum is what the
    simulation of traffic takes for the same prompts (planner/traffic/step_times.py). A prompt of 32k tokens took vLLM
    0.24 9% longer for Llama-3.1-8B in bf16 and 5% in fp8, 15% for Qwen3-30B-A3B and 9% for gpt-oss-20b.
    """
    prompts, tokens, budget = strategy.batch, strategy.context, engine.reserve.batched_tokens
    step = engine.step_of(strategy, 1)

    def of_rows(rows: Term) -> Iterator[TimedOp]:
        sampled = {op.name: (op, seconds) for op, seconds in engine.stage_timed(
            shape, machine, replace(step, batch=maximum(rows / tokens, 1))) if op.kind in SAMPLED_KINDS}  # fmt: skip
        for op, seconds in engine.stage_timed(shape, machine, replace(step, batch=rows)):
            if not of_sequences(op):
                yield sampled.get(op.name, (op, seconds))

    products = _in_passes(prompts * tokens, budget, lambda rows, _: of_rows(rows))
    attention = _in_passes(tokens, budget, lambda size, held: chunk_attention(shape, machine, strategy, size, held))
    return [*products, *(repeated(timed, prompts) for timed in attention)]


def chunk_attention(
    shape: ModelShape, machine: Machine, strategy: Strategy, tokens: Term, held: Term
) -> Iterator[TimedOp]:
    """What a chunk of a prompt takes in an engine for attention, and for recurrent states, after `held` tokens.

    At the rates of this package's runtime, which calls the same libraries.
    """
    rates = prefill_rates(shape, machine, strategy.with_terms(target_dense=1, code_planes=0))
    for op in prefill_pass(shape, 1, tokens, machine.element_bytes, held=held):
        if of_sequences(op):
            yield op, machine.op_seconds(op, rates)


def _in_passes(tokens: Term, most: int, timed: Callable[[Term, Term], Iterable[TimedOp]]) -> Iterator[TimedOp]:
    """Operations of as many passes of `most` tokens as there are, and of one with the rest.

    timed: of a pass with some tokens, after those that earlier passes processed: the mean of them.
    """
    full = np.floor(np.asarray(tokens) / most)
    rest = tokens - full * most
    for first, last in zip(timed(most, (full - 1) / 2 * most), timed(maximum(rest, 1), full * most), strict=True):
        (op, seconds), (other, other_s) = repeated(first, full), repeated(last, minimum(rest, 1))
        launches = op.launches + other.launches
        cost = (op.total + other.total) * (1 / maximum(launches, 1))
        yield replace(op, cost=cost, launches=launches), seconds + other_s


def engine_prefill_seconds(shape: ModelShape, machine: Machine, engine: EngineRates, strategy: Strategy) -> Term:
    """Time to the last first token of a batch's prompts in an engine, which pass every stage of a pipeline.

    Stages work on chunks of the engine's largest pass at a time (GPipe, section 2.3: (chunks + stages - 1) / chunks).
    The host launches each pass layer by layer, which bounds short prompts, and then the first step that decodes, before
    it reads the token.
    """
    stage_s = sum(seconds for _, seconds in engine_prompts(shape, machine, engine, strategy))
    chunks = maximum(strategy.batch * strategy.context / engine.reserve.batched_tokens, 1)
    device_s = stage_s * (chunks + shape.parallel.pipeline - 1) / chunks
    return HOST_S + maximum(device_s, np.ceil(np.asarray(chunks)) * launch_seconds(shape))


def at_acceptance(estimate: Estimate, strategy: Strategy) -> Estimate:
    """The estimate at the acceptance of `strategy`, which otherwise is the one that was evaluated.

    Only the tokens of a round depend on it, and with them a round's share of a flush.
    """
    tokens = round_tokens(strategy)
    flush_s = estimate.round.flush_s * tokens / estimate.tokens_per_round
    return replace(estimate, round=replace(estimate.round, flush_s=flush_s), tokens_per_round=tokens)


def prefill_seconds(
    shape: ModelShape, machine: Machine, strategy: Strategy, target_linear: RateTerms | None = None
) -> Term:
    """Time to the first token: all prompts one after another, including the quantization of their KV.

    Short prompts take the host's time, every launch of which takes as long as those of a dense layer do on average.
    target_linear: as for `prefill_rates`. Draft weights that prompts overwrote are copied back from the host once,
    after the last prompt.
    """
    rates = prefill_rates(shape, machine, strategy, target_linear)
    copies, codes = WEIGHT_COPY_LAUNCHES * (1 - strategy.target.dense), minimum(strategy.code_planes, 1)
    more = machine.asynchronous * (copies + KV_CODE_LAUNCHES * codes) / LAYER_LAUNCHES
    layer_launches = shape.layers * prefill_launches(machine, strategy) * (1 + more)
    prompt_s = machine.prefill_seconds(prefill_ops(shape, machine, strategy), rates, layer_launches)
    cost = quantize_cost(shape, machine, strategy, 1, strategy.kept_tokens)
    quantize_s = codes * coded_layers(shape, strategy) * machine.seconds(cost, machine.rates["quantize"])
    swap_in_s = swapped_bytes(shape, machine, strategy) / machine.host_link_bytes_per_s
    return strategy.batch * (prompt_s + quantize_s + sampling_seconds(shape, machine, 1)) + swap_in_s


def prefill_launches(machine: Machine, strategy: Strategy) -> Term:
    """How often a prompt launches every layer: once a piece, and once for the tokens that each eviction appends."""
    chunks = strategy.prompt_chunks
    return chunks.count * _pieces(machine, strategy) + chunks.evicting * minimum(strategy.appended_tokens, 1)


def _pieces(machine: Machine, strategy: Strategy) -> Term:
    """In how many pieces the tokens of a chunk are projected."""
    most = prefill_chunk_tokens(machine.asynchronous, strategy.target.grouped_experts)
    return maximum(strategy.prompt_chunks.tokens / most, 1)


def prefill_ops(shape: ModelShape, machine: Machine, strategy: Strategy) -> tuple[Op, ...]:
    """The operations of one prompt.

    On a GPU, quantized weights become dense copies, slab by slab, in every piece of tokens that are projected together;
    but routed experts are read as they are, once a piece. Copies of these are in the rates of grouped products.
    """
    copies = machine.asynchronous * (1 - strategy.target.dense) * prefill_launches(machine, strategy)
    weights = strategy.target.weight_bytes, strategy.target.head_bytes
    matrices = shape.quantized_mixer_params + shape.dense_params
    copy = Cost(read_bytes=matrices * strategy.target.weight_bytes, write_bytes=matrices * machine.element_bytes)
    chunks = strategy.prompt_chunks
    chunk_ops = prefill_pass(shape, 1, chunks.tokens, machine.element_bytes, *weights, held=chunks.held)
    if shape.is_moe:
        pieces = _pieces(machine, strategy)
        piece_ops = prefill_pass(shape, 1, chunks.tokens / pieces, machine.element_bytes, *weights)
        chunk_ops = tuple(
            replace(piece, launches=piece.launches * pieces) if piece.kind == "grouped_linear" else op
            for op, piece in zip(chunk_ops, piece_ops, strict=True)
        )
    sizes = chunks.tokens, chunks.held, machine.element_bytes
    chunk_ops = as_executed(shape, chunk_ops, *sizes, machine.asynchronous)
    return (
        *(op if op.kind == "head" else replace(op, launches=op.launches * chunks.count) for op in chunk_ops),
        Op("dense copies", "elementwise", copy, copies),
        *eviction_ops(shape, strategy, machine.element_bytes),
    )


def eviction_ops(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> tuple[Op, ...]:
    """What an eviction adds to one prompt's prefill: no launches where nothing is evicted."""
    appended, chunks = strategy.appended_tokens, strategy.prompt_chunks
    evictions = chunks.evicting * strategy.evicts
    passes = evictions * minimum(appended, 1)
    matrices = layer_parameters(shape) / shape.layers
    widths = shape.hidden, shape.q_width + 2 * shape.intermediate
    products = ops.matmul(appended, *widths, matrices, strategy.target.weight_bytes, element_bytes)
    seen = ops.KVRead(0, chunks.candidates + appended, 0, element_bytes, strategy.kv_group, 1)
    attention = ops.attention(1, appended, shape.q_heads, shape.kv_heads, shape.head_dim, seen)
    pairs = shape.q_heads / shape.kv_heads * strategy.scored_pairs
    token_elements = shape.kv_elements_per_token_per_layer
    scores = ops.eviction_scores(pairs, shape.head_dim, chunks.candidates, element_bytes)
    softmax = ops.eviction_softmax(pairs, chunks.candidates, element_bytes)
    # Tokens that stay are gathered and then stored; those of earlier chunks are copied ahead of each later chunk.
    stored = ops.copy(2 * strategy.kept_tokens * token_elements, element_bytes)
    held = ops.copy(chunks.held * chunks.count / maximum(chunks.count - 1, 1) * token_elements, element_bytes)
    heads = shape.kv_layers * shape.kv_heads * evictions
    return (
        Op("appended tokens", "linear", products, shape.layers * passes),
        Op("appended attention", "prefill_attention", attention, shape.kv_layers * passes),
        Op("eviction scores", "linear", scores, heads * minimum(strategy.scored_pairs, 1)),
        Op("eviction softmax", "elementwise", softmax, heads),
        Op("eviction copy", "elementwise", stored, shape.kv_layers * evictions),
        Op("held tokens", "elementwise", held, shape.kv_layers * (chunks.count - 1)),
    )


def pass_ops(shape: ModelShape, machine: Machine, strategy: Strategy) -> dict[str, tuple[Op, ...]]:
    """The operations of one prompt's prefill, of a draft step and of a target step halfway through generation."""
    middle = strategy.context + strategy.new_tokens / 2
    return {
        "prefill": prefill_ops(shape, machine, strategy),
        "draft": decode_pass(shape, draft_terms(shape, machine, strategy, middle)),
        "target": decode_pass(shape, target_terms(shape, machine, strategy, middle)),
    }


def _mean(rounds: Sequence[Round]) -> Round:
    return _by_part(rounds[0], lambda part: sum(getattr(each, part) for each in rounds) / len(rounds))


def _combined(first: Round, second: Round, share: Term) -> Round:
    """The mean over a generation of which `share` of the tokens has the rounds of `first`."""
    return _by_part(first, lambda part: share * getattr(first, part) + (1 - share) * getattr(second, part))


def _by_part(like: Round, value: Callable[[str], Term]) -> Round:
    parts = [item.name for item in fields(Round) if item.name not in ("passes", "overhead_s")]
    return replace(like, **{part: value(part) for part in parts})
