"""Norms of the residual stream: what each block reads of it, and where a family's norms stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer import add_rms_norm


class Norm(Protocol):
    """Adds a block's output to the stream and makes the input of the next block."""

    def __call__(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """hidden + update (without an update `hidden` itself), and what the next block reads; both [..., hidden]."""


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """RMSNorm with a weight [hidden], in float32 where the model's dtype would round it."""

    weight: Tensor
    eps: float

    def __call__(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_rms_norm(hidden, update, self.weight, self.eps)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """LayerNorm with a weight and, in some families, a bias, both [hidden]."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None

    def __call__(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        total = hidden if update is None else hidden + update
        weight, bias = (None if part is None else part.float() for part in (self.weight, self.bias))
        return total, functional.layer_norm(total.float(), self.weight.shape, weight, bias, self.eps).to(total.dtype)


@dataclass(frozen=True, eq=False)
class NoNorm:
    """The stream itself, of families whose norms stand after the blocks only."""

    def __call__(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        total = hidden if update is None else hidden + update
        return total, total


@dataclass(frozen=True, eq=False)
class ParallelNorm:
    """What the token mixer read, for an MLP that runs beside it: the norm of the stream before the update."""

    norm: RMSNorm | LayerNorm

    def __call__(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        total = hidden if update is None else hidden + update
        return total, self.norm(hidden, None)[1]
