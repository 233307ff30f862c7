"""Triton kernels of routed experts: routing, blocks of pairs by expert, and both products with what follows them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.cuda import pdl_options
from ridgeplan.kernels.device.triton_helpers import INTERPRETED, pdl_launch_dependents_and_wait
from ridgeplan.kernels.experts import BLOCK_ROWS, SWIGLU, Activation, Blocks, ExpertWeight, expert_sizes, max_blocks
from ridgeplan.kernels.linear.triton import FEW_ROWS as FEW_ROWS_SPLIT
from ridgeplan.kernels.linear.triton import FLOAT32 as FLOAT32_SPLIT
from ridgeplan.kernels.linear.triton import SplitKConfig, _plane_product, dequantize_tiles
from ridgeplan.kernels.linear.weights import CHUNK, MXFP4_GROUP, Int4Weight, Int8Weight, Mxfp4Weight
from ridgeplan.roofline.catalog.layers import Routing
from ridgeplan.roofline.execution import TILE_OUTPUTS

COUNTED_PAIRS = 64  # pairs that a program compares at once
SUM_ELEMENTS, MIN_SUM_BLOCK = 4096, 64  # that a program adds up at once, and outputs of it
COPY_ROWS, COPY_CHUNK = 16, 256  # rows and inputs of a dense copy of MXFP4 that a program writes


@dataclass(frozen=True)
class ProductConfig:
    """Launch parameters of a product: output tiles of 16 per program. Those of 16 bits are not tuned on a GPU yet."""

    tiles: int
    warps: int
    stages: int


FEW_ROWS = ProductConfig(tiles=2, warps=2, stages=4)
MANY_ROWS = ProductConfig(tiles=4, warps=4, stages=3)
# For 4-bit codes: 10 to 15% faster than the dense products' at 1 to 8 rows on an H200 (docs/kernels/experts.md).
INT4_SPLIT = SplitKConfig(tiles=8, rows=16, max_splits=16, programs=1024, warps=2, stages=2)


@triton.jit
def _route_kernel(
    logits,  # [rows, experts]
    bias,  # [experts] or None
    chosen,  # out: int64 [rows, PER_TOKEN]
    weights,  # out: float32 [rows, PER_TOKEN]
    experts,
    scale,
    min_sum,
    PER_TOKEN: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_launch_dependents_and_wait(PDL)
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    inside = expert < experts
    logit = tl.load(logits + row * experts + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        exponential = tl.exp(logit - tl.max(logit, 0))
        score = exponential / tl.sum(exponential, 0)
    choice = score
    if bias is not None:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    slot = tl.arange(0, SLOTS)
    ids, kept = tl.zeros((SLOTS,), tl.int64), tl.zeros((SLOTS,), tl.float32)
    for i in range(PER_TOKEN):
        best = tl.argmax(choice, 0)
        ids = tl.where(slot == i, best.to(tl.int64), ids)
        kept = tl.where(slot == i, tl.sum(tl.where(expert == best, score, 0.0), 0), kept)
        choice = tl.where(expert == best, float("-inf"), choice)
    if NORMALIZED:
        kept = kept / tl.maximum(tl.sum(kept, 0), min_sum)
    at = row * PER_TOKEN + slot
    tl.store(chosen + at, ids, mask=slot < PER_TOKEN)
    tl.store(weights + at, kept * scale, mask=slot < PER_TOKEN)


def route_triton(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.experts.route`."""
    rows, experts = logits.shape
    chosen = torch.empty(rows, routing.per_token, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, routing.per_token, dtype=torch.float32, device=logits.device)
    _route_kernel[(rows,)](
        logits.contiguous(), bias, chosen, weights, experts, routing.scale, routing.min_sum,
        PER_TOKEN=routing.per_token, SLOTS=triton.next_power_of_2(routing.per_token),
        EXPERTS=triton.next_power_of_2(experts), SIGMOID=routing.sigmoid, NORMALIZED=routing.normalized,
        num_warps=1 if experts <= 256 else 4, **pdl_options(logits),
    )  # fmt: skip
    return chosen, weights


@triton.jit(do_not_specialize=["pairs"])
def _blocks_kernel(
    ids,  # int64 [pairs]
    block_experts,  # out: int32 [blocks]
    block_pairs,  # out: int32 [blocks, ROWS]
    pairs,
    experts,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block: every program counts all pairs by expert, finds the block's expert, and gathers its pairs."""
    pdl_launch_dependents_and_wait(PDL)
    block, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    hits = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, pairs, STEP):
        pair = start + tl.arange(0, STEP)
        id = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        hits += tl.sum((id[:, None] == expert[None, :]).to(tl.int32), 0)
    blocks = (hits + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    current = tl.sum(((ends <= block) & (expert < experts)).to(tl.int32), 0)
    is_current = expert == current
    count = tl.sum(tl.where(is_current, hits, 0), 0)
    first = ROWS * (block - tl.sum(tl.where(is_current, ends - blocks, 0), 0))
    tl.store(block_experts + block, tl.where(current < experts, current, -1))
    slot = tl.arange(0, ROWS)
    tl.store(block_pairs + block * ROWS + slot, tl.zeros_like(slot) + pairs, mask=slot >= count - first)
    earlier = tl.zeros((), tl.int32)
    for start in range(0, pairs, STEP):
        pair = start + tl.arange(0, STEP)
        id = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        match = ((id == current) & (pair < pairs)).to(tl.int32)
        place = earlier + tl.cumsum(match, 0) - 1 - first
        tl.store(block_pairs + block * ROWS + place, pair, mask=(match > 0) & (place >= 0) & (place < ROWS))
        earlier += tl.sum(match, 0)


def expert_blocks_triton(experts: Tensor, count: int, rows: int) -> Blocks:
    """See `ridgeplan.kernels.experts.expert_blocks`."""
    pairs = experts.numel()
    blocks = max_blocks(pairs, count, rows)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=experts.device)
    block_pairs = torch.empty(blocks, rows, dtype=torch.int32, device=experts.device)
    _blocks_kernel[(blocks,)](
        experts.contiguous(), block_experts, block_pairs, pairs, count, EXPERTS=triton.next_power_of_2(count),
        ROWS=rows, STEP=COUNTED_PAIRS, num_warps=4, **pdl_options(experts),
    )  # fmt: skip
    return Blocks(block_experts, block_pairs)


@triton.jit
def _e2m1(code):
    """Numbers of 4 bits in float32: a sign, an exponent of bias 1, and a bit of mantissa, subnormal ones too."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126, the difference of both biases


@triton.jit
def _mxfp4_tile(codes, scales, output, step, inputs, CHUNK: tl.constexpr, OUTPUTS: tl.constexpr):
    """A chunk of the rows `output` of a weight in MXFP4, float32 [OUTPUTS, CHUNK]; codes: two numbers a byte."""
    pairs = step * CHUNK // 2 + tl.arange(0, CHUNK // 2)
    at = codes + output[:, None] * (inputs // 2) + pairs[None, :]
    both = tl.load(at, mask=(pairs < inputs // 2)[None, :], other=0).to(tl.int32)
    numbers = tl.reshape(tl.join(_e2m1(both & 15), _e2m1(both >> 4)), (OUTPUTS, CHUNK // 32, 32))
    groups = step * CHUNK // 32 + tl.arange(0, CHUNK // 32)
    at = scales + output[:, None] * (inputs // 32) + groups[None, :]
    exponent = tl.load(at, mask=(groups < inputs // 32)[None, :], other=0).to(tl.int32)
    scale = tl.maximum(exponent << 23, 1 << 22).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
    return tl.reshape(numbers * scale[:, :, None], (OUTPUTS, CHUNK))


@triton.jit
def _tile_product(
    x, sums, weight, lower, tiles, step, inputs, GROUP: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
    MXFP4: tl.constexpr,
):  # fmt: skip
    """x [ROWS, CHUNK] times a chunk of output tiles, of a dense weight (GROUP 0) or of one or two planes of codes.

    MXFP4: `weight` are the codes of this format, and `lower` its scales.
    """
    output = tl.reshape(tiles[:, None] * 16 + tl.arange(0, 16)[None, :], (16 * TILES,))
    if MXFP4:
        dense = _mxfp4_tile(weight, lower, output, step, inputs, CHUNK, 16 * TILES).to(x.dtype)
        product = tl.dot(x, tl.trans(dense), input_precision="ieee")
    elif GROUP == 0:
        columns = step * CHUNK + tl.arange(0, CHUNK)
        dense = tl.load(
            weight + output[:, None] * inputs + columns[None, :], mask=(columns < inputs)[None, :], other=0.0
        )
        if INTERPRETED:
            dense = dense.to(tl.float32)
        product = tl.dot(x, tl.trans(dense), input_precision="ieee")
    else:
        tile_words = inputs // GROUP * (2 * GROUP + 16)
        product = _plane_product(x, sums, weight, tiles, step, tile_words, GROUP, CHUNK, TILES)
        if lower is not None:
            product += _plane_product(x, sums, lower, tiles, step, tile_words, GROUP, CHUNK, TILES)
    return product


@triton.jit
def _activated(gate, up, alpha, limit, offset):
    """See `ridgeplan.kernels.experts.Activation`."""
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    return gate * tl.sigmoid(alpha * gate) * (up + offset)


@triton.jit(do_not_specialize=["pairs"])
def _experts_kernel(
    x,  # [rows of x, inputs]: of pair p the row p // PER_ROW
    weight,  # dense [experts, outputs, inputs], or int32 tiles of codes of all experts, or rows of MXFP4's codes
    lower,  # the second plane of 8-bit weights, or MXFP4's scales, or None
    bias,  # [experts, outputs] or None
    out,  # [SPLITS, pairs, outputs], or [SPLITS, pairs, outputs / 2] if GATED
    block_experts,  # int32 [blocks]
    block_pairs,  # int32 [blocks, ROWS]
    pairs,
    inputs,
    tiles_per_expert,
    alpha,
    limit,
    offset,
    PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    MXFP4: tl.constexpr,
):
    """A block of pairs times TILES output tiles of its expert, over one of SPLITS ranges of inputs.

    If GATED, also times the tiles of up, and the activation.
    """
    block, split = tl.program_id(1), tl.program_id(2)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(block_pairs + block * ROWS + tl.arange(0, ROWS))
        valid = pair < pairs
        row = (pair // PER_ROW).to(tl.int64)
        out_tiles = tiles_per_expert // 2 if GATED else tiles_per_expert
        tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
        tiles = expert * tiles_per_expert + tl.minimum(tile, out_tiles - 1)
        acc, up = tl.zeros((ROWS, 16 * TILES), tl.float32), tl.zeros((ROWS, 16 * TILES), tl.float32)
        steps = tl.cdiv(inputs, CHUNK)
        for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
            columns = step * CHUNK + tl.arange(0, CHUNK)
            inside = valid[:, None] & (columns < inputs)[None, :]
            x_tile = tl.load(x + row[:, None] * inputs + columns[None, :], mask=inside, other=0.0)
            if INTERPRETED:  # the interpreter multiplies the bit patterns of bf16 (triton-lang/triton#11584)
                x_tile = x_tile.to(tl.float32)
            sums = tl.sum(x_tile.to(tl.float32), 1)
            acc += _tile_product(x_tile, sums, weight, lower, tiles, step, inputs, GROUP, CHUNK, TILES, MXFP4)
            if GATED:
                above = tiles + out_tiles
                up += _tile_product(x_tile, sums, weight, lower, above, step, inputs, GROUP, CHUNK, TILES, MXFP4)
        output = tl.program_id(0) * TILES * 16 + tl.arange(0, 16 * TILES)
        outputs = 16 * out_tiles
        if bias is not None and split == 0:
            at = bias + expert * tiles_per_expert * 16 + output
            acc += tl.load(at, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(at + outputs, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc = _activated(acc, up, alpha, limit, offset)
        place = out + (split.to(tl.int64) * pairs + pair[:, None]) * outputs + output[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=valid[:, None] & (output < outputs)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _activation_kernel(
    parts,  # [SPLITS, pairs, 2 WIDTH]: gates first, then up
    bias,  # [experts, 2 WIDTH] or None
    ids,  # int16 [pairs], the pairs' experts, if there is a bias
    out,  # [pairs, WIDTH]
    pairs,
    alpha,
    limit,
    offset,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up the splits of gate and up and their bias, and applies the activation."""
    pair, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = (tl.arange(0, SPLITS).to(tl.int64) * pairs + pair) * (2 * WIDTH)
    place, inside = parts + first[:, None] + at[None, :], at[None, :] < WIDTH
    gate = tl.sum(tl.load(place, mask=inside, other=0.0).to(tl.float32), 0)
    up = tl.sum(tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32), 0)
    if bias is not None:
        added = bias + tl.load(ids + pair).to(tl.int64) * (2 * WIDTH) + at
        gate += tl.load(added, mask=at < WIDTH, other=0.0).to(tl.float32)
        up += tl.load(added + WIDTH, mask=at < WIDTH, other=0.0).to(tl.float32)
    result = _activated(gate, up, alpha, limit, offset)
    tl.store(out + pair * WIDTH + at, result.to(out.dtype.element_ty), mask=at < WIDTH)


@triton.jit(do_not_specialize=["pairs"])
def _sum_kernel(
    parts,  # [SPLITS, pairs, width]
    places,  # int64 [pairs], where a pair is among the parts, or None: at its number
    weights,  # float32 [pairs]
    addend,  # [pairs / PER_ROW, width] or None
    out,  # as addend
    pairs,
    width,
    PER_ROW: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two that holds PER_ROW x SPLITS
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weighted sum of a row's experts over all splits, and the addend: one load of all parts, as each waits."""
    pdl_launch_dependents_and_wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, part = at < width, tl.arange(0, PARTS)
    pair = row * PER_ROW + part // SPLITS
    known = part < PER_ROW * SPLITS
    weight = tl.load(weights + pair, mask=known, other=0.0)
    if places is not None:
        pair = tl.load(places + pair, mask=known, other=0)
    place = parts + ((part % SPLITS).to(tl.int64) * pairs + pair)[:, None] * width + at[None, :]
    each = tl.load(place, mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)
    acc = tl.sum(each * weight[:, None], 0)
    if addend is not None:
        acc += tl.load(addend + row * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, acc.to(out.dtype.element_ty), mask=inside)


def expert_products_triton(
    x: Tensor,
    blocks: Blocks,
    stacks: tuple[ExpertWeight, ExpertWeight],
    biases: tuple[Tensor | None, Tensor | None],
    count: int,
    pairs: int,
    activation: Activation,
) -> Tensor:
    """Both products of all pairs, [splits, pairs, hidden] to be added up; stacks: of gate and up, and of down."""
    (gated,) = _product(x, blocks, stacks[0], biases[0], count, pairs, activation)
    return _product(gated, blocks, stacks[1], biases[1], count, pairs, None)


def weighted_sum_triton(
    parts: Tensor, weights: Tensor, addend: Tensor | None, dtype: torch.dtype, places: Tensor | None = None
) -> Tensor:
    """The sum of parts [splits, pairs, width] by weights [rows, per_token], plus `addend`: [rows, width].

    places: int64 [pairs], where each pair is among the parts; by default in order.
    """
    (rows, per_token), (_, pairs, width) = weights.shape, parts.shape
    out = torch.empty(rows, width, dtype=dtype, device=parts.device)
    added = triton.next_power_of_2(per_token * len(parts))
    block = max(MIN_SUM_BLOCK, SUM_ELEMENTS // added)
    # In prompts, whose sums the memory binds, a warp loads 256 outputs of all parts, and adds up without the others.
    warps = 4 if places is None else max(1, min(4, block // 256))
    _sum_kernel[(rows, triton.cdiv(width, block))](
        parts, places, weights.contiguous(), None if addend is None else addend.contiguous(), out, pairs, width,
        PER_ROW=per_token, SPLITS=len(parts), PARTS=added, BLOCK=block, num_warps=warps, **pdl_options(parts),
    )  # fmt: skip
    return out


def _product(
    x: Tensor,
    blocks: Blocks,
    weight: ExpertWeight,
    bias: Tensor | None,
    count: int,
    pairs: int,
    activation: Activation | None,
) -> Tensor:
    """Products of all pairs, [splits, pairs, outputs] to be added up; with an activation, of gate and up: one split.

    Few rows of codes leave a GPU idle unless inputs are split, as in dense products. MXFP4 is fastest with whole inputs
    and numbers decoded in float32 (docs/kernels/experts.md). Raises ValueError for odd widths.
    """
    outputs, inputs = expert_sizes(weight, count)
    gated, rows, is_mxfp4 = activation is not None, blocks.pairs.shape[1], isinstance(weight, Mxfp4Weight)
    activation = activation or SWIGLU
    if outputs % (32 if gated else 16):
        raise ValueError(f"experts have {outputs} outputs; allowed on a GPU: multiples of {32 if gated else 16}")
    if isinstance(weight, Tensor):
        planes, group = [weight.contiguous()], 0
    elif isinstance(weight, Mxfp4Weight):
        planes, group = [weight.codes, weight.scales], MXFP4_GROUP
    else:
        planes, group = [plane.packed.view(torch.int32) for plane in weight.planes], weight.group
    chunk = CHUNK if group == 0 or is_mxfp4 else min(group, CHUNK)
    config: ProductConfig | SplitKConfig = FEW_ROWS if rows == BLOCK_ROWS else MANY_ROWS
    splits = 1
    if group and rows == BLOCK_ROWS and not is_mxfp4:
        few = FEW_ROWS_SPLIT if isinstance(weight, Int8Weight) else INT4_SPLIT
        split = FLOAT32_SPLIT if x.dtype == torch.float32 else few
        tile_programs = triton.cdiv(outputs, TILE_OUTPUTS * split.tiles) * len(blocks.experts)
        splits = split.splits(tile_programs, triton.cdiv(inputs, chunk))
        config = split if splits > 1 else config
    fused = gated and splits == 1
    width = outputs // 2 if fused else outputs
    out = torch.empty(splits, pairs, width, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
    grid = (triton.cdiv(width, TILE_OUTPUTS * config.tiles), len(blocks.experts), splits)
    _experts_kernel[grid](
        x, planes[0], planes[1] if len(planes) > 1 else None, bias, out, *blocks, pairs, inputs,
        outputs // TILE_OUTPUTS, activation.alpha, activation.limit, activation.offset,
        PER_ROW=pairs // len(x), GATED=fused, GROUP=group, CHUNK=chunk, TILES=config.tiles, ROWS=rows, SPLITS=splits,
        MXFP4=is_mxfp4, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if fused == gated:
        return out
    activated = torch.empty(1, pairs, outputs // 2, dtype=x.dtype, device=x.device)
    activate(out, activation, activated)
    return activated


def activate(
    parts: Tensor, activation: Activation, out: Tensor, bias: Tensor | None = None, ids: Tensor | None = None
) -> None:
    """Writes the activation of parts [splits, pairs, 2 x width], added up, into `out` [..., pairs, width].

    bias: [experts, 2 x width], for pairs of the experts `ids` int16 [pairs].
    """
    splits, pairs, width = len(parts), parts.shape[1], out.shape[-1]
    block = max(MIN_SUM_BLOCK, SUM_ELEMENTS // splits // 4)
    _activation_kernel[(pairs, triton.cdiv(width, block))](
        parts, bias, ids, out, pairs, activation.alpha, activation.limit, activation.offset,
        WIDTH=width, SPLITS=splits, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "rows"])
def _mxfp4_copy_kernel(codes, scales, out, first, rows, inputs, CHUNK: tl.constexpr, OUTPUTS: tl.constexpr):
    """Writes a dense copy of a chunk of OUTPUTS rows; `out` begins with row `first`."""
    step, row = tl.program_id(0), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    output = first + tl.minimum(row, rows - 1).to(tl.int64)
    dense = _mxfp4_tile(codes, scales, output, step, inputs, CHUNK, OUTPUTS)
    column = step * CHUNK + tl.arange(0, CHUNK)
    at = out + row[:, None].to(tl.int64) * inputs + column[None, :]
    tl.store(at, dense.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < inputs)[None, :])


def dequantize_rows(weight: Int4Weight | Int8Weight | Mxfp4Weight, first: int, out: Tensor) -> None:
    """Writes the stack's rows from `first` on, a multiple of 16, into `out` [rows, inputs], as many as it has."""
    if isinstance(weight, Mxfp4Weight):
        grid = triton.cdiv(weight.inputs, COPY_CHUNK), triton.cdiv(len(out), COPY_ROWS)
        sizes = first, len(out), weight.inputs, COPY_CHUNK, COPY_ROWS
        _mxfp4_copy_kernel[grid](weight.codes, weight.scales, out, *sizes, num_warps=4)
    else:
        dequantize_tiles(weight, first // TILE_OUTPUTS, out)
