"""Triton kernels that read GGUF's quantized types: products of few rows, dense copies for many, and rows of a table.

Each dequantizes a tile in float32 and rounds it to the input's type, so a product equals one with the dense weight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.triton_helpers import INTERPRETED
from ridgeplan.kernels.linear.gguf import PARTS, GgufWeight
from ridgeplan.kernels.linear.triton import SplitKConfig, added_splits, through_copies
from ridgeplan.roofline.catalog.gguf_types import NESTED_GROUP
from ridgeplan.roofline.execution import MAX_QUANTIZED_ROWS, TILE_OUTPUTS

CHUNK = 128  # inputs of a tile, of which a row has 64 bytes of 4-bit codes
COPY_OUTPUTS = 16  # rows of a tile that is copied
# The best of 97 over both types and two sizes, at one row on an H200: up to 9% faster than half as many tiles.
FEW_ROWS = SplitKConfig(tiles=4, rows=16, max_splits=16, programs=1024, warps=4, stages=3)
MANY_ROWS = SplitKConfig(tiles=4, rows=64, max_splits=8, programs=512, warps=4, stages=3)
SUPER = tl.constexpr(NESTED_GROUP)


@triton.jit
def _octets(words, BITS: tl.constexpr):
    """Fields of BITS bits of words [OUTPUTS, n], int32 [OUTPUTS, n, 8]."""
    return (words[:, :, None] >> (BITS * tl.arange(0, 8))[None, None, :]) & ((1 << BITS) - 1)


@triton.jit
def _factors(factors, supers, row, step, inputs, GROUP: tl.constexpr, CHUNK: tl.constexpr, OUTPUTS: tl.constexpr):
    """Scales or minima of a chunk's groups, float32 [OUTPUTS, CHUNK / GROUP, 1]."""
    group = step * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    inside = (group < inputs // GROUP)[None, :]
    value = tl.load(factors + row[:, None] * (inputs // GROUP) + group[None, :], mask=inside, other=0.0).to(tl.float32)
    if supers is not None:
        value *= tl.load(supers + row * (inputs // SUPER) + step * CHUNK // SUPER).to(tl.float32)[:, None]
    return tl.reshape(value, (OUTPUTS, CHUNK // GROUP, 1))


@triton.jit
def _tile(
    codes, high, scales, minima, super_scales, super_minima, row, step, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, CHUNK: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """A chunk of the weight's rows `row` [OUTPUTS], float32 [OUTPUTS, CHUNK]; zeros beyond the inputs."""
    if BITS == 8:
        column = step * CHUNK + tl.arange(0, CHUNK)
        code = tl.load(codes + row[:, None] * inputs + column[None, :], mask=(column < inputs)[None, :], other=0)
        value = tl.reshape(code, (OUTPUTS, CHUNK // GROUP, GROUP)).to(tl.float32)
    else:
        octet = step * (CHUNK // 8) + tl.arange(0, CHUNK // 8)
        at, inside = row[:, None] * (inputs // 8) + octet[None, :], (octet < inputs // 8)[None, :]
        code = _octets(tl.load(codes + at, mask=inside, other=0), 4)
        if BITS > 4:
            code |= _octets(tl.load(high + at, mask=inside, other=0).to(tl.int32), BITS - 4) << 4
        # Below the exponent of 2^23 an integer is added to it: conversions would take more instructions.
        above = (tl.reshape(code, (OUTPUTS, CHUNK // GROUP, GROUP)) | 0x4B000000).to(tl.float32, bitcast=True)
        value = above - (8388608 + OFFSET)
    value *= _factors(scales, super_scales, row, step, inputs, GROUP, CHUNK, OUTPUTS)
    if minima is not None:
        value -= _factors(minima, super_minima, row, step, inputs, GROUP, CHUNK, OUTPUTS)
    return tl.reshape(value, (OUTPUTS, CHUNK))


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,  # [rows, inputs]
    codes,  # this and the next five: the parts of `GgufWeight`, or None
    high,
    scales,
    minima,
    super_scales,
    super_minima,
    bias,  # [outputs] or None
    out,  # [SPLITS, rows, outputs]
    rows,
    inputs,
    outputs,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    CHUNK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """ROWS rows of x times OUTPUTS rows of the weight, over one of SPLITS ranges of inputs."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    safe = tl.minimum(output, outputs - 1).to(tl.int64)
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    steps, split = tl.cdiv(inputs, CHUNK), tl.program_id(2)
    for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        column = step * CHUNK + tl.arange(0, CHUNK)
        inside = (row[:, None] < rows) & (column < inputs)[None, :]
        x_tile = tl.load(x + row[:, None].to(tl.int64) * inputs + column[None, :], mask=inside, other=0.0)
        weight = _tile(
            codes, high, scales, minima, super_scales, super_minima, safe, step, inputs,
            BITS, GROUP, OFFSET, CHUNK, OUTPUTS,
        ).to(x_tile.dtype)  # fmt: skip
        if INTERPRETED:  # the interpreter multiplies the bit patterns of bf16 (triton-lang/triton#11584)
            x_tile, weight = x_tile.to(tl.float32), weight.to(tl.float32)
        acc += tl.dot(x_tile, tl.trans(weight), input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    at = out + (split.to(tl.int64) * rows + row[:, None]) * outputs + output[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (output < outputs)[None, :])


@triton.jit(do_not_specialize=["first", "count"])
def _copy_kernel(
    ids,  # int64 [count], rows of the weight; None: those from `first` on
    codes,
    high,
    scales,
    minima,
    super_scales,
    super_minima,
    out,  # [count, inputs]
    first,
    count,
    inputs,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    CHUNK: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Writes a dense copy of one chunk of OUTPUTS of the rows."""
    place, step = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    safe = tl.minimum(place, count - 1)
    row = (first + safe).to(tl.int64) if ids is None else tl.load(ids + safe)
    weight = _tile(
        codes, high, scales, minima, super_scales, super_minima, row, step, inputs, BITS, GROUP, OFFSET, CHUNK, OUTPUTS
    )
    column = step * CHUNK + tl.arange(0, CHUNK)
    at = out + place[:, None].to(tl.int64) * inputs + column[None, :]
    tl.store(at, weight.to(out.dtype.element_ty), mask=(place < count)[:, None] & (column < inputs)[None, :])


def linear_gguf_triton(x: Tensor, weight: GgufWeight, bias: Tensor | None) -> Tensor:
    """See `ridgeplan.kernels.linear.linear_gguf`; x [rows, inputs]."""
    out = torch.empty(len(x), weight.outputs, dtype=x.dtype, device=x.device)
    if len(x) > MAX_QUANTIZED_ROWS:
        return through_copies(x, bias, out, lambda first, dense: copy_rows(weight, dense, first=first))
    config = FEW_ROWS if len(x) <= FEW_ROWS.rows else MANY_ROWS
    outputs = TILE_OUTPUTS * config.tiles
    programs = triton.cdiv(weight.outputs, outputs)
    splits = config.splits(programs, triton.cdiv(weight.inputs, CHUNK))
    sums = torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device) if splits > 1 else out[None]
    _product_kernel[(programs, triton.cdiv(len(x), config.rows), splits)](
        x.contiguous(),
        **_part_arguments(weight),
        bias=None if splits > 1 else bias,
        out=sums,
        rows=len(x),
        inputs=weight.inputs,
        outputs=weight.outputs,
        OUTPUTS=outputs,
        ROWS=config.rows,
        SPLITS=splits,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return added_splits(sums, bias, out) if splits > 1 else out


def copy_rows(weight: GgufWeight, out: Tensor, *, first: int = 0, ids: Tensor | None = None) -> None:
    """Writes the weight's rows from `first` on, or the rows `ids` [count], into out [count, inputs]."""
    grid = triton.cdiv(len(out), COPY_OUTPUTS), triton.cdiv(weight.inputs, CHUNK)
    _copy_kernel[grid](
        ids,
        **_part_arguments(weight),
        out=out,
        first=first,
        count=len(out),
        inputs=weight.inputs,
        OUTPUTS=COPY_OUTPUTS,
        num_warps=4,
    )


def _part_arguments(weight: GgufWeight) -> dict[str, Any]:
    """What all kernels take of a weight."""
    described = weight.format
    parts = {name: getattr(weight, name) for name in PARTS}
    return {**parts, "BITS": described.bits, "GROUP": described.group, "OFFSET": described.offset, "CHUNK": CHUNK}
