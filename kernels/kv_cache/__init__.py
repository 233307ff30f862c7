"""The hierarchical 4-bit KV cache: quantization and dequantization of whole groups, and the shift of the buffer.

Not here: attention over it (kernels/attention), and when groups are quantized (runtime/kv).
"""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache.cuda import find_quantize_kernel
from ridgeplan.kernels.kv_cache.layout import GroupWrite, QuantizedKV
from ridgeplan.kernels.kv_cache.reference import dequantize_reference, quantize_reference
from ridgeplan.kernels.kv_cache.token_rows import TokenRows
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost


def quantize(
    keys: Tensor,
    values: Tensor | None,
    out: QuantizedKV,
    group_index: Tensor,
    mask: Tensor | None = None,
    *,
    first_slot: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Writes whole groups of tokens as codes into `out` (QuantSpec sec. 4.2; the format is in reference.py).

    keys, values: [B, Hkv, n * G, D], any strides with contiguous channels. Keys get one (scale, minimum) per channel
    and group, values one per token; values are None where `out` holds keys alone. group_index: int32 [B] on the
    device, the first of the n groups to write in each row. mask: bool [B] or None; rows that are False stay as they
    are, so that a captured CUDA graph can flush conditionally. first_slot: int32 [B] on the device, or None; with it
    keys and values may have any length, and one group of each row is written, starting at that slot.

    Raises ValueError when the tokens are not whole groups, when shapes disagree with `out`, and for a wrong dtype or
    shape of group_index, mask or first_slot.
    """
    _check(keys, values, out, whole_groups=first_slot is None)
    require_rows(out.batch, torch.int32, keys.device, group_index=group_index, first_slot=first_slot)
    require_rows(out.batch, torch.bool, keys.device, mask=mask)
    _write(keys, values, GroupWrite(out, group_index, mask, first_slot), backend)


def _write(keys: Tensor, values: Tensor | None, target: GroupWrite, backend: Backend) -> None:
    if not uses_gpu_kernel(backend, keys):
        quantize_reference(keys, values, target)
        return
    kernel = find_quantize_kernel(keys, values, target.out) if backend == "auto" else None
    if kernel is not None:
        kernel.run(keys, values, target)
        return
    from ridgeplan.kernels.kv_cache.triton import quantize_triton

    quantize_triton(keys, values, target)


def quantize_to_pages(
    keys: Tensor, values: Tensor, out: QuantizedKV, pages: Tensor, *, backend: Backend = "auto"
) -> None:
    """Writes whole groups of tokens as codes into pages of a paged cache, each of which holds one group.

    keys, values: [B, Hkv, n * G, D] as for `quantize`. out: one row of one group per page. pages: int32 [B, n] on the
    device, the page of each group; groups with a negative one are not written.
    Raises ValueError as `quantize` does, and for `out` with several groups per row.
    """
    batch, kv_heads, tokens, head_dim = keys.shape
    if (out.groups, out.kv_heads, out.head_dim) != (1, kv_heads, head_dim) or values.shape != keys.shape:
        raise ValueError(
            f"keys {list(keys.shape)} and values {list(values.shape)} do not fit pages of {out.groups} groups, "
            f"{out.kv_heads} KV heads and head_dim {out.head_dim}"
        )
    if pages.dtype != torch.int32 or pages.shape != (batch, tokens // out.group) or tokens % out.group:
        raise ValueError(f"pages {pages.dtype} {list(pages.shape)} do not fit {tokens} tokens in groups of {out.group}")
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError("keys and values need contiguous channels (stride 1 in the last dimension)")
    _write(keys, values, GroupWrite(out, pages, paged=True), backend)


def append_to_pages(
    keys: Tensor, values: Tensor, key_store: Tensor, value_store: Tensor, out: QuantizedKV, slots: Tensor,
    pages: Tensor, *, backend: Backend = "auto",
) -> None:  # fmt: skip
    """Writes tokens to the buffers of open pages, and a buffer that a token fills to its page, as codes.

    keys, values: [N, Hkv, D], any strides with contiguous channels. key_store, value_store: [buffers, Hkv, C, D],
    contiguous, C of G slots or more. out: as for `quantize_to_pages`. slots: int32 [N] on the device, buffer * C +
    place; tokens with a negative one are not written. pages: int32 [N], the page of the first G slots of the token's
    buffer where the token is the last of them, else negative. No other token of such a buffer may be among the N.

    Raises ValueError when shapes, dtypes or layouts disagree.
    """
    count, kv_heads, head_dim = keys.shape
    fits = (*key_store.shape[1:2], *key_store.shape[3:]) == (kv_heads, head_dim) and key_store.shape[2] >= out.group
    if values.shape != keys.shape or not fits:
        raise ValueError(
            f"keys {list(keys.shape)} and values {list(values.shape)} do not fit buffers {list(key_store.shape)}"
        )
    if value_store.shape != key_store.shape or not (key_store.is_contiguous() and value_store.is_contiguous()):
        raise ValueError("both stores of open pages must be contiguous, of one shape")
    if (out.groups, out.kv_heads, out.head_dim) != (1, kv_heads, head_dim):
        sizes = f"{out.groups} groups, {out.kv_heads} KV heads and head_dim {out.head_dim}"
        raise ValueError(f"keys {list(keys.shape)} do not fit pages of {sizes}")
    require_rows(count, torch.int32, keys.device, slots=slots, pages=pages)
    if not uses_gpu_kernel(backend, keys):
        append_reference(keys, values, key_store, value_store, out, slots, pages)
        return
    from ridgeplan.kernels.kv_cache.triton import append_triton

    append_triton(keys, values, key_store, value_store, out, slots, pages)


def append_reference(
    keys: Tensor, values: Tensor, key_store: Tensor, value_store: Tensor, out: QuantizedKV, slots: Tensor, pages: Tensor
) -> None:
    """The same in plain torch."""
    written = (slots >= 0).nonzero().squeeze(1)
    capacity = key_store.shape[2]
    buffers, places = slots[written].long() // capacity, slots[written].long() % capacity
    for store, tokens in ((key_store, keys), (value_store, values)):
        store[buffers, :, places] = tokens[written].to(store.dtype)
    closing = pages[written] >= 0
    keys, values = (store[buffers[closing], :, : out.group] for store in (key_store, value_store))
    quantize_to_pages(keys, values, out, pages[written][closing, None], backend="reference")


def dequantize(
    codes: QuantizedKV, lower: bool, dtype: torch.dtype = torch.float32, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, groups * G, D] of `codes` in `dtype`: INT8 when `lower`, else INT4.

    Raises ValueError when `lower` is set for codes that hold the upper plane only, and for codes of keys alone.
    """
    require_lower(codes, lower)
    if not codes.has_values:
        raise ValueError("codes are of keys alone; allowed: of keys and values")
    if not uses_gpu_kernel(backend, codes.key_upper):
        return dequantize_reference(codes, lower, dtype)
    from ridgeplan.kernels.kv_cache.triton import dequantize_triton

    return dequantize_triton(codes, lower, dtype)


def require_lower(codes: QuantizedKV | TokenRows, lower: bool) -> None:
    """Raises ValueError when lower codes are requested of a cache that holds upper codes only."""
    if lower and codes.planes == 1:
        raise ValueError("lower=True needs lower codes, this QuantizedKV holds the upper plane only")


def require_rows(batch: int, dtype: torch.dtype, device: torch.device, **tensors: Tensor | None) -> None:
    """Raises ValueError for a tensor that is not `dtype` [batch] on `device`: CUDA C++ kernels only see pointers."""
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.dtype != dtype or tensor.shape != (batch,) or tensor.device != device):
            given = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name} is {given}; allowed: {dtype} [{batch}] on {device}")


def _check(keys: Tensor, values: Tensor | None, out: QuantizedKV, whole_groups: bool) -> None:
    batch, kv_heads, tokens, head_dim = keys.shape
    if (values is not None) != out.has_values:
        raise ValueError(f"values are {'missing' if values is None else 'given'}; allowed: as `out` holds them")
    if values is not None and values.shape != keys.shape:
        raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} must have one shape")
    if (batch, kv_heads, head_dim) != (out.batch, out.kv_heads, out.head_dim):
        raise ValueError(
            f"keys {list(keys.shape)} do not fit codes of batch {out.batch}, {out.kv_heads} KV heads "
            f"and head_dim {out.head_dim}"
        )
    if whole_groups and tokens % out.group:
        raise ValueError(f"{tokens} tokens are not whole groups of {out.group}")
    if keys.stride(-1) != 1 or (values is not None and values.stride(-1) != 1):
        raise ValueError("keys and values need contiguous channels (stride 1 in the last dimension)")


def shift_slots(keys: Tensor, values: Tensor | None, group: int, mask: Tensor, *, backend: Backend = "auto") -> None:
    """Moves slots `group`, `group` + 1, ... of rows where `mask` is True to slots 0, 1, ..., in place.

    keys, values: [B, Hkv, slots, D], any strides with contiguous channels; values may be None. mask: bool [B] on the
    device, so that a captured CUDA graph can flush conditionally (QuantSpec sec. 4.3.2). The last `group` slots keep
    their contents.
    Raises ValueError when shapes disagree, and for a group of 0 slots or of more than the buffer has.
    """
    value_shape = keys.shape if values is None else values.shape
    if keys.shape != value_shape or mask.shape != keys.shape[:1]:
        raise ValueError(
            f"keys {list(keys.shape)}, values {list(value_shape)} and mask {list(mask.shape)} must have the same rows "
            "and keys and values one shape"
        )
    if not 0 < group <= keys.shape[2]:
        raise ValueError(f"group is {group}; allowed: 1 to the {keys.shape[2]} slots of the buffer")
    if not uses_gpu_kernel(backend, keys):
        shift_slots_reference(keys, values, group, mask)
        return
    from ridgeplan.kernels.kv_cache.triton import shift_slots_triton

    shift_slots_triton(keys, values, group, mask)


def shift_slots_reference(keys: Tensor, values: Tensor | None, group: int, mask: Tensor) -> None:
    """The same in plain torch. Only rows that move are read, which are few in most rounds."""
    rows = mask.nonzero().squeeze(1)
    for store in (keys,) if values is None else (keys, values):
        store[rows, :, : store.shape[2] - group] = store[rows, :, group:]


def quantize_cost(keys: Tensor, group: int, planes: int, values: int = 1) -> Cost:
    """Cost of `quantize` for all of keys [B, Hkv, n * G, D] and as many values, or none, into `planes` planes."""
    return ops.quantize(*_sizes(keys), keys.element_size(), group, planes, values)


def dequantize_cost(keys: Tensor, group: int, planes: int) -> Cost:
    """Cost of `dequantize` of `planes` planes into keys [B, Hkv, n * G, D] and as many values."""
    return ops.dequantize(*_sizes(keys), keys.element_size(), group, planes)


def shift_slots_cost(keys: Tensor, group: int) -> Cost:
    """Cost of `shift_slots` where every row shifts."""
    batch, kv_heads, head_dim, slots = _sizes(keys)
    return ops.shift_slots(batch, kv_heads, head_dim, slots - group, keys.element_size())


def _sizes(keys: Tensor) -> tuple[int, int, int, int]:
    batch, kv_heads, tokens, head_dim = keys.shape
    return batch, kv_heads, head_dim, tokens
