"""Latency and memory of a strategy: of one plan, of arrays of plans at once, or as a symbolic expression."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Cost, Term, maximum, minimum
from ridgeplan.roofline.eviction import PromptChunks, appended_tokens, eviction_ops
from ridgeplan.roofline.execution import PREFILL_CHUNK_TOKENS
from ridgeplan.roofline.host_link import prompt_to_host_seconds
from ridgeplan.roofline.latency import Machine, RateTerms, StrategyRates
from ridgeplan.roofline.memory import MemoryBreakdown, layer_parameters
from ridgeplan.roofline.passes import Op, decode_pass, prefill_pass
from ridgeplan.roofline.placement import offload_layers, swapped_bytes
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
# quadrature on [0, 1]: exact for polynomials up to cubic, and costs are piecewise linear in the context.
GENERATION_NODES = (0.5 - 0.5 / 3**0.5, 0.5 + 0.5 / 3**0.5)


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
    """Latency, tokens per round and memory of `strategy` for `shape` on `machine` at `rates`."""
    offloading = offload_layers(shape, machine, strategy)
    passes = round_rates(shape, machine, strategy, rates)
    early, late = (
        round_at(shape, machine, strategy, passes, strategy.context + node * strategy.new_tokens, offloading.host)
        for node in GENERATION_NODES
    )
    prefill_s = prefill_seconds(shape, machine, strategy, rates.target.linear)
    return Estimate(
        ttft_s=prefill_s + prompt_to_host_seconds(machine, strategy, offloading.host),
        round=_mean(early, late),
        tokens_per_round=round_tokens(strategy),
        memory=offloading.memory,
        offloaded_layers=offloading.host.layers,
        host_bytes=offloading.host_bytes,
    )


def at_acceptance(estimate: Estimate, strategy: Strategy) -> Estimate:
    """The estimate at the acceptance of `strategy`, which otherwise is the one that was evaluated.

    Only the tokens of a round depend on it, and with them a round's share of a flush.
    """
    tokens = round_tokens(strategy)
    flush_s = estimate.round.flush_s * tokens / estimate.tokens_per_round
    return replace(estimate, round=replace(estimate.round, flush_s=flush_s), tokens_per_round=tokens)


def prefill_seconds(shape: ModelShape, machine: Machine, strategy: Strategy, own: RateTerms | None = None) -> Term:
    """Time to the first token: all prompts one after another, including the quantization of their KV.

    own: as for `prefill_rates`.
    Draft weights that prompts overwrote are copied back from the host once, after the last prompt.
    """
    ops = prefill_ops(shape, machine, strategy)
    rates = prefill_rates(shape, machine, strategy, own)
    one_s = machine.prefill_seconds(ops, rates, shape.layers * prefill_chunks(strategy))
    cost = quantize_cost(shape, machine, strategy, 1, strategy.kept_tokens)
    quantize_s = minimum(strategy.code_planes, 1) * shape.layers * machine.seconds(cost, machine.rates["quantize"])
    swap_in_s = swapped_bytes(shape, machine, strategy) / machine.host_link_bytes_per_s
    return strategy.batch * (one_s + quantize_s + sampling_seconds(shape, machine, 1)) + swap_in_s


def prefill_chunks(strategy: Strategy) -> Term:
    """Pieces of a prompt, in each of which every layer is launched; what an eviction appends is one more each time."""
    chunks = PromptChunks.of(strategy)
    own = chunks.count * maximum(chunks.tokens / PREFILL_CHUNK_TOKENS, 1)
    return own + chunks.evicting * minimum(appended_tokens(strategy), 1)


def prefill_ops(shape: ModelShape, machine: Machine, strategy: Strategy) -> tuple[Op, ...]:
    """One prompt's prefill. On a GPU, quantized weights become dense copies, slab by slab, in every chunk."""
    copied = machine.asynchronous * (1 - strategy.target.dense) * prefill_chunks(strategy)
    matrices, weights = layer_parameters(shape), (strategy.target.weight_bytes, strategy.target.head_bytes)
    copy = Cost(read_bytes=matrices * strategy.target.weight_bytes, write_bytes=matrices * machine.element_bytes)
    chunks = PromptChunks.of(strategy)
    of_chunk = prefill_pass(shape, 1, chunks.tokens, machine.element_bytes, *weights, held=chunks.held)
    return (
        *(op if op.kind == "head" else replace(op, launches=op.launches * chunks.count) for op in of_chunk),
        Op("dense copies", "elementwise", copy, copied),
        *eviction_ops(shape, strategy, machine.element_bytes),
    )


def pass_ops(shape: ModelShape, machine: Machine, strategy: Strategy) -> dict[str, tuple[Op, ...]]:
    """The operations of one prompt's prefill, of a draft step and of a target step halfway through generation."""
    middle = strategy.context + strategy.new_tokens / 2
    return {
        "prefill": prefill_ops(shape, machine, strategy),
        "draft": decode_pass(shape, draft_terms(shape, machine, strategy, middle)),
        "target": decode_pass(shape, target_terms(shape, machine, strategy, middle)),
    }


def _mean(early: Round, late: Round) -> Round:
    return Round(
        gamma=early.gamma,
        draft_s=(early.draft_s + late.draft_s) / 2,
        verify_s=(early.verify_s + late.verify_s) / 2,
        accept_s=(early.accept_s + late.accept_s) / 2,
        select_s=(early.select_s + late.select_s) / 2,
        flush_s=(early.flush_s + late.flush_s) / 2,
        overhead_s=early.overhead_s,
    )
