"""Decode steps and memory of a serving engine, such as vLLM, at rates that are fitted to measured steps.

step = launches x launch_s + MoE layers x expert_launch_s (packed_expert_launch_s with 4 bits) + sum over operations of
max(bytes / (bandwidth x u), FLOPs / (peak x v))

The bytes, FLOPs and launches are those of `ridgeplan.roofline.passes`. u is fitted for the weights of linear layers and
of experts by their bits, and for the KV cache by its kind; v is the share of the peak that libraries' kernels reach.

Engines replay CUDA graphs that were captured at a few batches: rows are padded to the next of these (`padded_rows`).
FlashAttention-3 splits sequences into tiles for the SMs, and may leave a last wave that few SMs work on
(`wave_factor`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ridgeplan.roofline.catalog.layers import State
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.collectives import COLLECTIVES, GATHER_LOGITS, Network, pass_messages
from ridgeplan.roofline.cost import Term, indicator, maximum, minimum, where
from ridgeplan.roofline.memory import MemoryBreakdown, head_memory, index_memory, stored_elements, weight_memory
from ridgeplan.roofline.passes import MIXER_PRODUCTS, Op, PassTerms, decode_pass, state_sizes, stored_bytes

if TYPE_CHECKING:
    from ridgeplan.roofline.strategy import Strategy

BF16_BYTES = 2
FULL_BITS, HALF_BITS = 16, 8
WIDTHS = (16, 8, 4)  # bits per weight that have rates of their own; formats between two of them have the narrower's
PAGE_TOKENS = 16  # of a page of the KV cache
SAMPLED_KINDS = ("head", GATHER_LOGITS)  # of operations on sampled rows alone
NCCL_BYTES = 0.4e9  # of buffers for messages; aiconfigurator 0.12.0 counts 0.34 to 0.39 GiB on 2 to 8 GPUs
# FlashAttention-3 (flash_prepare_scheduler, for Hopper): blocks of a tile aim at 1.1 times an SM's even share.
BLOCK_TOKENS, SPLIT_MARGIN, MAX_SPLITS = 128, 1.1, 32

# Milliseconds of a pass of vLLM 0.24 on an H200, by drafts of an EAGLE-3 head (one layer, 32k draft vocabulary),
# context and batch: Llama-3.1-8B in fp8 with fp8 KV, November 2026. Without drafts it is a plain step.
EAGLE3_PASS_MS = {
    (0, 4096, 1): 3.70, (3, 4096, 1): 5.15, (5, 4096, 1): 6.12, (0, 32768, 1): 4.33, (3, 32768, 1): 5.84,
    (0, 120000, 1): 6.32, (3, 120000, 1): 8.13, (5, 120000, 1): 9.22, (0, 32768, 8): 9.22, (3, 32768, 8): 11.84,
}  # fmt: skip
# What each draft adds to a plain step: at least, for each token in the caches, and for each sequence but the first.
EAGLE3_MS = (0.478, 0.95e-6, 0.021)
EAGLE3_MEASURED = 4096, "h200", 1  # the hidden size, the GPU, and how many of it


def eagle3_draft_seconds(batch: Term, context: Term) -> Term:
    """What a draft of an EAGLE-3 head and its verification add to a plain step, where that was measured."""
    fewest, per_token, per_sequence = EAGLE3_MS
    return 1e-3 * (fewest + per_token * batch * context + per_sequence * (batch - 1))


# Steps with prompts of vLLM 0.24, which leave the full CUDA graph: Llama-3.1-8B in bf16 on an H200, fitted to steps and
# latencies of served requests with lognormal lengths (validate/results/traffic_h200.json, November 2026). The last two
# hold for 16-bit weights and for a 16-bit cache: of 8 bits there are published rates alone, which are nearer without.
HOST_S = 3.2e-3  # of the host before the first kernel of a step; a GPU that runs the step before does not wait for it
LAYER_LAUNCH_S = 0.75e-3  # of the host for each layer of a step with prompts, however many tokens it has
PROMPT_SHARE = 0.9  # of the FLOP/s that libraries' products reach alone: a GPU that serves runs at its limit of power
MIXED_ATTENTION = 1.5  # seconds of the decodes' attention beside prompts, over those in a step of their own


@dataclass(frozen=True)
class ExpertKernels:
    """Fused products of routed experts: what they take beyond reading the experts' weights.

    With many rows they reach share x w / (w + width) of the 16-bit peak, of a width w of each expert on the GPU, and
    compute `padding` rows in vain for each expert that is read. passes: how often the activations of all tokens and
    their experts, those of other GPUs too, are read or written beside the products.
    """

    share: float
    width: float
    padding: float
    passes: float


# By bits of the weights. Fitted to 5562 times of vLLM 0.24 on H200 by NVIDIA (aiconfigurator 0.12.0, Apache-2.0,
# h200_sxm/moe/vllm/0.24.0: bf16, fp8 by block and MXFP4, balanced, 1 to 8 slices, 1 to 16 ranks of whole experts) at
# the launch times and shares of the bandwidth of planner/engines: the median error is 7%, 9% and 11%, and 8%, 8% and
# 10% from 512 to 4096 tokens.
EXPERT_KERNELS = {
    16: ExpertKernels(share=1.0, width=125, padding=139, passes=1.86),
    8: ExpertKernels(share=0.79, width=299, padding=49, passes=0.51),
    4: ExpertKernels(share=0.62, width=93, padding=40, passes=0.43),
}


class MachinePeaks(Protocol):
    """What an engine's steps need of a machine: `Hardware` and `Machine` have it."""

    @property
    def bandwidth_bytes_per_s(self) -> float: ...

    @property
    def compute_flops(self) -> float: ...

    @property
    def num_sms(self) -> int: ...


@dataclass(frozen=True)
class KVRate:
    """How attention reads a kind of KV cache: the inverse of the share of the bandwidth that all SMs reach together.

    sm_share: what one SM reaches over its even share of that; 0 where attention does not run in waves.
    """

    inverse: Term
    sm_share: Term = 0.0


@dataclass(frozen=True)
class EngineStep:
    """One pass of an engine: `queries` tokens of each of `batch` sequences, over `context` cached ones.

    weight_bits: of linear layers and experts; the head keeps the checkpoint's. kv_bits: per number of the cache, with
    its scales. kv: how attention reads it.
    """

    batch: Term
    context: Term
    weight_bits: Term
    kv_bits: Term
    kv: KVRate
    queries: int = 1

    @property
    def mixed_attention(self) -> Term:
        """Seconds of the decodes' attention in a step with prompts, over those in a step without."""
        return where(np.equal(self.kv_bits, FULL_BITS), MIXED_ATTENTION, 1.0)

    def micro_batches(self, shape: ModelShape) -> Term:
        """Batches that a pipeline's stages work on at a time: one a stage, as far as there are sequences."""
        return minimum(self.batch, shape.parallel.pipeline)

    def of_stage(self, shape: ModelShape) -> EngineStep:
        """The step of one micro-batch on one stage of a pipeline; the step itself without one."""
        if shape.parallel.pipeline == 1:
            return self
        return replace(self, batch=np.ceil(self.batch / self.micro_batches(shape)))

    def operations(self, shape: ModelShape) -> Iterator[Op]:
        """The pass's operations: all but attention at the padded batch; then messages between GPUs."""
        terms = PassTerms(
            batch=self.batch, queries=self.queries, quantized_tokens=0, full_tokens=self.context, bits=0, group=1,
            splits=1, weight_bytes=self.weight_bits / 8, head_bytes=shape.weight_bits.full_bytes("head", BF16_BYTES),
            element_bytes=BF16_BYTES,
        )  # fmt: skip
        stored = replace(terms, element_bytes=self.kv_bits / 8)
        padded = replace(terms, batch=padded_rows(self.batch))
        yield from (op for op in decode_pass(shape, padded) if op.category != "attention")
        yield from (op for op in decode_pass(shape, stored) if op.category == "attention")
        if shape.parallel.gpus > 1:
            yield from pass_messages(shape, padded.rows, padded.rows, BF16_BYTES)


@dataclass(frozen=True, kw_only=True)
class EngineReserve:
    """What an engine keeps beside weights and KV pages, as it measures it when it starts.

    batched_tokens: of the largest pass. other_bytes: CUDA graphs, libraries, and what the driver holds back.
    """

    batched_tokens: int
    other_bytes: float


@dataclass(frozen=True, kw_only=True)
class EngineRates:
    """An engine's rates on one machine. Inverse utilizations: by bits of weights, and by kind of KV cache.

    launch_s: of products and attention; small_launch_s: of what compilers fuse; packed_expert_launch_s: of experts in 4
    bits, which run in other kernels. coded_speedup: of prompts' products with 8-bit weights over those with 16 bits.
    network: of plans that span GPUs.
    """

    launch_s: float
    small_launch_s: float
    expert_launch_s: float
    packed_expert_launch_s: float
    linear_inverse: Mapping[int, float]
    expert_inverse: Mapping[int, float]
    kv: Mapping[str, KVRate]
    linear_compute: float
    attention_compute: float
    reserve: EngineReserve
    coded_speedup: float = 1.0
    network: Network | None = None

    def kv_rate(self, kind: str) -> KVRate:
        """How attention reads a kind of KV cache; one that was not measured as the one that was slowest."""
        return self.kv.get(kind) or max(self.kv.values(), key=lambda rate: rate.inverse)

    def step_of(self, strategy: Strategy, context: Term) -> EngineStep:
        """The step of a plan that decodes plainly: 8-bit weights and codes of 8 bits are fp8 in engines."""
        codes, full, coded = 1 - strategy.stores_full_kv, self.kv_rate("bf16"), self.kv_rate("fp8")
        return EngineStep(
            batch=strategy.batch,
            context=context,
            weight_bits=where(strategy.target.dense, FULL_BITS, HALF_BITS),
            kv_bits=where(codes, HALF_BITS, FULL_BITS),
            kv=KVRate(where(codes, coded.inverse, full.inverse), where(codes, coded.sm_share, full.sm_share)),
        )

    def step_s(self, shape: ModelShape, machine: MachinePeaks, step: EngineStep) -> Term:
        """Seconds of one step."""
        return sum(seconds for _, seconds in self.timed(shape, machine, step))

    def timed(self, shape: ModelShape, machine: MachinePeaks, step: EngineStep) -> list[tuple[Op, Term]]:
        """Every operation of a step with its seconds.

        A token of a pipeline passes all stages. Where every stage is busy, all of them wait for the last one, which
        has the head.
        """
        stages = shape.parallel.pipeline
        stage = self.stage_timed(shape, machine, step.of_stage(shape))
        return [repeated(timed, self._passes(timed[0], stages, step)) for timed in stage]

    def stage_timed(self, shape: ModelShape, machine: MachinePeaks, step: EngineStep) -> list[tuple[Op, Term]]:
        """Every operation of one pass of all of a step's rows through one stage, with its seconds."""
        return [(op, self._op_seconds(op, shape, machine, step)) for op in step.operations(shape)]

    def _passes(self, op: Op, stages: int, step: EngineStep) -> Term:
        """How often a step waits for an operation of a stage."""
        return stages if op.kind != "head" else 1 + (stages - 1) * indicator(stages, step.batch)

    def message_seconds(self, op: Op) -> Term:
        """Seconds of all messages of an operation of `collectives.pass_messages`."""
        assert self.network is not None
        return op.launches * self.network.seconds(op.kind, op.cost.write_bytes, op.width, op.depth)

    def _op_seconds(self, op: Op, shape: ModelShape, machine: MachinePeaks, step: EngineStep) -> Term:
        if op.kind in COLLECTIVES:
            return self.message_seconds(op)
        packed = width_is(weight_bits(op, shape, step), WIDTHS[-1])
        packed_s, plain_s = (getattr(self, f"{launch_kind(op, is_packed)}_s") for is_packed in (True, False))
        launch_s = op.launches * where(packed, packed_s, plain_s)
        memory_s = read_seconds(op, shape, machine, step) * self._inverse(op, shape, step)
        if op.kind == "grouped_linear":
            compute_s, moved_s = expert_seconds(op, shape, machine, step)
            return launch_s + maximum(memory_s, compute_s) + moved_s
        coded_speedup = where(width_is(weight_bits(op, shape, step), HALF_BITS), self.coded_speedup, 1.0)
        peak = self.attention_compute if op.category == "attention" else self.linear_compute * coded_speedup
        return launch_s + maximum(memory_s, op.total.flops / (machine.compute_flops * peak))

    def arithmetic(self, op: Op, shape: ModelShape, step: EngineStep) -> Term:
        """The GPU's peak for an operation over that of 16 bits: 2 for products with 8-bit weights, if it has fp8.

        `coded_speedup` is above 2 where 16-bit products reach less of their peak.
        """
        return where(width_is(weight_bits(op, shape, step), HALF_BITS), min(self.coded_speedup, 2.0), 1.0)

    def _inverse(self, op: Op, shape: ModelShape, step: EngineStep) -> Term:
        if op.category == "attention":
            return step.kv.inverse
        inverses = self.expert_inverse if op.kind == "grouped_linear" else self.linear_inverse
        bits = weight_bits(op, shape, step)
        return np.select([width_is(bits, width) for width in WIDTHS], [inverses[width] for width in WIDTHS])

    def memory(self, shape: ModelShape, strategy: Strategy) -> MemoryBreakdown:
        """What the engine reserves for a plan: KV in whole pages for every sequence at its end."""
        step = self.step_of(strategy, strategy.context)
        tokens = strategy.context + strategy.new_tokens
        target = engine_memory(shape, self.reserve, strategy.batch, tokens, step.weight_bits, step.kv_bits)
        return replace(target, draft_weights=head_memory(shape, strategy, BF16_BYTES, tokens))


def repeated(timed: tuple[Op, Term], times: Term) -> tuple[Op, Term]:
    """An operation that runs so many times, with its seconds."""
    op, seconds = timed
    return replace(op, launches=op.launches * times), seconds * times


def of_sequences(op: Op) -> bool:
    """Whether an operation depends on the sequences of a pass and their tokens, and not on its rows alone."""
    other = op.kind == "state" or op.name in ("indexer top-k", "short convolution")
    return other or op.category == "attention"


def expert_seconds(op: Op, shape: ModelShape, machine: MachinePeaks, step: EngineStep) -> tuple[Term, Term]:
    """Seconds in which routed experts are computed, and in which activations move beside that (`ExpertKernels`)."""
    bits, kernels = weight_bits(op, shape, step), [EXPERT_KERNELS[width] for width in WIDTHS]
    share, width, padding, passes = (
        np.select([width_is(bits, each) for each in WIDTHS], [getattr(kernel, name) for kernel in kernels])
        for name in ("share", "width", "padding", "passes")
    )
    held, pairs = shape.expert_intermediate, padded_rows(step.batch) * step.queries * shape.parallel.data
    pairs = pairs * getattr(shape, "whole", shape).experts_per_token
    peak = machine.compute_flops * share * held / (held + width)
    compute_s = (op.cost.flops + 2 * padding * op.width * op.depth) / peak
    # Gate, up and their product are written and read, and so are the streams that the experts' outputs are added to.
    row_bytes = (5 * held + 2 * op.depth) * BF16_BYTES
    return op.launches * compute_s, op.launches * passes * pairs * row_bytes / machine.bandwidth_bytes_per_s


def launch_kind(op: Op, packed: bool) -> str:
    """Which of the rates' launch times an operation takes. packed: its weights have 4 bits."""
    if op.kind == "grouped_linear":
        return "packed_expert_launch" if packed else "expert_launch"
    return "launch" if op.category == "attention" or op.kind in ("linear", "head") else "small_launch"


def launch_seconds(shape: ModelShape) -> float:
    """Seconds in which the host launches a step with prompts, on each stage of a pipeline."""
    return LAYER_LAUNCH_S * shape.layers / shape.parallel.pipeline


def padded_rows(rows: Term) -> Term:
    """The batch of the CUDA graph that a batch runs in: 1, 2, 4, multiples of 8 up to 256, of 16 up to 512."""
    of_8, of_16 = 8 * np.ceil(np.asarray(rows) / 8), 16 * np.ceil(np.asarray(rows) / 16)
    captured = [rows <= limit for limit in (1, 2, 4, 256, 512)]
    return np.select(captured, [1, 2, 4, of_8, of_16], rows)


def width_is(bits: Term, width: int) -> Term:
    """Whether weights of so many bits have the rates of a width of `WIDTHS`."""
    above = {16: 8.5, 8: 6.0, 4: 0.0}[width]
    below = {16: np.inf, 8: 8.5, 4: 6.0}[width]
    return (above < np.asarray(bits)) & (np.asarray(bits) <= below)


def weight_bits(op: Op, shape: ModelShape, step: EngineStep) -> Term:
    """Bits per weight of an operation; 16 for those without weights."""
    held = shape.weight_bits
    if op.kind == "head":
        return 8 * held.full_bytes("head", BF16_BYTES)
    if op.kind not in ("linear", "grouped_linear") or op.name == "router":
        return FULL_BITS
    part = held.experts if op.kind == "grouped_linear" else held.mlp
    part = held.attention if op.name in MIXER_PRODUCTS else part
    return 8 * stored_bytes(part, step.weight_bits / 8)


def read_seconds(op: Op, shape: ModelShape, machine: MachinePeaks, step: EngineStep) -> Term:
    """Seconds in which an operation moves its bytes at the full bandwidth, by as many SMs as read them."""
    seconds = op.total.bytes / machine.bandwidth_bytes_per_s
    if op.category != "attention" or not np.any(step.kv.sm_share):
        return seconds
    return seconds * wave_factor(step.batch, shape.cached_rows, op.depth, machine.num_sms, step.kv.sm_share)


def wave_factor(batch: Term, heads: int, tokens: Term, num_sms: Term, sm_share: Term) -> Term:
    """How much longer FlashAttention-3 takes to read a cache than if all SMs read until the end.

    Every sequence and KV head is split into tiles of about an SM's even share of all blocks, and a margin. Tiles of
    a last, partial wave are read by as many SMs, each of which reaches at most `sm_share` times an even share; 0 stands
    for other kernels, without such waves.
    """
    blocks = np.ceil(np.asarray(tokens) / BLOCK_TOKENS)
    tile_blocks = np.ceil(batch * blocks * heads * SPLIT_MARGIN / num_sms)
    tiles = batch * heads * np.clip(np.ceil(blocks / tile_blocks), 1, MAX_SPLITS)
    last = tiles % num_sms
    slowest_s = num_sms / tiles / np.maximum(sm_share, 1e-9)
    last_s = np.where(last > 0, maximum(last / tiles, slowest_s), 0.0)
    return np.where(np.greater(sm_share, 0), (tiles - last) / tiles + last_s, 1.0)


def engine_memory(
    shape: ModelShape, reserve: EngineReserve, batch: Term, tokens: Term, weight_bits: Term, kv_bits: Term
) -> MemoryBreakdown:
    """Bytes of weights, of the KV pages of `batch` sequences of `tokens` tokens, and of the engine's reserve."""
    pages = page_tokens(shape, kv_bits) * np.ceil(np.asarray(tokens) / page_tokens(shape, kv_bits))
    return MemoryBreakdown(
        weights=weight_memory(shape, weight_bits / 8, BF16_BYTES),
        draft_weights=0,
        kv=batch * stored_elements(shape, pages) * kv_bits / 8 + index_memory(shape, batch, pages),
        buffers=batch * state_pages(shape, kv_bits),
        prefill_workspace=activation_bytes(shape, reserve),
        decode_workspace=0,
        libraries=reserve.other_bytes + (NCCL_BYTES if shape.parallel.gpus > 1 else 0),
    )


def page_tokens(shape: ModelShape, kv_bits: Term) -> Term:
    """Tokens of a page: in hybrids so many that a layer's page is no smaller than a layer's state (vLLM)."""
    if not shape.states:
        return PAGE_TOKENS
    token_bytes = shape.kv_elements_per_token_per_layer * kv_bits / 8
    largest = max(_state_bytes(state) for state, _ in shape.states)
    return PAGE_TOKENS * np.ceil(np.asarray(largest / token_bytes / PAGE_TOKENS))


def state_pages(shape: ModelShape, kv_bits: Term) -> Term:
    """Bytes of a sequence's states: a page of the KV cache for each layer, which may be larger than its state."""
    if not shape.states:
        return 0
    page_bytes = page_tokens(shape, kv_bits) * shape.kv_elements_per_token_per_layer * kv_bits / 8
    return shape.state_layers * page_bytes


def _state_bytes(state: State) -> float:
    sizes = state_sizes(state)
    return float(sizes.bytes + sizes.convolution_bytes(BF16_BYTES))


def activation_bytes(shape: ModelShape, reserve: EngineReserve) -> float:
    """Bytes of the activations of the largest pass: gate and up with their product, queries, and streams.

    vLLM 0.24 took 1.05 times as much for Llama-3.1-8B, 1.3 for Qwen3-30B-A3B and 0.7 for gpt-oss-20b.
    """
    width, copies = shape.intermediate, 2
    if shape.is_moe:
        width, copies = shape.experts_per_token * shape.expert_intermediate, 2 + shape.experts_per_token
    row_bytes = (3 * width + copies * shape.hidden + shape.q_width) * BF16_BYTES
    return float(reserve.batched_tokens * row_bytes)
