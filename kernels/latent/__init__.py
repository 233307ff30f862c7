"""Decode attention over latent rows (MLA with absorbed projections): one row per token serves all query heads.

A row is a latent, which is also the value, and a rotated key that all heads share (DeepSeek-V2, section 2.1.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost


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
