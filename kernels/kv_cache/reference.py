"""Hierarchical quantization in plain torch: the kernels' reference, and the definition of the number format.

QuantSpec sec. 4.2: x ~ scale * U + minimum with upper codes U in 0..15 (INT4), and x ~ scale * (U + L/16) + minimum
with lower codes L in -8..7 (INT8). The residual is computed in float32 from the stored scale and minimum, which are
rounded to float16 (the paper leaves this open), and L is stored as L + 8.
"""

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import GroupWrite, QuantizedKV


def encode(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of `x` with one scale and minimum along `dim`: upper, lower (uint8, shaped as x), scale, minimum (float16).

    Multiplies by the reciprocal of the scale and rounds to the nearest integer, ties to even, which GPUs do fast.
    """
    x = x.float()
    low, high = x.aminmax(dim=dim, keepdim=True)
    scale, minimum = ((high - low) * (1 / 15)).half(), low.half()
    # A constant range has scale 0 and decodes to its minimum; dividing by 1 instead keeps the quotients finite.
    step = torch.where(scale == 0, 1.0, scale.float())
    position = (x - minimum.float()) * (1 / step)
    upper = position.round().clamp(0, 15)
    lower = (16 * (position - upper)).round().clamp(-8, 7) + 8
    return upper.byte(), lower.byte(), scale.squeeze(dim), minimum.squeeze(dim)


def pack(codes: Tensor) -> Tensor:
    """Packs 4-bit codes [..., n] into bytes [..., n/2]: the first half in the low nibbles, the second in the high."""
    first, second = codes.chunk(2, dim=-1)
    return first | (second << 4)


def unpack(upper: Tensor, lower: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both halves of a packed axis as float32 codes: 0..15 from `upper`, or 0..255 as upper * 16 + lower."""
    if lower is None:
        return (upper & 15).float(), (upper >> 4).float()
    return ((upper << 4) | (lower & 15)).float(), ((upper & 240) | (lower >> 4)).float()


def affine(scale: Tensor, minimum: Tensor, lower: bool) -> tuple[Tensor, Tensor]:
    """(step, zero) in float32, so that x = step * code + zero with the codes of `unpack`.

    With lower codes, S * (U + L/16) + Z = S/16 * (16 U + (L + 8)) + (Z - S/2).
    """
    scale, minimum = scale.float(), minimum.float()
    return (scale / 16, minimum - scale / 2) if lower else (scale, minimum)


def quantize_reference(keys: Tensor, values: Tensor | None, target: GroupWrite) -> None:
    """See `ridgeplan.kernels.kv_cache.quantize`."""
    out, group_index, mask, first_slot, paged = target
    parts = [keys] if values is None else [keys, values]
    if paged:  # a row of its own for every group that is written
        parts = [x.unflatten(2, (-1, out.group)).transpose(1, 2).flatten(0, 1) for x in parts]
        group_index = group_index.flatten()
        mask = group_index >= 0
    if mask is None:
        rows = torch.arange(parts[0].shape[0], device=keys.device)
    else:
        rows = mask.nonzero().squeeze(1)
        parts = [x[rows] for x in parts]  # most rounds flush few rows; only those are encoded
    if first_slot is not None:
        slots = first_slot.long()[rows, None] + torch.arange(out.group, device=keys.device)
        slots = slots[:, None, :, None].expand(-1, out.kv_heads, -1, out.head_dim)
        parts = [x.gather(2, slots) for x in parts]
    blocks = (-1, out.group)
    written = group_index.long()[rows, None] + torch.arange(parts[0].shape[2] // out.group, device=keys.device)
    if paged:
        rows, written = written[:, 0], torch.zeros_like(written)

    def write(plane: Tensor | None, codes: Tensor) -> None:
        if plane is not None:  # indexing with two lists puts [rows, groups] before the KV heads
            plane[rows[:, None], :, written] = codes.transpose(1, 2)

    upper, lower, scale, minimum = encode(parts[0].unflatten(2, blocks), dim=3)
    write(out.key_upper, pack(upper))
    write(out.key_lower, pack(lower))
    write(out.key_scale, scale)
    write(out.key_min, minimum)
    if values is None:
        return
    upper, lower, scale, minimum = encode(parts[1].unflatten(2, blocks), dim=4)
    write(out.value_upper, pack(upper.mT))
    write(out.value_lower, pack(lower.mT))
    write(out.value_scale, scale)
    write(out.value_min, minimum)


def dequantize_reference(codes: QuantizedKV, lower: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.kv_cache.dequantize`."""
    keys = dequantize_keys(codes, lower)
    halves = unpack(codes.value_upper, codes.value_lower if lower else None)
    step, zero = affine(codes.value_scale, codes.value_min, lower)
    values = torch.cat(halves, dim=-1) * step[..., None, :] + zero[..., None, :]
    return keys.to(dtype), values.mT.to(dtype).reshape(keys.shape)


def dequantize_keys(codes: QuantizedKV, lower: bool) -> Tensor:
    """Keys [B, Hkv, groups * G, D] in float32."""
    halves = unpack(codes.key_upper, codes.key_lower if lower else None)
    step, zero = affine(codes.key_scale, codes.key_min, lower)
    return (torch.cat(halves, dim=-1) * step[..., None, :] + zero[..., None, :]).flatten(2, 3)
