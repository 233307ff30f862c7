"""Latent attention (MLA) of a layer: a step over cached latent rows with absorbed projections.

A token's row is a normed latent, from which all heads' keys and values follow, and one rotated key that they share. A
step multiplies queries by the projection from latents to keys, attends to the rows themselves, and multiplies what it
gathers by the projection to values (DeepSeek-V2, section 2.1.2). Prompts make keys and values of each head instead.
Both projections are in full precision in every plan, as a step multiplies with them from either side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ridgeplan.kernels.latent import absorb_append, latent_attention, project_heads
from ridgeplan.kernels.layer import Tables, rotate
from ridgeplan.runtime.model.linear import Linear
from ridgeplan.runtime.model.norms import RMSNorm

if TYPE_CHECKING:
    from ridgeplan.runtime.model.decoder import Decoder, Step
    from ridgeplan.runtime.model.weights import LayerWeights, PromptPass


@dataclass(frozen=True, eq=False)
class LatentAttentionWeights:
    """down: to what queries are made of (their latent or themselves), the latent and the shared key, in this order.

    up: from a latent of queries to queries, behind `query_norm`; None where `down` makes them. keys: [q_heads,
    channels without RoPE, latent]; values: [q_heads, v_head_dim, latent].
    """

    down: Linear
    up: Linear | None
    query_norm: RMSNorm | None
    latent_norm: RMSNorm
    keys: Tensor
    values: Tensor
    output: Linear

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The matrix products that a plan may quantize."""
        return (self.down, self.output) if self.up is None else (self.down, self.up, self.output)

    def with_projections(self, change: Callable[[Linear], Linear]) -> LatentAttentionWeights:
        """The same attention with `change` applied to each projection."""
        up = None if self.up is None else change(self.up)
        return dataclasses.replace(self, down=change(self.down), up=up, output=change(self.output))

    def projected(self, normed: Tensor, rope: int) -> tuple[Tensor, Tensor]:
        """Queries [rows, queries, q_heads x head_dim], and latents with shared keys [rows, queries, latent + rope].

        Neither has gone through RoPE, nor latents through their norm.
        """
        row, width = self.down(normed), self.keys.shape[-1] + rope
        queries, latents = row.split([row.shape[-1] - width, width], dim=-1)
        if self.up is not None and self.query_norm is not None:
            queries = self.up(self.query_norm(queries.contiguous(), None)[1])
        return queries, latents

    def project(self, normed: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Queries [rows, queries, q_heads, head_dim] and the tokens' latent rows [rows, queries, latent + rope]."""
        (heads, plain, latent), rope = self.keys.shape, 2 * tables[0].shape[-1]
        queries, latents = self.projected(normed, rope)
        q = queries.unflatten(-1, (heads, plain + rope))
        q = torch.cat([q[..., :plain], rotate(q[..., plain:], *tables)], dim=-1)
        normed_latents = self.latent_norm(latents[..., :latent].contiguous(), None)[1]
        shared = rotate(latents[..., latent:].unsqueeze(-2), *tables).squeeze(-2)
        return q, torch.cat([normed_latents, shared], dim=-1)

    def step(self, decoder: Decoder, index: int, normed: Tensor, step: Step) -> Tensor:
        """Attention of the step's tokens over the cached rows, which theirs enter."""
        place = decoder.config.layers[index].place
        reads, (heads, plain, _) = step.metadata.layer_metadata(place), self.keys.shape
        assert reads.attend is None, "drafts of latent attention read every row"
        tables = step.tables[decoder.config.layers[index].rotary]
        rope = 2 * tables[0].shape[-1]
        queries, latents = self.projected(normed, rope)
        norm, (stored, rotated) = self.latent_norm, step.cache.full(place)
        stores, slots = (stored[:, 0], rotated[:, 0]), (reads.slots, reads.positions)
        q = absorb_append(queries, latents, tables, norm.weight, norm.eps, self.keys, stores, slots)
        with step.cache.layer_kv(place, reads) as kv:
            rows, scale = (kv.keys[:, 0], kv.values[:, 0], kv.begin, kv.end), (plain + rope) ** -0.5
            attended = latent_attention(q, *rows, scale, kv.codes, kv.groups, lower=reads.lower)
        out = attended.new_empty(*attended.shape[:2], heads, self.values.shape[1])
        return self.output(project_heads(attended, self.values.mT, out).flatten(2))

    def prefill(self, prompt: PromptPass, index: int, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """Attention of a prompt's tokens by keys and values of each head; the pass keeps the latent rows."""
        return prompt.attend_latent(index, layer, self, hidden)
