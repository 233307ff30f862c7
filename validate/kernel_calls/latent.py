"""Calls of decode attention over latent rows, and of the append ahead of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.latent import (
    absorb_append,
    absorb_append_cost,
    latent_attention,
    latent_attention_cost,
    latent_attention_reference,
)
from ridgeplan.kernels.layer import Tables, rotary_tables
from ridgeplan.roofline.execution import choose_splits
from ridgeplan.validate.kernel_calls.case import BenchCase, SpeedUp, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import LatentSize
from ridgeplan.validate.timing import Bench, KernelCall

SDPA = "SDPA, rows as keys and values"
PLAIN, EPS = 128, 1e-6  # channels without RoPE of a head, as in DeepSeek's models; of the latents' norm


@dataclass(frozen=True, eq=False)
class LatentDecode:
    """Queries [batch, queries, heads, row] over cached rows [variants, batch, tokens, row]."""

    size: LatentSize
    q: Tensor
    rows: Tensor

    @classmethod
    def draw(cls, bench: Bench, size: LatentSize) -> LatentDecode:
        """Random queries and caches of a size."""
        row = size.latent + size.rope
        q = fresh(bench, size.batch, size.queries, size.q_heads, row)
        return cls(size, q, bench.randoms(size.batch, size.tokens, row))

    def call(self, num_sms: int) -> KernelCall:
        """The kernel, with torch's attention of one shared key and value head as its peer."""
        size, (queries, heads) = self.size, self.q.shape[1:3]
        splits = int(choose_splits(size.batch, -(-queries * heads // 16), size.tokens, num_sms))
        cost = latent_attention_cost(self.q, size.tokens, size.latent, splits)
        name = f"{heads} x {size.latent} + {size.rope}, B{size.batch}, {size.tokens} tokens, {queries} queries"
        peers = {SDPA: self.peer} if queries == 1 else {}
        variants = len(self.rows)
        return KernelCall(
            "attention_mla", name, cost, self.run, variants, queries * heads, size.batch, size.tokens, self.error, peers
        )

    def _ranges(self) -> tuple[Tensor, Tensor]:
        begin = torch.zeros(self.size.batch, dtype=torch.int32, device=self.q.device)
        return begin, begin + self.size.tokens - self.size.queries + 1

    def run(self, i: int) -> Tensor:
        """Attention to variant `i`."""
        return latent_attention(self.q, self.rows[i], *self._ranges(), self.size.latent, self._scale)

    def error(self) -> float:
        """Against the reference."""
        exact = latent_attention_reference(self.q.float(), self.rows[0], *self._ranges(), self.size.latent, self._scale)
        return relative_error(self.run(0), exact)

    def peer(self, i: int) -> Tensor:
        """torch's attention, whose values are whole rows."""
        rows = self.rows[i][:, None]
        out = functional.scaled_dot_product_attention(
            self.q.transpose(1, 2), rows, rows, scale=self._scale, enable_gqa=True
        )
        return out[..., : self.size.latent]

    @property
    def _scale(self) -> float:
        return float(self.size.latent + self.size.rope) ** -0.5


@dataclass(frozen=True, eq=False)
class LatentAppend:
    """Projected queries and latents [batch, queries, width], and factors [variants, heads, plain, latent]."""

    projected: Tensor
    factors: Tensor
    rows: Tensor
    slots: Tensor
    tables: Tables

    @classmethod
    def draw(cls, bench: Bench, size: LatentSize) -> LatentAppend:
        """Random projections of a size; the tokens' rows enter an empty cache."""
        tokens, heads, row = (size.batch, size.queries), size.q_heads, size.latent + size.rope
        projected = fresh(bench, *tokens, heads * (PLAIN + size.rope) + row)
        factors = bench.randoms(heads, PLAIN, size.latent)
        slots = torch.arange(size.queries, device=projected.device).expand(tokens)
        tables = rotary_tables(slots, 1e-4 ** torch.linspace(0, 1, size.rope // 2, device=projected.device), 1.0)
        return cls(projected, factors, projected.new_zeros(size.batch, size.queries, row), slots, tables)

    def call(self) -> KernelCall:
        """The product and the append, with torch's operations one by one as their peer."""
        variants, heads, plain, latent = self.factors.shape
        product, append = absorb_append_cost(self.projected[..., : heads * (plain + self._rope)], self.tables,
                                             self.factors[0])  # fmt: skip
        batch, queries = self.slots.shape
        name = f"{heads} x {plain} + {self._rope} to {latent}, B{batch}, {queries} queries"
        peers = {"torch": lambda i: self.run(i, "reference")}
        return KernelCall("rope", name, product + append, self.run, variants, batch * queries, 0, 0, self.error, peers)

    @property
    def _rope(self) -> int:
        return 2 * self.tables[0].shape[-1]

    def run(self, i: int, backend: Backend = "auto") -> Tensor:
        """With variant `i` of the factors."""
        row, norm = self.rows.shape[-1], torch.ones_like(self.rows[0, 0, : self.factors.shape[-1]])
        queries, latents = self.projected.split([self.projected.shape[-1] - row, row], dim=-1)
        return absorb_append(
            queries, latents, self.tables, norm, EPS, self.factors[i], self.rows, self.slots, backend=backend
        )

    def error(self) -> float:
        """Of queries, against the same in float32."""
        exact = LatentAppend(self.projected.float(), self.factors[:1].float(), self.rows.float(), self.slots,
                             self.tables)  # fmt: skip
        return relative_error(self.run(0), exact.run(0, "reference"))


def latent_append_cases(bench: Bench, sizes: Iterable[LatentSize]) -> Iterator[BenchCase]:
    """The append of a step's latent rows, with the product that turns queries to them."""
    for size in sizes:
        yield BenchCase("latent_append", LatentAppend.draw(bench, size).call(), SpeedUp(1.0))


def latent_attention_cases(bench: Bench, sizes: Iterable[LatentSize]) -> Iterator[BenchCase]:
    """Absorbed attention of few queries over latent rows."""
    num_sms = 8 if bench.device.type == "cpu" else torch.cuda.get_device_properties(0).multi_processor_count
    for size in sizes:
        yield BenchCase("latent_attention", LatentDecode.draw(bench, size).call(num_sms), SpeedUp(1.0))
