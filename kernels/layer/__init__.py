"""The small operations of a layer: RMSNorm with the residual, rotary embedding with the cache append, SwiGLU.

Not here: matrix products (kernels/linear) and attention (kernels/attention).
"""

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost


def add_rms_norm(
    hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """(hidden + update, RMSNorm of that): hidden and update [..., H], weight [H]; without update `hidden` itself.

    RMSNorm (Zhang and Sennrich, 2019, eq. 4) as in Llama, with a weight in the model's dtype or in
    float32: the sum is rounded to the model's dtype, statistics and
    scaling are float32, and the result is rounded once. On Hopper and newer GPUs the weight is read while earlier
    kernels of the stream may still run (see device/cuda.py). Raises ValueError when shapes disagree.
    """
    if weight.shape != hidden.shape[-1:]:
        raise ValueError(f"weight {list(weight.shape)} does not fit hidden states {list(hidden.shape)}")
    if update is not None and update.shape != hidden.shape:
        raise ValueError(f"update {list(update.shape)} must have the shape of hidden, {list(hidden.shape)}")
    if not uses_gpu_kernel(backend, hidden):
        return add_rms_norm_reference(hidden, update, weight, eps)
    from ridgeplan.kernels.layer.triton import add_rms_norm_triton

    return add_rms_norm_triton(hidden, update, weight, eps)


def add_rms_norm_reference(hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    total = hidden if update is None else hidden + update
    normed = functional.rms_norm(total.to(weight.dtype), weight.shape, weight, eps)  # float32 weights, float32 rows
    return total, normed.to(total.dtype)


def add_rms_norm_cost(hidden: Tensor, update: Tensor | None, weight: Tensor) -> Cost:
    """Cost of `add_rms_norm`."""
    rows, streams = hidden.numel() // len(weight), 1 if update is None else 2
    return ops.add_rms_norm(rows, len(weight), hidden.element_size(), streams)


Tables = tuple[Tensor, Tensor]


def rotary_tables(positions: Tensor, frequencies: Tensor, scale: float, *, backend: Backend = "auto") -> Tables:
    """Cosines and sines, float32 [..., D/2], of positions int64 [...] times frequencies float32 [D/2].

    RoFormer (Su et al., 2021) sec. 3.4.2. Frequencies are in radians per token; `scale` is YaRN's factor on both
    tables. Angles are float32 products as in transformers; positions are exact up to 2 ** 24.
    """
    if not uses_gpu_kernel(backend, frequencies):
        angles = positions[..., None] * frequencies
        return angles.cos() * scale, angles.sin() * scale
    from ridgeplan.kernels.layer.triton import rotary_tables_triton

    return rotary_tables_triton(positions, frequencies, scale)


def rope_append(
    qkv: Tensor, tables: Tables, keys: Tensor, values: Tensor, slots: Tensor, q_heads: int, *,
    qk_norm: Tensor | None = None, eps: float = 0.0, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Rotated queries [B, T, Hq, D]; the new tokens' rotated keys and their values go to each row's `slots`.

    qkv: [B, T, (Hq + 2 Hkv) D], queries, then keys, then values. tables: of the tokens' positions, [B, T, D/2].
    keys, values: [at least B, Hkv, slots, D], any strides with contiguous channels, written in place. slots: int64
    [B, T], distinct within a row. qk_norm: [Hq + Hkv, D], weights of an RMSNorm with `eps` over each head of queries
    and keys before rotation, in their dtype (Qwen3; float32 of
    Gemma 3). Channel i rotates with channel i + D/2 (Hugging Face's order), in float32, rounded
    once.

    Raises ValueError when shapes disagree.
    """
    _check(qkv, tables, keys, values, slots, q_heads, qk_norm)
    if not uses_gpu_kernel(backend, qkv):
        return rope_append_reference(qkv, tables, keys, values, slots, q_heads, qk_norm, eps)
    from ridgeplan.kernels.layer.triton import rope_append_triton

    return rope_append_triton(qkv, tables, keys, values, slots, q_heads, qk_norm, eps)


def rope_append_reference(
    qkv: Tensor,
    tables: Tables,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    q_heads: int,
    qk_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """The same in plain torch."""
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    heads = qkv.unflatten(-1, (-1, head_dim))
    rotated, new_values = heads.split_with_sizes((q_heads + kv_heads, kv_heads), dim=-2)
    if qk_norm is not None:
        rotated = functional.rms_norm(rotated.to(qk_norm.dtype), (head_dim,), eps=eps) * qk_norm
    queries, new_keys = rotate(rotated, *tables).to(qkv.dtype).split_with_sizes((q_heads, kv_heads), dim=-2)
    for store, new in ((keys, new_keys), (values, new_values)):
        for row, at in enumerate(slots.unbind()):
            store[row].index_copy_(1, at, new[row].transpose(0, 1))
    return queries


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rope_append_cost(qkv: Tensor, tables: Tables, slots: Tensor, qk_norm: Tensor | None) -> Cost:
    """Cost of `rope_append`."""
    rotary_dim, normed_width = 2 * tables[0].shape[-1], 0 if qk_norm is None else qk_norm.numel()
    return ops.rope_append(slots.numel(), qkv.shape[-1], rotary_dim, normed_width, qkv.element_size())


def _check(
    qkv: Tensor, tables: Tables, keys: Tensor, values: Tensor, slots: Tensor, q_heads: int, qk_norm: Tensor | None
) -> None:
    _, kv_heads, _, head_dim = keys.shape
    batch, tokens, width = qkv.shape
    if width != (q_heads + 2 * kv_heads) * head_dim:
        raise ValueError(
            f"qkv is {width} wide; allowed: {(q_heads + 2 * kv_heads) * head_dim}, of {q_heads} query heads and twice "
            f"{kv_heads} KV heads of {head_dim}"
        )
    if keys.shape != values.shape or len(keys) < batch:
        raise ValueError(
            f"keys {list(keys.shape)} and values {list(values.shape)} must have one shape with {batch} rows or more"
        )
    if slots.shape != (batch, tokens) or tables[0].shape != (batch, tokens, head_dim // 2):
        raise ValueError(
            f"slots {list(slots.shape)} and tables {list(tables[0].shape)} do not fit {[batch, tokens]} tokens"
        )
    if qk_norm is not None and qk_norm.shape != (q_heads + kv_heads, head_dim):
        raise ValueError(f"qk_norm is {list(qk_norm.shape)}; allowed: {[q_heads + kv_heads, head_dim]}")


def swiglu(gate_up: Tensor, *, activation: str = "silu", backend: Backend = "auto") -> Tensor:
    """silu(gate) * up, [..., I], of gate_up [..., 2 I]: the gate first, then up (Shazeer, 2020, eq. 6).

    activation: "silu", or "gelu_tanh" for GELU in its tanh form (GeGLU). It is rounded to the tensor's dtype before the
    product, as in transformers. Raises ValueError when the last dimension is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up share the last dimension, which is {gate_up.shape[-1]}; allowed: even widths")
    if not uses_gpu_kernel(backend, gate_up):
        return swiglu_reference(gate_up, activation)
    from ridgeplan.kernels.layer.triton import swiglu_triton

    return swiglu_triton(gate_up, activation)


def swiglu_reference(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """The same in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return activated.mul_(up)  # in place: a long prompt's activations are large


def swiglu_cost(gate_up: Tensor) -> Cost:
    """Cost of `swiglu`."""
    width = gate_up.shape[-1]
    return ops.swiglu(gate_up.numel() // width, width // 2, gate_up.element_size())
