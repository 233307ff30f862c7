"""Calls of decode attention over latent rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.latent import latent_attention, latent_attention_cost, latent_attention_reference
from ridgeplan.roofline.execution import choose_splits
from ridgeplan.validate.kernel_calls.case import BenchCase, SpeedUp, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import LatentSize
from ridgeplan.validate.timing import Bench, KernelCall

SDPA = "SDPA, rows as keys and values"


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


def latent_attention_cases(bench: Bench, sizes: Iterable[LatentSize]) -> Iterator[BenchCase]:
    """Absorbed attention of few queries over latent rows."""
    num_sms = 8 if bench.device.type == "cpu" else torch.cuda.get_device_properties(0).multi_processor_count
    for size in sizes:
        yield BenchCase("latent_attention", LatentDecode.draw(bench, size).call(num_sms), SpeedUp(1.0))
