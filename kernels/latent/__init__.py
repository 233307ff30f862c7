"""Decode attention over latent rows (MLA with absorbed projections): one row per token serves all query heads.

A row is a latent, which is also the value, and a rotated key that all heads share (DeepSeek-V2, section 2.1.3). A step
is `absorb_append`, `latent_attention` and `project_heads`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
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
    rows: Tensor,
    slots: Tensor,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Queries as they meet latent rows, [B, T, Hq, L + R]; the new tokens' rows go to each sequence's `slots`.

    queries: [B, T, Hq (P + R)], of each head P channels without RoPE and R with it. latents: [B, T, L + R], a latent
    ahead of its RMSNorm of weight `norm` [L], and the shared key ahead of RoPE. tables: of the tokens' positions, [B,
    T, R/2]. factors: [Hq, P, L], from latents to keys. rows: [at least B, slots, L + R], written in place. slots:
    int64 [B, T], distinct within a sequence. Raises ValueError when shapes disagree.
    """
    (heads, plain, latent), rope = factors.shape, 2 * tables[0].shape[-1]
    widths = heads * (plain + rope), latent + rope, latent
    if (queries.shape[-1], latents.shape[-1], len(norm)) != widths or rows.shape[-1] != latent + rope:
        raise ValueError(
            f"queries {list(queries.shape)}, latents {list(latents.shape)}, norm {list(norm.shape)} and rows "
            f"{list(rows.shape)} do not fit factors {list(factors.shape)} and RoPE over {rope} channels"
        )
    if slots.shape != queries.shape[:2] or latents.shape[:2] != slots.shape or len(rows) < len(slots):
        raise ValueError(f"slots {list(slots.shape)} do not fit {list(queries.shape[:2])} tokens and {len(rows)} rows")
    absorbed = queries.new_empty(*queries.shape[:2], heads, latent + rope)
    split = queries.unflatten(-1, (heads, plain + rope))
    project_heads(split[..., :plain], factors, absorbed[..., :latent])
    if uses_gpu_kernel(backend, queries):
        from ridgeplan.kernels.latent.triton import rotate_append_triton

        rotate_append_triton(queries, latents, tables, norm, eps, rows, slots, absorbed)
        return absorbed
    absorbed[..., latent:] = rotate(split[..., plain:], *tables)
    normed = add_rms_norm_reference(latents[..., :latent], None, norm, eps)[1]
    shared = rotate(latents[..., latent:].unsqueeze(-2), *tables).squeeze(-2)
    new = torch.cat([normed, shared], dim=-1)
    rows[: len(slots)].scatter_(1, slots[..., None].expand_as(new), new)
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


def latent_attention(
    q: Tensor, rows: Tensor, begin: Tensor, end: Tensor, latent: int, scale: float, *, backend: Backend = "auto"
) -> Tensor:
    """Attention of q [B, T, Hq, R] to rows [B, C, R] -> [B, T, Hq, latent], in q's dtype, sums in float32.

    latent: leading channels of a row that are the value. begin, end: int32 [B], the range of slots that the first query
    sees; each later query sees one more. scale: of scores. Raises ValueError where shapes disagree.
    """
    if q.shape[0] != len(rows) or q.shape[3] != rows.shape[2] or not 0 < latent < rows.shape[2]:
        raise ValueError(f"q {list(q.shape)} does not fit rows {list(rows.shape)} with latents of {latent}")
    if begin.shape != (len(rows),) or end.shape != begin.shape:
        raise ValueError(f"begin {list(begin.shape)} and end {list(end.shape)} do not fit {len(rows)} rows")
    if not uses_gpu_kernel(backend, q):
        return latent_attention_reference(q, rows, begin, end, latent, scale)
    from ridgeplan.kernels.latent.triton import latent_attention_triton

    return latent_attention_triton(q, rows, begin, end, latent, scale)


def latent_attention_reference(
    q: Tensor, rows: Tensor, begin: Tensor, end: Tensor, latent: int, scale: float
) -> Tensor:
    """The same in plain torch, one sequence at a time, in float32."""
    queries, out = q.shape[1], q.new_empty(*q.shape[:3], latent)
    later = torch.arange(queries, device=q.device)
    for row, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        text = rows[row, first : last + queries - 1].float()
        scores = torch.einsum("thr,nr->thn", q[row].float(), text) * scale
        hidden = torch.arange(len(text), device=q.device) >= (last - first + later)[:, None]
        weights = scores.masked_fill_(hidden[:, None], float("-inf")).softmax(-1)
        out[row] = torch.einsum("thn,nr->thr", weights, text[:, :latent])
    return out


def latent_attention_cost(q: Tensor, tokens: int, latent: int, splits: int) -> Cost:
    """Cost of `latent_attention`, merge included, where each sequence sees `tokens` tokens."""
    batch, queries, q_heads, row = q.shape
    kv = ops.KVRead(0, tokens, 0, q.element_size(), 1, splits)
    return ops.latent_attention(batch, queries, q_heads, latent, row - latent, row, kv)
