"""Triton kernels of the gated delta rule over a prompt, in chunks.

The chunked form (Gated DeltaNet, Yang et al. 2024, section 3.3) takes three launches: the convolution; the products
within all chunks and the solution of their triangular systems; and the chain of chunks, in which a program holds some
value channels of a head's state in registers. Products of 16-bit models have 16-bit operands and float32
sums. Queries and keys enter them before their normalization, as they are exact then; norms, decays and step sizes
multiply float32 sums, or factors that are rounded anyway.
"""

import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.cuda import has_wgmma
from ridgeplan.kernels.state import DeltaVectors
from ridgeplan.kernels.state.reference import CHUNK_TOKENS, NORM_EPS
from ridgeplan.kernels.state.triton import activated, decay_of

ROWS, CHANNELS = 16, 128  # of a program of the convolution
# Least width of heads in a product, with zeros behind narrower ones: a warpgroup multiplies 64 rows at once. And most
# registers of a thread within chunks, with which an SM has three programs.
MIN_WIDTH, MAX_REGISTERS = 64, 168
# Value channels whose state a program carries, 128 programs of 32 heads, and chunks whose factors are in Hopper's
# shared memory: other GPUs load each chunk's when they need them.
BLOCK, STAGES = 32, 3
C, SIDE = tl.constexpr(CHUNK_TOKENS), tl.constexpr(16)  # tokens, and those of diagonal blocks of a triangular system


@triton.jit(do_not_specialize=["tokens"])
def _convolution_kernel(
    projected,  # [tokens, stride]
    earlier,  # [TAPS - 1, WIDTH]
    taps,  # [CHANNELS, TAPS]
    mixed,  # [chunks C, CHANNELS], written; of zeros behind the text
    tokens,
    stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, row = tl.program_id(1).to(tl.int64) * ROWS, tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, total = (channel < CHANNELS)[None, :], tl.zeros([ROWS, BLOCK], tl.float32)
    for lag in tl.static_range(TAPS):
        place = first + row - lag
        at = projected + first * stride + (row - lag) * stride + channel[None, :]
        inputs = tl.load(at, inside & (place >= 0) & (place < tokens), 0.0)
        if first == 0:
            at = earlier + (place + TAPS - 1) * WIDTH + channel[None, :]
            inputs += tl.load(at, inside & (place < 0), 0.0)
        tap = tl.load(taps + channel * TAPS + (TAPS - 1 - lag), channel < CHANNELS, 0.0)
        total += inputs.to(tl.float32) * tap.to(tl.float32)[None, :]
    tl.store(mixed + (first + row) * CHANNELS + channel[None, :], activated(total, projected.dtype.element_ty), inside)


@triton.jit
def _norms(heads, eps):
    """The factors [C] that make rows [C, channels] unit vectors."""
    return tl.rsqrt(tl.sum(heads.to(tl.float32) * heads.to(tl.float32), 1) + eps)


@triton.jit
def _inverse(a, memory, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [C, C]: forward substitution in diagonal blocks, and a sum over the others.

    With D the inverse of the diagonal blocks and L the blocks below them, X = D - D L X, where D L is nilpotent. Powers
    of all of `a` would grow beyond float32 where keys are alike.
    memory: float32 [C, C], by which threads exchange rows.
    """
    at, column = tl.arange(0, SIDE), tl.arange(0, C)  # of the inverse, whose rows within its block are in `solved`
    tile, block = memory + column[:, None] * C + column[None, :], memory + column // SIDE * (SIDE * C + SIDE)
    tl.store(tile, a)
    tl.debug_barrier()
    solved = tl.where(at[None, :] == (column % SIDE)[:, None], 1.0, 0.0)
    for step in tl.range(1, SIDE, loop_unroll_factor=5):
        factors = tl.load(block[:, None] + step * C + at[None, :])
        known = tl.sum(factors * solved, 1)
        solved -= tl.where(at[None, :] == step, known[:, None], 0.0)
    tl.debug_barrier()
    tl.store(block[:, None] + at[None, :] * C + (column % SIDE)[:, None], solved)
    tl.debug_barrier()
    a, same = tl.load(tile), (column // SIDE)[:, None] == (column // SIDE)[None, :]
    inverse = tl.where(same, a, 0.0)
    below = tl.dot(inverse, tl.where(same, 0.0, a), input_precision=PRECISION)
    result = inverse
    for _ in tl.static_range(C // SIDE - 1):
        result = inverse - tl.dot(below, result, input_precision=PRECISION)
    return result


@triton.jit(do_not_specialize=["tokens"])
def _within_chunks_kernel(
    steering,  # [tokens, stride]: step sizes of all heads, and then decays
    log_decay,  # float32 [VALUE_HEADS]
    step_bias,  # as log_decay
    mixed,  # as `_convolution_kernel` writes it
    memory,  # float32 [chunks, VALUE_HEADS, C, C]
    parts,  # see `delta_chunks_triton`, written
    eps,
    tokens,
    stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED: tl.constexpr,  # the wider of both, rounded up to a power of two
    STEP_LIMIT: tl.constexpr,
):
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    QUERIES: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * QUERIES + VALUE_HEADS * VALUE_DIM
    scores, values, reads, query_scales, key_scales, decays = parts
    element = mixed.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if element == tl.float32 else "tf32"
    first, row, channel = chunk * C, tl.arange(0, C), tl.arange(0, PADDED)
    here, down, across = chunk * VALUE_HEADS + head, row[:, None], row[None, :]

    in_text = first + row < tokens
    steering += first * stride + row * stride + head
    # Behind the text tokens neither decay nor update anything.
    step = tl.load(steering, in_text, float("-inf")).to(tl.float32)
    step = tl.sigmoid(step).to(element).to(tl.float32) * STEP_LIMIT
    inputs = tl.load(steering + VALUE_HEADS, in_text, float("-inf")).to(tl.float32)
    decay = decay_of(tl.exp(tl.load(log_decay + head)), inputs, tl.load(step_bias + head))
    total = tl.cumsum(decay, 0)
    ratio = tl.where(down >= across, tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)

    mixed += first * CHANNELS + down * CHANNELS
    q_at, is_key = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + channel[None, :], (channel < KEY_DIM)[None, :]
    k, q = tl.load(mixed + QUERIES + q_at, is_key, 0.0), tl.load(mixed + q_at, is_key, 0.0)
    k_norm, q_norm = _norms(k, eps), _norms(q, eps) / tl.sqrt(KEY_DIM + 0.0)
    ratio *= k_norm[None, :]
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * ratio * q_norm[:, None]
    tl.store(scores + here * (C * C) + down * C + across, score.to(element))
    system = tl.dot(k, tl.trans(k), input_precision="ieee") * ratio * (k_norm * step)[:, None]
    solved = _inverse(tl.where(down > across, system, 0.0), memory + here * (C * C), PRECISION)
    read = tl.dot((solved * (step * tl.exp(total) * k_norm)[None, :]).to(element), k, input_precision="ieee")
    by_channel = here * (C * PADDED) + down * PADDED + channel[None, :]
    tl.store(reads + by_channel, read.to(element))
    v = tl.load(mixed + 2 * QUERIES + head * VALUE_DIM + channel[None, :], (channel < VALUE_DIM)[None, :], 0.0)
    update = tl.dot((solved * step[None, :]).to(element), v, input_precision="ieee")
    tl.store(values + by_channel, update.to(element))
    tl.store(query_scales + here * C + row, q_norm * tl.exp(total))
    tl.store(key_scales + here * C + row, k_norm * tl.exp(tl.sum(decay, 0) - total))
    tl.store(decays + here * C + row, tl.exp(total))


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _across_chunks_kernel(
    mixed,  # as `_convolution_kernel` writes it
    parts,  # as `_within_chunks_kernel` writes them
    state,  # float32 [VALUE_HEADS, KEY_DIM, VALUE_DIM], updated in place
    out,  # [tokens, VALUE_HEADS, VALUE_DIM]
    tokens,
    chunks,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row, key, channel = tl.arange(0, C), tl.arange(0, PADDED), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    QUERIES: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * QUERIES + VALUE_HEADS * VALUE_DIM
    scores, values, reads, query_scales, key_scales, decays = parts
    element = mixed.dtype.element_ty
    is_key, is_value = key < KEY_DIM, channel < VALUE_DIM
    state += head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + channel[None, :]
    current = tl.load(state, is_key[:, None] & is_value[None, :], 0.0)
    by_key, by_query = row[:, None] * PADDED + key[None, :], row[:, None] * C + row[None, :]
    by_value = row[:, None] * PADDED + channel[None, :]
    mixed += head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + row[:, None] * CHANNELS + key[None, :]
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        here, rounded = chunk * VALUE_HEADS + head, current.to(element)
        at = mixed + here // VALUE_HEADS * (C * CHANNELS)
        expected = tl.dot(tl.load(reads + here * (C * PADDED) + by_key), rounded, input_precision="ieee")
        update = tl.load(values + here * (C * PADDED) + by_value).to(tl.float32) - expected
        read = tl.dot(tl.load(at, is_key[None, :], 0.0), rounded, input_precision="ieee")
        read *= tl.load(query_scales + here * C + row)[:, None]
        read += tl.dot(tl.load(scores + here * (C * C) + by_query), update.to(element), input_precision="ieee")
        place = chunk * C + row[:, None]
        kept = (place < tokens) & is_value[None, :]
        tl.store(out + (place * VALUE_HEADS + head) * VALUE_DIM + channel[None, :], read.to(element), kept)
        scaled = (update * tl.load(key_scales + here * C + row)[:, None]).to(element)
        written = tl.dot(tl.trans(tl.load(at + QUERIES, is_key[None, :], 0.0)), scaled, input_precision="ieee")
        current = current * tl.load(decays + here * C + C - 1) + written
    tl.store(state, current, is_key[:, None] & is_value[None, :])


def delta_chunks_triton(projected: Tensor, earlier: Tensor, state: Tensor, vectors: DeltaVectors) -> Tensor:
    """See `ridgeplan.kernels.state.delta_chunks`.

    What the second kernel leaves to the third, by chunk, head and token: q . k with decays, the updates of an empty
    state, what reads the state to reduce them, and in float32 what scales products with queries and keys, and decays
    since the chunk's start.
    """
    projected = projected.contiguous()
    (tokens, stride), (value_heads, key_dim, value_dim) = projected.shape, state.shape
    chunks, (channels, taps) = triton.cdiv(tokens, CHUNK_TOKENS), vectors.taps.shape
    sizes = {"KEY_HEADS": vectors.key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    sizes["PADDED"] = width = max(MIN_WIDTH, triton.next_power_of_2(max(key_dim, value_dim)))
    inputs = projected, earlier.contiguous(), vectors.taps.contiguous()
    mixed = projected.new_empty(chunks * CHUNK_TOKENS, channels)
    widths = {"CHANNELS": channels, "WIDTH": vectors.inputs, "TAPS": taps, "ROWS": ROWS, "BLOCK": CHANNELS}
    _convolution_kernel[triton.cdiv(channels, CHANNELS), len(mixed) // ROWS](*inputs, mixed, tokens, stride, **widths)
    rows = chunks, value_heads, CHUNK_TOKENS
    parts = *(projected.new_empty(*rows, width) for width in (CHUNK_TOKENS, width, width)), *state.new_empty(3, *rows)
    gates = projected[:, channels:], vectors.log_decay, vectors.step_bias, mixed, state.new_empty(*rows, CHUNK_TOKENS)
    steps = {"STEP_LIMIT": vectors.step_limit, "maxnreg": MAX_REGISTERS}
    _within_chunks_kernel[value_heads, chunks](*gates, parts, NORM_EPS, tokens, stride, **sizes, **steps)
    stages = STAGES if projected.is_cuda and has_wgmma(projected.device) and projected.element_size() == 2 else 1
    out, grid = projected.new_empty(tokens, value_heads, value_dim), (triton.cdiv(value_dim, BLOCK), value_heads)
    _across_chunks_kernel[grid](mixed, parts, state, out, tokens, chunks, **sizes, BLOCK=BLOCK, STAGES=stages)
    return out
