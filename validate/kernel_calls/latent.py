"""Calls of decode attention over latent rows, and of the append ahead of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.latent import absorb_append, absorb_append_cost, latent_attention, latent_attention_cost
from ridgeplan.kernels.layer import Tables, rotary_tables
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import choose_splits
from ridgeplan.validate.kernel_calls.attention import BUFFERED_TOKENS, fill_with_noise
from ridgeplan.validate.kernel_calls.case import BenchCase, SpeedUp, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import GROUP, LatentSize
from ridgeplan.validate.kernel_calls.vllm_peers import flash_mla, prepared
from ridgeplan.validate.random_model import fill_codes
from ridgeplan.validate.timing import Bench, KernelCall

PLAIN, EPS = 128, 1e-6  # channels without RoPE of a head, as in DeepSeek's models; of the latents' norm
HEAD = 64  # channels of a head of codes


@dataclass(frozen=True, eq=False)
class LatentDecode:
    """Queries [batch, queries, heads, row] over cached rows [variants, batch, tokens, row], which the peer reads.

    latents, rotated: the parts of these rows. codes: of all variants, in place of all latents but the recent ones.
    """

    size: LatentSize
    q: Tensor
    rows: Tensor
    latents: Tensor
    rotated: Tensor
    codes: QuantizedKV | None

    @classmethod
    def draw(cls, bench: Bench, size: LatentSize) -> LatentDecode:
        """Random queries and caches of a size."""
        row, codes = size.latent + size.rope, None
        q = fresh(bench, size.batch, size.queries, size.q_heads, row)
        rows = fresh(bench, bench.variants(_decode_cost(size, q, 1).read_bytes), size.batch, size.tokens, row)
        latents, rotated = (part.contiguous() for part in rows.split([size.latent, size.rope], dim=-1))
        if size.bits:
            sizes = len(rows) * size.batch, size.latent // HEAD, _coded_groups(size), GROUP, HEAD
            codes = QuantizedKV.allocate(*sizes, bench.device, lower=size.bits == 8, values=False)
            fill_codes(codes, partial(fill_with_noise, bench))
        return cls(size, q, rows, latents, rotated, codes)

    def call(self, num_sms: int) -> KernelCall:
        """The kernel. FlashMLA, its peer, reads 16-bit rows."""
        size, (queries, heads) = self.size, self.q.shape[1:3]
        splits = int(choose_splits(size.batch, -(-queries * heads // 16), size.tokens, num_sms))
        name = f"{heads} x {size.latent} + {size.rope}, B{size.batch}, {size.tokens} tokens, {queries} queries"
        name += f", INT{size.bits}" if size.bits else ""
        peers = {"vLLM FlashMLA": prepared(flash_mla, self.q, self.rows, size.latent, self._scale)}
        return KernelCall(
            "attention_mla", name, _decode_cost(size, self.q, splits), self.run, len(self.rows), queries * heads,
            size.batch, size.tokens, self.error, peers,
        )  # fmt: skip

    @cached_property
    def _visible(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """begin, end and groups: slots of old latents stay unread where these are codes."""
        coded = _coded_groups(self.size)
        lengths = coded * GROUP, self.size.tokens - self.size.queries + 1, coded
        begin, end, groups = (
            torch.full((self.size.batch,), length, dtype=torch.int32, device=self.q.device) for length in lengths
        )
        return begin, end, groups if self.codes else None

    def run(self, i: int, backend: Backend = "auto") -> Tensor:
        """Attention to variant `i`."""
        (begin, end, groups), batch = self._visible, self.size.batch
        codes = self.codes and self.codes.rows(slice(i * batch, (i + 1) * batch))
        return latent_attention(
            self.q, self.latents[i], self.rotated[i], begin, end, self._scale, codes, groups,
            lower=self.size.bits == 8, backend=backend,
        )  # fmt: skip

    def error(self) -> float:
        """Against the reference, in float32."""
        return relative_error(self.run(0), replace(self, q=self.q.float()).run(0, "reference"))

    @property
    def _scale(self) -> float:
        return float(self.size.latent + self.size.rope) ** -0.5


def _coded_groups(size: LatentSize) -> int:
    """Groups of a sequence that are codes."""
    return max(1, (size.tokens - BUFFERED_TOKENS) // GROUP) if size.bits else 0


def _decode_cost(size: LatentSize, q: Tensor, splits: int) -> Cost:
    coded = _coded_groups(size) * GROUP
    return latent_attention_cost(q, size.latent, coded, size.tokens - coded, size.bits, GROUP, splits)


@dataclass(frozen=True, eq=False)
class LatentAppend:
    """Projected queries and latents [batch, queries, width], and factors [variants, heads, plain, latent]."""

    projected: Tensor
    factors: Tensor
    stores: tuple[Tensor, Tensor]
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
        stores = projected.new_zeros(*tokens, size.latent), projected.new_zeros(*tokens, size.rope)
        return cls(projected, factors, stores, slots, tables)

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
        row, norm = self.factors.shape[-1] + self._rope, torch.ones_like(self.stores[0][0, 0])
        queries, latents = self.projected.split([self.projected.shape[-1] - row, row], dim=-1)
        slots = self.slots, self.slots
        return absorb_append(
            queries, latents, self.tables, norm, EPS, self.factors[i], self.stores, slots, backend=backend
        )

    def error(self) -> float:
        """Of queries, against the same in float32."""
        latents, rotated = (store.float() for store in self.stores)
        exact = replace(self, projected=self.projected.float(), factors=self.factors[:1].float(),
                        stores=(latents, rotated))  # fmt: skip
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
