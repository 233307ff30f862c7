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

from ridgeplan.kernels.latent import latent_attention
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

    def project(self, normed: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Queries [rows, queries, q_heads, head_dim] and the tokens' latent rows [rows, queries, latent + rope]."""
        (heads, plain, latent), rope = self.keys.shape, 2 * tables[0].shape[-1]
        row = self.down(normed)
        queries, latents, shared = row.split([row.shape[-1] - latent - rope, latent, rope], dim=-1)
        if self.up is not None and self.query_norm is not None:
            queries = self.up(self.query_norm(queries.contiguous(), None)[1])
        q = queries.unflatten(-1, (heads, plain + rope))
        q = torch.cat([q[..., :plain], rotate(q[..., plain:], *tables)], dim=-1)
        normed_latents = self.latent_norm(latents.contiguous(), None)[1]
        return q, torch.cat([normed_latents, rotate(shared.unsqueeze(-2), *tables).squeeze(-2)], dim=-1)

    def step(self, decoder: Decoder, index: int, normed: Tensor, step: Step) -> Tensor:
        """Attention of the step's tokens over the cached rows, which theirs enter."""
        place = decoder.config.layers[index].place
        reads, (_, plain, latent) = step.metadata.layer_metadata(place), self.keys.shape
        assert reads.attend is None, "drafts of latent attention read every row"
        q, rows = self.project(normed, step.tables[decoder.config.layers[index].rotary])
        stored = step.cache.full(place)[0][: len(rows), 0]
        stored.scatter_(1, reads.slots[..., None].expand_as(rows), rows)
        absorbed = torch.einsum("bthn,hnr->bthr", q[..., :plain], self.keys)
        absorbed = torch.cat([absorbed, q[..., plain:]], dim=-1)
        with step.cache.layer_kv(place, reads) as kv:
            scale = q.shape[-1] ** -0.5
            attended = latent_attention(absorbed, kv.keys[:, 0], kv.begin, kv.end, latent, scale)
        return self.output(torch.einsum("bthr,hvr->bthv", attended, self.values).flatten(2))

    def prefill(self, prompt: PromptPass, index: int, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """Attention of a prompt's tokens by keys and values of each head; the pass keeps the latent rows."""
        return prompt.attend_latent(index, layer, self, hidden)
