"""Decode attention over latent rows (MLA with absorbed projections): one row per token serves all query heads.

A row is a latent, which is also the value, and a rotated key that all heads share (DeepSeek-V2, section 2.1.3). A step
is `absorb_append`, `latent_attention` and `project_heads`. Latents may be codes; rotated keys are in full precision.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.kv_cache import require_lower
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.reference import dequantize_keys
from ridgeplan.kernels.layer import Tables, add_rms_norm_reference, rotate
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost


def absorb_append(
    queries: Tensor,
    latents: Tensor,
    tables: Tables,
    norm: Tensor,
    eps: float,
    factors: Tensor,
    stores: tuple[Tensor, Tensor],
    slots: tuple[Tensor, Tensor],
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Queries as they meet latent rows, [B, T, Hq, L + R]; the new tokens' rows go to each sequence's `slots`.

    queries: [B, T, Hq (P + R)], of each head P channels without RoPE and R with it. latents: [B, T, L + R], a latent
    ahead of its RMSNorm of weight `norm` [L], and the shared key ahead of RoPE. tables: of the tokens' positions, [B,
    T, R/2]. factors: [Hq, P, L], from latents to keys. stores: of latents [at least B, slots, L] and of rotated keys
    [at least B, slots, R], written in place. slots: in each of them int64 [B, T], distinct within a sequence. Raises
    ValueError when shapes disagree.
    """
    (heads, plain, latent), rope = factors.shape, 2 * tables[0].shape[-1]
    widths = heads * (plain + rope), latent + rope, latent
    if (queries.shape[-1], latents.shape[-1], len(norm)) != widths or [x.shape[-1] for x in stores] != [latent, rope]:
        raise ValueError(
            f"queries {list(queries.shape)}, latents {list(latents.shape)}, norm {list(norm.shape)} and stores "
            f"{[list(x.shape) for x in stores]} do not fit factors {list(factors.shape)} and RoPE over {rope} channels"
        )
    if {x.shape for x in (*slots, latents[..., 0])} != {queries.shape[:2]} or min(map(len, stores)) < len(queries):
        raise ValueError(
            f"slots {[list(x.shape) for x in slots]} do not fit {list(queries.shape[:2])} tokens and stores of "
            f"{[len(x) for x in stores]} rows"
        )
    absorbed = queries.new_empty(*queries.shape[:2], heads, latent + rope)
    split = queries.unflatten(-1, (heads, plain + rope))
    project_heads(split[..., :plain], factors, absorbed[..., :latent])
    if uses_gpu_kernel(backend, queries):
        from ridgeplan.kernels.latent.triton import rotate_append_triton

        rotate_append_triton(queries, latents, tables, norm, eps, stores, slots, absorbed)
        return absorbed
    absorbed[..., latent:] = rotate(split[..., plain:], *tables)
    normed = add_rms_norm_reference(latents[..., :latent], None, norm, eps)[1]
    shared = rotate(latents[..., latent:].unsqueeze(-2), *tables).squeeze(-2)
    for store, places, new in zip(stores, slots, (normed, shared), strict=True):
        store[: len(new)].scatter_(1, places[..., None].expand_as(new), new)
    return absorbed


def project_heads(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Each head's product: x [B, T, Hq, K] times weight [Hq, K, N] into `out` [B, T, Hq, N], which is returned.

    Strides are free where channels are contiguous: one batched product, without copies.
    """
    by_head = x.flatten(0, 1).transpose(0, 1)
    torch.bmm(by_head, weight, out=out.view(-1, *out.shape[2:]).transpose(0, 1))
    return out


def absorb_append_cost(queries: Tensor, tables: Tables, factors: Tensor) -> tuple[Cost, Cost]:
    """Costs of `absorb_append`: of its product, and of rotation, norm and append."""
    (heads, plain, latent), rope, size = factors.shape, 2 * tables[0].shape[-1], queries.element_size()
    tokens = queries.shape[0] * queries.shape[1]
    product = ops.matmul(tokens, heads * plain, heads * latent, factors.numel(), size, size)
    return product, ops.rope_append(tokens, heads * rope + latent + rope, rope, latent, size)


class LatentInputs(NamedTuple):
    """Arguments of `latent_attention`, which checks them."""

    q: Tensor
    latents: Tensor
    rotated: Tensor
    begin: Tensor
    end: Tensor
    scale: float
    codes: QuantizedKV | None
    groups: Tensor | None
    lower: bool


def latent_attention(
    q: Tensor,
    latents: Tensor,
    rotated: Tensor,
    begin: Tensor,
    end: Tensor,
    scale: float,
    codes: QuantizedKV | None = None,
    groups: Tensor | None = None,
    *,
    lower: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Attention of q [B, T, Hq, L + R] to latent rows -> [B, T, Hq, L], in q's dtype, sums in float32.

    latents: [B, C, L], also the values. rotated: [B, S, R], the rest of the keys. begin, end: int32 [B], the range of
    slots that the first query sees; each later query sees one more. scale: of scores. codes with groups (int32 [B]):
    every query also sees the row's first groups[b] groups of latents, as INT8 when `lower`, else as INT4. Rotated keys
    are then those of the groups, followed by those of slots from `begin` on; without codes a slot's are in its place.
    Raises ValueError where shapes disagree, or `lower` is set for codes that hold the upper plane only.
    """
    latent, batch = latents.shape[2], len(q)
    fits = len(latents) == len(rotated) == batch and q.shape[3] == latent + rotated.shape[2]
    if not fits or begin.shape != (batch,) or end.shape != (batch,):
        raise ValueError(
            f"q {list(q.shape)}, latents {list(latents.shape)}, rotated {list(rotated.shape)}, begin "
            f"{list(begin.shape)} and end {list(end.shape)} do not fit"
        )
    if codes is not None:
        require_lower(codes, lower)
        if groups is None or groups.shape != (batch,) or codes.batch != batch:
            shape = None if groups is None else list(groups.shape)
            raise ValueError(f"codes of {codes.batch} rows and groups {shape} do not fit {batch} rows")
        if codes.kv_heads * codes.head_dim != latent or codes.has_values:
            raise ValueError(
                f"codes of {codes.kv_heads} x {codes.head_dim} channels do not fit latents of {latent}, as keys alone"
            )
    inputs = LatentInputs(q, latents, rotated, begin, end, scale, codes, groups, lower)
    if not uses_gpu_kernel(backend, q):
        return latent_attention_reference(inputs)
    from ridgeplan.kernels.latent.triton import latent_attention_triton

    return latent_attention_triton(inputs)


def latent_attention_reference(inputs: LatentInputs) -> Tensor:
    """The same in plain torch, one sequence at a time, in float32."""
    q, latents, rotated, begin, end, scale, codes, groups, lower = inputs
    queries, out = q.shape[1], q.new_empty(*q.shape[:3], latents.shape[2])
    later = torch.arange(queries, device=q.device)
    decoded = [0] * len(q) if groups is None or codes is None else (groups * codes.group).tolist()
    for row, (first, last, coded) in enumerate(zip(begin.tolist(), end.tolist(), decoded, strict=True)):
        text = latents[row, first : last + queries - 1].float()
        visible = coded + last - first  # of the first query
        if codes is not None:
            heads = dequantize_keys(codes.rows(slice(row, row + 1)), lower)[0, :, :coded]
            text = torch.cat([heads.transpose(0, 1).flatten(1), text])
        start = 0 if codes is not None else first
        keys = torch.cat([text, rotated[row, start : start + len(text)].float()], dim=-1)
        scores = torch.einsum("thr,nr->thn", q[row].float(), keys) * scale
        hidden = torch.arange(len(text), device=q.device) >= (visible + later)[:, None]
        weights = scores.masked_fill_(hidden[:, None], float("-inf")).softmax(-1)
        out[row] = torch.einsum("thn,nr->thr", weights, text)
    return out


def latent_attention_cost(
    q: Tensor, latent: int, quantized_tokens: int, full_tokens: int, bits: int, group: int, splits: int
) -> Cost:
    """Cost of `latent_attention`, merge included, where each sequence sees `quantized_tokens` and `full_tokens`.

    bits: of the codes, 4 or 8, or 0 without codes.
    """
    batch, queries, q_heads, row = q.shape
    kv = ops.KVRead(quantized_tokens, full_tokens, bits, q.element_size(), group, splits)
    return ops.latent_attention(batch, queries, q_heads, latent, row - latent, kv)
