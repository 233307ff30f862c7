"""Attention of an MLA model to a set of tokens for each head: only the chosen latents are widened (SpeContext, Fig 5e).

The runtime does not execute MLA; this is the reference of what a head's choice would mean there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def latent_head_attention(
    queries: Tensor, rope_queries: Tensor, latents: Tensor, rope_keys: Tensor, widen_keys: Tensor, widen_values: Tensor,
    index: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Output [heads, value_dim] of one token; MLA has as many sets as query heads, as MHA does.

    queries: [heads, nope_dim]; rope_queries: [heads, rope_dim]; latents: [tokens, rank], the cache c; rope_keys:
    [tokens, rope_dim], shared by the heads; widen_keys: [heads, nope_dim, rank]; widen_values: [heads, value_dim,
    rank]; index: int64 [heads, chosen]; scale: of the softmax.
    """
    chosen = latents[index]  # [heads, chosen, rank]
    keys, values = chosen @ widen_keys.mT, chosen @ widen_values.mT
    logits = torch.einsum("hd,hnd->hn", queries, keys) + torch.einsum("hr,hnr->hn", rope_queries, rope_keys[index])
    return torch.einsum("hn,hnv->hv", (logits * scale).softmax(-1), values)
