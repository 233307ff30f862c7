"""Triton kernels of linear layers with 4-bit and 8-bit weights, and of GPTQ's rounding.

They run where the CUDA kernel does not: on GPUs before Hopper, in float32, and for more rows than it supports.

One launch per group, where plain torch takes four per input: a quarter of a million for a layer of an 8B model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.triton_helpers import INTERPRETED
from ridgeplan.kernels.linear.weights import CHUNK, Int4Weight, Int8Weight
from ridgeplan.roofline.execution import DENSE_COPY_BYTES, MAX_QUANTIZED_ROWS, TILE_OUTPUTS

COPY_TILES = 4
# Adding and subtracting this rounds a number, ties to even, as float32 then has no bits left below 1.
ROUNDER = tl.constexpr(1.5 * 2**23)
SUM_OUTPUTS = 512  # outputs per program that adds up splits

# A word's eight codes as four pairs of bf16, minus 8: pairs of row g and row g + 8 of slot 0, then of slot 1.
# 0x4300 | n is the bf16 number 128 + n; adding -136 (0xC308) centres it exactly.
WORD_TO_BF16 = tl.constexpr("""{
.reg .b32 one, centre, mask, word;
mov.b32 one, 0x3F803F80;
mov.b32 centre, 0xC308C308;
mov.b32 mask, 0x000F000F;
lop3.b32 $0, $4, mask, 0x43004300, 0xEA;
shr.u32 word, $4, 4;
lop3.b32 $1, word, mask, 0x43004300, 0xEA;
shr.u32 word, $4, 8;
lop3.b32 $2, word, mask, 0x43004300, 0xEA;
shr.u32 word, $4, 12;
lop3.b32 $3, word, mask, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, $0, one, centre;
fma.rn.bf16x2 $1, $1, one, centre;
fma.rn.bf16x2 $2, $2, one, centre;
fma.rn.bf16x2 $3, $3, one, centre;
}""")


@dataclass(frozen=True)
class SplitKConfig:
    """Launch parameters of a product: output tiles and rows of x per program, and how far the inputs are split.

    The inputs are split, up to `max_splits` ways, until there are `programs`: few rows leave a GPU idle otherwise.
    Splits do not depend on the GPU, nor do, therefore, the sums.
    """

    tiles: int
    rows: int
    max_splits: int
    programs: int
    warps: int
    stages: int

    def splits(self, tile_programs: int, chunks: int) -> int:
        """Ways to split chunks of inputs where one way would have `tile_programs` programs; a power of 2."""
        ways = triton.next_power_of_2(triton.cdiv(self.programs, tile_programs))
        return min(self.max_splits, ways, triton.next_power_of_2(chunks))


# The fastest of a sweep on an H100 over 4096 x 4096, 10240 x 8192 and 2048 x 8192 (docs/kernels/linear.md).
FEW_ROWS = SplitKConfig(tiles=4, rows=16, max_splits=16, programs=2048, warps=1, stages=2)  # in bf16, as experts are
INTEGERS = SplitKConfig(tiles=4, rows=16, max_splits=16, programs=2048, warps=1, stages=4)  # of a sweep on an H200
MANY_ROWS = SplitKConfig(tiles=4, rows=64, max_splits=8, programs=512, warps=4, stages=4)
FLOAT32 = SplitKConfig(tiles=2, rows=16, max_splits=16, programs=512, warps=4, stages=3)  # larger ones spill registers


@triton.jit
def _words(packed, tiles, k_tile, tile_words, chunk, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Words of a chunk of a K tile, int32 [TILES, 2 * CHUNK]."""
    first = k_tile * (2 * GROUP + 16) + chunk * 2 * CHUNK
    return tl.load(packed + tiles[:, None] * tile_words + first + tl.arange(0, 2 * CHUNK)[None, :])


@triton.jit
def _codes(packed, tiles, k_tile, tile_words, chunk, GROUP: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr):
    """Codes of a chunk of a K tile as int32 [16 * TILES, CHUNK], in the order of rows and inputs."""
    words = _words(packed, tiles, k_tile, tile_words, chunk, GROUP, CHUNK)
    nibbles = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
    # From the order of weights.py: [tile, g, c, piece, step, half, slot, row half]
    split = tl.reshape(nibbles, (TILES, 8, 4, CHUNK // 32, 2, 2, 2, 2))
    return tl.reshape(tl.permute(split, (0, 7, 1, 3, 2, 4, 6, 5)), (16 * TILES, CHUNK))


@triton.jit
def bf16_pairs(words):
    """[..., 2] of 32-bit words of two bf16 numbers, the lower one first."""
    return tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _operand_inputs(x, CHUNK: tl.constexpr):
    """Columns of x [ROWS, CHUNK] in the order of `_operand_codes`."""
    # From [piece, c, step, slot, half] to [piece, step, slot, c, half]
    split = tl.reshape(x, (x.shape[0], CHUNK // 32, 4, 2, 2, 2))
    return tl.reshape(tl.permute(split, (0, 1, 3, 4, 2, 5)), (x.shape[0], CHUNK))


@triton.jit
def _operand_codes(
    packed, tiles, k_tile, tile_words, chunk, GROUP: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr
):
    """Codes of a chunk of a K tile minus 8, bf16 [16 * TILES, CHUNK], each where the tensor core's lane holds it.

    Inputs are in the order [piece, step, slot, c, half], so that no code moves between threads (weights.py).
    """
    words = _words(packed, tiles, k_tile, tile_words, chunk, GROUP, CHUNK)
    a, b, c, d = tl.inline_asm_elementwise(
        WORD_TO_BF16, "=r,=r,=r,=r,r", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    # [tile, word, half, row half, slot]
    both = tl.join(tl.join(bf16_pairs(a), bf16_pairs(b)), tl.join(bf16_pairs(c), bf16_pairs(d)))
    split = tl.reshape(both, (TILES, 8, 4, CHUNK // 32, 2, 2, 2, 2))  # [tile, g, c, piece, step, half, row half, slot]
    return tl.reshape(tl.permute(split, (0, 6, 1, 3, 4, 7, 2, 5)), (16 * TILES, CHUNK))


@triton.jit
def _pairs(packed, tiles, k_tile, tile_words, GROUP: tl.constexpr, TILES: tl.constexpr):
    """Scale and zero of a K tile's outputs, float32 [16 * TILES] each."""
    first = k_tile * (2 * GROUP + 16) + 2 * GROUP
    words = tl.load(packed + tiles[:, None] * tile_words + first + tl.arange(0, 16)[None, :])
    rows = tl.reshape(tl.permute(tl.reshape(words, (TILES, 8, 2)), (0, 2, 1)), (16 * TILES,))
    return (rows << 16).to(tl.float32, bitcast=True), (rows & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _plane_product(
    x, sums, packed, tiles, step, tile_words, GROUP: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr
):
    """x [ROWS, CHUNK] times a chunk of one plane's tiles. x times codes is exact; scales and zeros multiply sums."""
    k_tile = step * CHUNK // GROUP
    if x.dtype == tl.bfloat16:
        x = _operand_inputs(x, CHUNK)
        codes = _operand_codes(packed, tiles, k_tile, tile_words, step % (GROUP // CHUNK), GROUP, CHUNK, TILES)
    else:
        codes = _codes(packed, tiles, k_tile, tile_words, step % (GROUP // CHUNK), GROUP, CHUNK, TILES) - 8
        codes = codes.to(tl.float32).to(x.dtype)
    scale, zero = _pairs(packed, tiles, k_tile, tile_words, GROUP, TILES)
    product = tl.dot(x, tl.trans(codes), input_precision="ieee")
    return product * scale[None, :] + sums[:, None] * zero[None, :]


@triton.jit
def _dense_tiles(packed, tiles, step, tile_words, GROUP: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr):
    """A chunk of one plane's tiles, float32 [16 * TILES, CHUNK]."""
    k_tile = step * CHUNK // GROUP
    codes = _codes(packed, tiles, k_tile, tile_words, step % (GROUP // CHUNK), GROUP, CHUNK, TILES)
    scale, zero = _pairs(packed, tiles, k_tile, tile_words, GROUP, TILES)
    shifted = (codes | 0x4B000000).to(tl.float32, bitcast=True)  # 2^23 + code: conversions are slow
    return (shifted - (8388608.0 + 8.0)) * scale[:, None] + zero[:, None]


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,  # [rows, inputs]
    packed,  # int32 [output_tiles, inputs / GROUP, 2 * GROUP + 16], as `Int4Weight.packed`
    lower,  # as packed: the second plane of 8-bit weights, or None
    bias,  # [outputs] or None
    out,  # [SPLITS, rows, outputs]
    rows,
    inputs,
    outputs,
    output_tiles,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """ROWS rows of x times TILES output tiles, over one of SPLITS ranges of inputs."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    safe = tl.minimum(tiles, output_tiles - 1).to(tl.int64)
    tile_words = inputs // GROUP * (2 * GROUP + 16)
    acc = tl.zeros((ROWS, 16 * TILES), tl.float32)
    steps, split = inputs // CHUNK, tl.program_id(2)
    for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        columns = step * CHUNK + tl.arange(0, CHUNK)
        x_tile = tl.load(x + row[:, None].to(tl.int64) * inputs + columns[None, :], mask=row[:, None] < rows, other=0.0)
        if INTERPRETED:  # the interpreter multiplies the bit patterns of bf16 (triton-lang/triton#11584)
            x_tile = x_tile.to(tl.float32)
        sums = tl.sum(x_tile.to(tl.float32), 1)
        acc += _plane_product(x_tile, sums, packed, safe, step, tile_words, GROUP, CHUNK, TILES)
        if lower is not None:
            acc += _plane_product(x_tile, sums, lower, safe, step, tile_words, GROUP, CHUNK, TILES)
    _store_split(acc, bias, out, split, row, rows, outputs, TILES)


@triton.jit
def _store_split(acc, bias, out, split, row, rows, outputs, TILES: tl.constexpr):
    """Stores the sums acc [ROWS, 16 * TILES] of one split of the inputs, and the bias where there is one."""
    output = tl.program_id(0) * TILES * 16 + tl.arange(0, 16 * TILES)
    if bias is not None:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    at = out + (split.to(tl.int64) * rows + row[:, None]) * outputs + output[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (output[None, :] < outputs))


# Products on INT8 tensor cores, as csrc/integer.cuh computes them on Hopper. Unpacking to bytes takes a third of the
# instructions of unpacking to bf16.


@triton.jit
def _planes_kernel(x, planes, scales, sums, rows, inputs, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """x = scale * (upper + lower / 254) for a row and group, with signed bytes in the order of `_byte_codes`.

    x is loaded in this order: where bytes change it between threads, Triton 3.6 swaps some of them in groups of 256.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = group * GROUP + tl.arange(0, GROUP)
    values = tl.load(x + row * inputs + group * GROUP + _byte_inputs(GROUP)).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0) / 127, 1e-30)
    scale += tl.sum(values * 0, 0)  # NaN if x has one, which a maximum passes over
    steps = values / scale
    upper = (steps + ROUNDER) - ROUNDER
    lower = ((steps - upper) * 254 + ROUNDER) - ROUNDER
    tl.store(planes + row * inputs + at, upper.to(tl.int8))
    tl.store(planes + (rows + row) * inputs + at, lower.to(tl.int8))
    tl.store(scales + row * (inputs // GROUP) + group, scale)
    chunk, chunks = group * (GROUP // CHUNK) + tl.arange(0, GROUP // CHUNK), inputs // CHUNK
    tl.store(sums + row * chunks + chunk, _chunk_sums(upper, GROUP, CHUNK))
    tl.store(sums + (rows + row) * chunks + chunk, _chunk_sums(lower, GROUP, CHUNK))


@triton.jit
def _chunk_sums(values, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Sums of each chunk of values [GROUP], int32 [GROUP / CHUNK]."""
    return tl.sum(tl.reshape(values.to(tl.int32), (GROUP // CHUNK, CHUNK)), 1)


@triton.jit
def _byte_inputs(GROUP: tl.constexpr):
    """Inputs of a group, [piece, c, step, slot, half], in the order [piece, step, c, half, slot]: int32 [GROUP]."""
    i = tl.arange(0, GROUP)
    return i // 32 * 32 + i // 4 % 4 * 8 + i // 16 % 2 * 4 + i % 2 * 2 + i // 2 % 2


@triton.jit
def _byte_codes(
    packed, tiles, k_tile, tile_words, chunk, GROUP: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr
):
    """Codes of a chunk of a K tile, int8 [16 * TILES, CHUNK], each where the tensor core's lane holds it."""
    words = _words(packed, tiles, k_tile, tile_words, chunk, GROUP, CHUNK)
    both = tl.join(_bytes(words & 0x0F0F0F0F), _bytes((words >> 4) & 0x0F0F0F0F))
    split = tl.reshape(both, (TILES, 8, 4, CHUNK // 32, 2, 2, 2, 2))  # [tile, g, c, piece, step, slot, half, row half]
    return tl.reshape(tl.permute(split, (0, 7, 1, 3, 4, 2, 6, 5)), (16 * TILES, CHUNK))


@triton.jit
def _bytes(words):
    """[..., 2, 2] of 32-bit words: byte 2 j + i at [i, j]."""
    low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    return tl.join(tl.join(low.to(tl.int8), (low >> 8).to(tl.int8)), tl.join(high.to(tl.int8), (high >> 8).to(tl.int8)))


@triton.jit
def _byte_product(
    x, x_scale, x_sum, packed, tiles, step, tile_words, GROUP: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr
):
    """Bytes x [2 * ROWS, CHUNK] times a chunk of one plane's tiles, scaled: float32 [2 * ROWS, 16 * TILES].

    Centring codes at 8 in int32 is exact, as x_sum is: what cancels leaves no error.
    """
    k_tile = step * CHUNK // GROUP
    codes = _byte_codes(packed, tiles, k_tile, tile_words, step % (GROUP // CHUNK), GROUP, CHUNK, TILES)
    product = tl.dot(x, tl.trans(codes), out_dtype=tl.int32) - 8 * x_sum[:, None]
    scale, zero = _pairs(packed, tiles, k_tile, tile_words, GROUP, TILES)
    return x_scale[:, None] * (product.to(tl.float32) * scale[None, :] + x_sum.to(tl.float32)[:, None] * zero[None, :])


@triton.jit(do_not_specialize=["rows"])
def _integer_kernel(
    planes,  # int8 [2, rows, inputs]: x by `_planes_kernel`
    scales,  # float32 [rows, inputs / GROUP]
    sums,  # int32 [2, rows, inputs / CHUNK], of the planes
    packed,  # as in `_product_kernel`, like all that follow
    lower,
    bias,
    out,
    rows,
    inputs,
    outputs,
    output_tiles,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """All rows of x, at most ROWS, times TILES output tiles, over one of SPLITS ranges of inputs."""
    row, plane = tl.arange(0, 2 * ROWS) % ROWS, tl.arange(0, 2 * ROWS) // ROWS
    safe = tl.minimum(tl.program_id(0) * TILES + tl.arange(0, TILES), output_tiles - 1).to(tl.int64)
    acc = tl.zeros((2 * ROWS, 16 * TILES), tl.float32)
    steps, tile_words, split = inputs // CHUNK, inputs // GROUP * (2 * GROUP + 16), tl.program_id(2)
    x_row, unit = (plane * rows + row).to(tl.int64), tl.where(plane == 0, 1.0, 1.0 / 254)
    for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        columns = step * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(planes + x_row[:, None] * inputs + columns[None, :], mask=row[:, None] < rows, other=0)
        scale = tl.load(scales + row * (inputs // GROUP) + step * CHUNK // GROUP, mask=row < rows, other=0.0) * unit
        total = tl.load(sums + x_row * steps + step, mask=row < rows, other=0)
        acc += _byte_product(x, scale, total, packed, safe, step, tile_words, GROUP, CHUNK, TILES)
        if lower is not None:
            acc += _byte_product(x, scale, total, lower, safe, step, tile_words, GROUP, CHUNK, TILES)
    acc = tl.sum(tl.reshape(acc, (2, ROWS, 16 * TILES)), 0)
    _store_split(acc, bias, out, split, tl.arange(0, ROWS), rows, outputs, TILES)


@triton.jit(do_not_specialize=["total"])
def _sum_kernel(partial, bias, out, total, outputs, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up partial [SPLITS, total], in the same order every time, and the bias of each of its rows of outputs."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS).to(tl.int64)
    acc = tl.sum(tl.load(partial + split[:, None] * total + at[None, :], mask=at[None, :] < total, other=0.0), 0)
    if bias is not None:
        acc += tl.load(bias + at % outputs, mask=at < total, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=at < total)


@triton.jit(do_not_specialize=["first_tile"])
def _copy_kernel(
    packed,
    lower,
    out,
    first_tile,
    inputs,
    outputs,
    output_tiles,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Writes a dense copy of one chunk of TILES output tiles from `first_tile` on; `out` begins with that tile."""
    step = tl.program_id(0)
    tiles = tl.program_id(1) * TILES + tl.arange(0, TILES)
    safe = tl.minimum(first_tile + tiles, output_tiles - 1).to(tl.int64)
    tile_words = inputs // GROUP * (2 * GROUP + 16)
    weight = _dense_tiles(packed, safe, step, tile_words, GROUP, CHUNK, TILES)
    if lower is not None:
        weight += _dense_tiles(lower, safe, step, tile_words, GROUP, CHUNK, TILES)
    output = tl.program_id(1) * TILES * 16 + tl.arange(0, 16 * TILES)
    at = out + output[:, None].to(tl.int64) * inputs + step * CHUNK + tl.arange(0, CHUNK)[None, :]
    tl.store(at, weight.to(out.dtype.element_ty), mask=first_tile * 16 + output[:, None] < outputs)


def config_of(x: Tensor) -> SplitKConfig:
    """The launch parameters for x [rows, inputs]."""
    if x.dtype == torch.float32:
        return FLOAT32
    return INTEGERS if len(x) <= INTEGERS.rows else MANY_ROWS


def linear_quantized_triton(x: Tensor, weight: Int4Weight | Int8Weight, bias: Tensor | None) -> Tensor:
    """See `ridgeplan.kernels.linear.linear_quantized`; x [rows, inputs].

    The sums of splits, written and read once more, are small and stay in the L2 cache.
    """
    out = torch.empty(len(x), weight.outputs, dtype=x.dtype, device=x.device)
    if len(x) > MAX_QUANTIZED_ROWS:
        return through_copies(x, bias, out, lambda row, dense: dequantize_tiles(weight, row // TILE_OUTPUTS, dense))
    config = config_of(x)
    splits = config.splits(
        triton.cdiv(weight.outputs, TILE_OUTPUTS * config.tiles), weight.inputs // min(weight.group, CHUNK)
    )
    if splits == 1:
        _product(x, weight, bias, out[None], config)
        return out
    partial = torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)
    _product(x, weight, None, partial, config)
    return added_splits(partial, bias, out)


def added_splits(partial: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Writes the sum of partial [splits, rows, outputs], and the bias, into out [rows, outputs]."""
    blocks = triton.cdiv(out.numel(), SUM_OUTPUTS)
    _sum_kernel[(blocks,)](
        partial, bias, out, out.numel(), out.shape[1], SPLITS=len(partial), BLOCK=SUM_OUTPUTS, num_warps=4
    )
    return out


def _product(
    x: Tensor, weight: Int4Weight | Int8Weight, bias: Tensor | None, out: Tensor, config: SplitKConfig
) -> None:
    """Writes the sums of each split of the inputs into out [splits, rows, outputs]."""
    x, (packed, lower) = x.contiguous(), _plane_words(weight)
    grid = (triton.cdiv(len(packed), config.tiles), triton.cdiv(len(x), config.rows), len(out))
    kernel, rows, operands = _product_kernel, config.rows, [x]
    if config is INTEGERS:
        kernel, rows, operands = _integer_kernel, 8 if len(x) <= 8 else 16, _quantized(x, weight.group)
    kernel[grid](
        *operands,
        packed,
        lower,
        bias,
        out,
        len(x),
        weight.inputs,
        weight.outputs,
        len(packed),
        GROUP=weight.group,
        CHUNK=min(weight.group, CHUNK),
        TILES=config.tiles,
        ROWS=rows,
        SPLITS=len(out),
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _quantized(x: Tensor, group: int) -> list[Tensor]:
    """x [rows, inputs] as `_integer_kernel` takes it: planes, scales of groups and sums of chunks."""
    (rows, inputs), chunk = x.shape, min(group, CHUNK)
    planes = torch.empty(2, rows, inputs, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, inputs // group, dtype=torch.float32, device=x.device)
    sums = torch.empty(2, rows, inputs // chunk, dtype=torch.int32, device=x.device)
    _planes_kernel[rows, inputs // group](x, planes, scales, sums, rows, inputs, GROUP=group, CHUNK=chunk, num_warps=1)
    return [planes, scales, sums]


def dequantize_tiles(weight: Int4Weight | Int8Weight, first_tile: int, out: Tensor) -> None:
    """Writes the weight's rows from tile `first_tile` on into `out` [rows, inputs], as many as it has."""
    chunk, (packed, lower) = min(weight.group, CHUNK), _plane_words(weight)
    grid = (weight.inputs // chunk, triton.cdiv(len(out), TILE_OUTPUTS * COPY_TILES))
    _copy_kernel[grid](
        packed, lower, out, first_tile, weight.inputs, first_tile * TILE_OUTPUTS + len(out), len(packed),
        GROUP=weight.group, CHUNK=chunk, TILES=COPY_TILES, num_warps=4,
    )  # fmt: skip


def _plane_words(weight: Int4Weight | Int8Weight) -> tuple[Tensor, Tensor | None]:
    """The planes as 32-bit words; 4-bit weights have no second one."""
    words = [plane.packed.view(torch.int32) for plane in weight.planes]
    return words[0], words[1] if len(words) > 1 else None


def through_copies(x: Tensor, bias: Tensor | None, out: Tensor, dequantize: Callable[[int, Tensor], None]) -> Tensor:
    """Writes the library's product of x [rows, inputs] with a dense copy, a slab of outputs at a time, into out.

    dequantize: writes the weight's rows from a multiple of 16 on into a slab [rows, inputs] of x's dtype.
    """
    inputs, outputs = x.shape[1], out.shape[1]
    slab_rows = max(1, DENSE_COPY_BYTES // (inputs * x.element_size() * TILE_OUTPUTS)) * TILE_OUTPUTS
    slab = torch.empty(min(slab_rows, outputs), inputs, dtype=x.dtype, device=x.device)
    for first in range(0, outputs, slab_rows):
        dense = slab[: outputs - first]
        dequantize(first, dense)
        torch.mm(x, dense.t(), out=out[:, first : first + len(dense)])
    return out if bias is None else out.add_(bias)


# Rounding of GPTQ

ROUND_OUTPUTS = 16  # per program


@triton.jit
def _round_kernel(
    steps,  # float32 [outputs, GROUP]
    feedback,  # float32 [GROUP, GROUP]
    near,  # as steps, or None
    codes,  # out, as steps
    errors,  # out, as steps
    outputs,
    TOP: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    inputs = tl.arange(0, PADDED)
    inside = (output < outputs) & (inputs < GROUP)[None, :]
    at = output.to(tl.int64) * GROUP + inputs[None, :]
    remaining = tl.load(steps + at, mask=inside, other=0.0)
    error_of = tl.zeros_like(remaining)
    if near is not None:
        unrounded = tl.load(near + at, mask=inside, other=0.0)
        lowest, highest = tl.floor(unrounded), tl.ceil(unrounded)
    for i in range(GROUP):
        current = (inputs == i)[None, :]
        step = tl.sum(tl.where(current, remaining, 0.0), 1, keep_dims=True)
        # Codes are clamped anyway, and the addition would not round very large numbers.
        code = (tl.minimum(tl.maximum(step, -16.0), 2.0 * TOP + 2.0) + ROUNDER) - ROUNDER
        if near is not None:
            code = tl.maximum(code, tl.sum(tl.where(current, lowest, 0.0), 1, keep_dims=True))
            code = tl.minimum(code, tl.sum(tl.where(current, highest, 0.0), 1, keep_dims=True))
        code = tl.minimum(tl.maximum(code, 0.0), TOP * 1.0)
        error = step - code
        factors = tl.load(feedback + i * GROUP + inputs, mask=(inputs > i) & (inputs < GROUP), other=0.0)
        # A rounded input keeps its code, as no further error is passed to it.
        remaining = tl.where(current, code, remaining - error * factors[None, :])
        error_of = tl.where(current, error, error_of)
    tl.store(codes + at, remaining, mask=inside)
    tl.store(errors + at, error_of, mask=inside)


def gptq_round_triton(steps: Tensor, feedback: Tensor, near: Tensor | None, top_code: int) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.linear.gptq_round.gptq_round`."""
    steps = steps.contiguous()
    outputs, group = steps.shape
    codes, errors = torch.empty_like(steps), torch.empty_like(steps)
    _round_kernel[(triton.cdiv(outputs, ROUND_OUTPUTS),)](
        steps,
        feedback.contiguous(),
        None if near is None else near.contiguous(),
        codes,
        errors,
        outputs,
        TOP=top_code,
        GROUP=group,
        PADDED=triton.next_power_of_2(group),
        OUTPUTS=ROUND_OUTPUTS,
        num_warps=4,
    )
    return codes, errors
