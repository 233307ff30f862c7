"""Parts of prompts that the runtime computes in plain torch: softmaxes with soft caps, and others on a CPU only.

These are recurrent states, which have kernels on a GPU, and softmaxes with sinks, which FlashAttention serves there.

Launches and bytes are those of torch's operations, each of which reads its operands and writes its output; tests count
them. Products are in float32, and their arithmetic takes less time than their bytes. All have the rates of elementwise
kernels, and a spread that says so. Of states a GPU's host binds them: an H200's took 26 to 29 us for each launch, 25.7
to 29.4 ms for 4,096 tokens of a layer of Qwen3.5-9B. Softmaxes were not timed on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeplan.roofline import execution
from ridgeplan.roofline.catalog.layers import DELTA_RULE, Attention, State
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Cost, Term, maximum, minimum
from ridgeplan.roofline.latency import RateTerms
from ridgeplan.roofline.ops import CHUNK_TOKENS
from ridgeplan.roofline.passes import SINKS_IN_FLASH, SOFTMAX_IN_TORCH, STATES_IN_KERNELS, STATES_IN_TORCH, Op

FLOAT_BYTES = 4
# States' kernels move the bytes of `ops.state_chunks` at this share of the rate of elementwise kernels.
PROMPT_STATES_SHARE, STATES_SPREAD = 0.27, 0.5
HOST_LAUNCH_S = 25e-6  # of torch's operations on a GPU
TORCH_SPREAD = 2.0  # a prompt's time may be three times as long, or a third
OTHER_SOFTMAX = SINKS, SOFT_CAP = "attention sinks", "attention soft cap"
STATES, ATTENTION = ("short convolution", "state chunks"), ("prefill attention", "prefill attention (window)")
# Of a piece of a prompt in a state layer, and of each of its chunks; of a block of queries.
PIECE_LAUNCHES, CHUNK_LAUNCHES = 77, 6
BLOCK_LAUNCHES, CAP_LAUNCHES, SINK_LAUNCHES = 18, 3, 1
# Bytes of a score, which products, the mask and the softmax write and read; more with a cap or sinks.
SCORE_BYTES, CAP_BYTES, SINK_BYTES = 24, 24, 8
MASK_BYTES = 32  # of a query and a key, of the comparisons that make the mask


def as_executed(
    shape: ModelShape, ops: tuple[Op, ...], tokens: Term, held: Term, element_bytes: Term, asynchronous: Term
) -> tuple[Op, ...]:
    """The operations of a prompt of `tokens` tokens after `held` ones, with those in torch in place of libraries'.

    Families that the runtime does not know count as well, if it has their layers. asynchronous: 1 on a GPU, 0 on a CPU.
    """
    traits = set(OTHER_SOFTMAX).intersection(shape.traits)
    states = [each for each in shape.states if each[0].rule == DELTA_RULE and not each[0].gate_rank]
    if not (states or traits):
        return ops
    sizes, in_flash = (tokens, held, element_bytes), 0 if SOFT_CAP in traits else asynchronous
    libraries = [op for op in ops if op.name in ATTENTION] if traits else []
    in_torch = [softmax_in_torch(shape, *each, *sizes) for each in shape.attentions] if traits else []
    chunked = [op for op in ops if op.name == STATES[1] and states]  # which include the convolution on a GPU
    fused = asynchronous * all(max(each.key_dim, each.value_dim) <= execution.MAX_STATE_WIDTH for each, _ in states)
    replaced = {*(STATES if states else ()), *(op.name for op in libraries)}
    return (
        *(op for op in ops if op.name not in replaced),
        *(states_in_torch(state, layers * (1 - fused), tokens) for state, layers in states),
        *(replace(op, name=STATES_IN_KERNELS, launches=op.launches * fused) for op in chunked),
        *(replace(op, name=SINKS_IN_FLASH, launches=op.launches * in_flash) for op in libraries),
        *(replace(op, launches=op.launches * (1 - in_flash)) for op in in_torch),
    )


def rates_as_executed(elementwise: RateTerms, attention: RateTerms, asynchronous: Term) -> dict[str, RateTerms]:
    """Rates of what runs in place of libraries' operations, by name.

    elementwise, attention: those of prompts. asynchronous: 1 on a GPU, 0 on a CPU.
    """
    bandwidth, compute = PROMPT_STATES_SHARE * elementwise.bandwidth_utilization, attention.compute_utilization
    states = replace(elementwise, bandwidth_utilization=bandwidth, compute_utilization=compute, spread=STATES_SPREAD)
    in_torch = replace(elementwise, spread=TORCH_SPREAD)
    launched = replace(in_torch, launch_s=in_torch.launch_s + asynchronous * HOST_LAUNCH_S)
    return {STATES_IN_TORCH: launched, SOFTMAX_IN_TORCH: in_torch, STATES_IN_KERNELS: states}


def states_in_torch(state: State, layers: Term, tokens: Term) -> Op:
    """`kernels.state.reference.delta_chunks` over a prompt in pieces: 16-bit inputs, and float32 otherwise."""
    pieces, chunks = maximum(tokens / execution.TORCH_STATE_TOKENS, 1), tokens / CHUNK_TOKENS
    by_head = 33 * state.key_dim + 15 * state.value_dim + 22 * CHUNK_TOKENS
    elements = 36 * state.channels + state.value_heads * by_head
    moved = FLOAT_BYTES * (tokens * elements + 6 * chunks * state.elements)
    return _op(STATES_IN_TORCH, moved, PIECE_LAUNCHES * pieces + CHUNK_LAUNCHES * chunks, layers)


def softmax_in_torch(
    shape: ModelShape, attention: Attention, layers: Term, tokens: Term, held: Term, element_bytes: Term
) -> Op:
    """`attend_by_blocks` of the runtime's prefill: scores in float32, some heads and a block of queries at a time."""
    window, total = attention.window_tokens, tokens + held
    kv_heads = minimum(maximum(execution.PREFILL_ATTENDED_TOKENS / total, 1), attention.kv_heads)
    heads = attention.q_heads / attention.kv_heads * kv_heads
    reach = total if window is None else minimum(total, 2 * window)
    block = minimum(minimum(reach, tokens), maximum(execution.EVICTION_SCORE_ELEMENTS / (heads * reach), 1))
    seen = held + (tokens + block) / 2 if window is None else minimum(total, window + block)
    blocks = tokens / block * attention.kv_heads / kv_heads
    sunk, capped = (int(trait in shape.traits) for trait in OTHER_SOFTMAX)
    score_bytes = SCORE_BYTES + capped * CAP_BYTES + sunk * SINK_BYTES
    width = attention.head_dim + attention.output_head_dim
    # Keys and values in float32, copied for every query head, and read.
    cached = seen * width * (kv_heads * (element_bytes + FLOAT_BYTES) + 3 * FLOAT_BYTES * heads)
    queries = heads * block * width * (3 * FLOAT_BYTES + 2 * element_bytes)
    moved = block * seen * (heads * score_bytes + MASK_BYTES) + cached + queries
    launches = BLOCK_LAUNCHES + capped * CAP_LAUNCHES + sunk * SINK_LAUNCHES
    return _op(SOFTMAX_IN_TORCH, moved, launches, layers * blocks)


def _op(name: str, moved: Term, launches: Term, times: Term) -> Op:
    """Launches that move so many bytes together, and that are repeated."""
    return Op(name, "elementwise", Cost(read_bytes=moved / launches), times * launches)
