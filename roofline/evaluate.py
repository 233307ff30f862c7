"""Latency and memory of a strategy: of one plan, of arrays of plans at once, or as a symbolic expression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.collectives import pass_messages
from ridgeplan.roofline.cost import Cost, Term, is_symbolic, maximum, minimum, where
from ridgeplan.roofline.engine import BF16_BYTES, EngineRates, divided_expert_compute
from ridgeplan.roofline.execution import PREFILL_CHUNK_TOKENS
from ridgeplan.roofline.host_link import HostLink
from ridgeplan.roofline.latency import Machine, RateTerms, StrategyRates
from ridgeplan.roofline.memory import MemoryBreakdown, layer_parameters, offload_layers, swapped_bytes
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

# The context grows while tokens are generated, so costs are averaged over the generation by two-point Gauss-Legendre
# quadrature on [0, 1]: exact for polynomials up to cubic, and costs are piecewise linear in the context. Where layers
# leave one by one, what comes before the first is such a piece, and the staircase that follows is averaged over its
# middles.
GENERATION_NODES = (0.5 - 0.5 / 3**0.5, 0.5 + 0.5 / 3**0.5)
STAIRCASE_NODES = tuple((index + 0.5) / 8 for index in range(8))


@dataclass(frozen=True)
class Estimate:
    """Latency and memory of a strategy, averaged over the generation. Seconds and bytes."""

    ttft_s: Term
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

    An engine's decode steps are those of plain decoding halfway through the generation, at its own rates.
    """
    offloading = offload_layers(shape, machine, strategy)
    if machine.engine is not None:
        prefill_s = _engine_prefill_seconds(shape, machine, machine.engine, strategy)
        step = machine.engine.step_of(strategy, strategy.context + strategy.new_tokens / 2)
        step_s = machine.engine.step_s(shape, machine, step)
        return Estimate(prefill_s, Round(0, 0.0, step_s, 0.0, 0.0, 0.0), 1.0, offloading.memory, 0, 0.0)
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
    return Estimate(
        ttft_s=prefill_s + HostLink(shape, machine, strategy, offloading.host_at(start)).prompt_seconds(),
        round=mean,
        tokens_per_round=round_tokens(strategy),
        memory=offloading.memory,
        offloaded_layers=offloading.host.layers,
        host_bytes=offloading.host_bytes,
    )


def _engine_prefill_seconds(shape: ModelShape, machine: Machine, engine: EngineRates, strategy: Strategy) -> Term:
    """Time to the first token in an engine: prompts in 16 bits, but for the products of 8-bit weights.

    At the rates of this package's runtime, which calls the same libraries: a prompt of 32k tokens took vLLM 0.24 10%
    longer for Llama-3.1-8B in bf16 and 8% in fp8, 16% for Qwen3-30B-A3B and 10% for gpt-oss-20b. Engines put several
    short prompts in a pass, which share its launches.
    """
    together = minimum(strategy.batch, maximum(engine.reserve.batched_tokens / strategy.context, 1))
    linear = machine.rates["prefill_linear"]
    speedup = where(strategy.target.dense, 1.0, engine.coded_speedup)
    faster = replace(linear, compute_utilization=linear.compute_utilization * speedup)
    plain = strategy.with_terms(target_dense=1, code_planes=0)
    rates = {**machine.rates, "prefill_linear": faster}
    if shape.is_moe and shape.parallel.gpus > 1:
        rates["grouped_linear"] = replace(rates["grouped_linear"], compute_utilization=divided_expert_compute(shape))
    batched = replace(
        machine,
        rates=rates,
        pass_dispatch_s=machine.pass_dispatch_s / together,
        prefill_layer_dispatch_s=machine.prefill_layer_dispatch_s / together,
    )
    return _pipelined(shape, engine, plain, prefill_seconds(shape, batched, plain))


def _pipelined(shape: ModelShape, engine: EngineRates, strategy: Strategy, stage_s: Term) -> Term:
    """Prompts on several GPUs, of which a stage's work takes `stage_s`: with its messages, and until the last stage.

    Stages work on chunks of the engine's largest pass at a time (GPipe, section 2.3: (chunks + stages - 1) / chunks).
    """
    if shape.parallel.gpus == 1:
        return stage_s
    prompts, tokens = strategy.batch, strategy.context
    chunks = maximum(prompts * tokens / engine.reserve.batched_tokens, 1)
    messages = pass_messages(shape, prompts * tokens / chunks, prompts / chunks, BF16_BYTES)
    stage_s = stage_s + chunks * sum(engine.message_seconds(op) for op in messages)
    return stage_s * (chunks + shape.parallel.pipeline - 1) / chunks


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

    target_linear: as for `prefill_rates`. Draft weights that prompts overwrote are copied back from the host once,
    after the last prompt.
    """
    rates = prefill_rates(shape, machine, strategy, target_linear)
    layer_launches = shape.layers * prefill_launches(strategy)
    prompt_s = machine.prefill_seconds(prefill_ops(shape, machine, strategy), rates, layer_launches)
    cost = quantize_cost(shape, machine, strategy, 1, strategy.kept_tokens)
    quantize_s = minimum(strategy.code_planes, 1) * shape.kv_layers * machine.seconds(cost, machine.rates["quantize"])
    swap_in_s = swapped_bytes(shape, machine, strategy) / machine.host_link_bytes_per_s
    return strategy.batch * (prompt_s + quantize_s + sampling_seconds(shape, machine, 1)) + swap_in_s


def prefill_launches(strategy: Strategy) -> Term:
    """How often a prompt launches every layer: once a piece, and once for the tokens that each eviction appends."""
    chunks = strategy.prompt_chunks
    pieces = chunks.count * maximum(chunks.tokens / PREFILL_CHUNK_TOKENS, 1)
    return pieces + chunks.evicting * minimum(strategy.appended_tokens, 1)


def prefill_ops(shape: ModelShape, machine: Machine, strategy: Strategy) -> tuple[Op, ...]:
    """The operations of one prompt. On a GPU, quantized weights become dense copies, slab by slab, in every chunk."""
    copies = machine.asynchronous * (1 - strategy.target.dense) * prefill_launches(strategy)
    matrices, weights = layer_parameters(shape), (strategy.target.weight_bytes, strategy.target.head_bytes)
    copy = Cost(read_bytes=matrices * strategy.target.weight_bytes, write_bytes=matrices * machine.element_bytes)
    chunks = strategy.prompt_chunks
    chunk_ops = prefill_pass(shape, 1, chunks.tokens, machine.element_bytes, *weights, held=chunks.held)
    return (
        *(op if op.kind == "head" else replace(op, launches=op.launches * chunks.count) for op in chunk_ops),
        Op("dense copies", "elementwise", copy, copies),
        *eviction_ops(shape, strategy, machine.element_bytes),
    )


def eviction_ops(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> tuple[Op, ...]:
    """What an eviction adds to one prompt's prefill: no launches where nothing is evicted."""
    appended, chunks = strategy.appended_tokens, strategy.prompt_chunks
    evictions = chunks.evicting * strategy.evicts
    passes = shape.layers * evictions * minimum(appended, 1)
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
        Op("appended tokens", "linear", products, passes),
        Op("appended attention", "prefill_attention", attention, passes),
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
