"""The decoder's weights as plain tensors, with projections of the same input fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ridgeplan.runtime.model.linear import GatedMLP, Int4, Int8, Linear


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer. qkv: projections to queries, keys and values, stacked in this order.

    qk_norm: [q_heads + kv_heads, head_dim], for families that normalize queries and keys.
    """

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    mlp: GatedMLP

    def with_projections(self, change: Callable[[Linear], Linear]) -> LayerWeights:
        """The same layer with `change` applied to each projection."""
        return dataclasses.replace(
            self,
            qkv=change(self.qkv),
            output=change(self.output),
            mlp=self.mlp.with_projections(change),
        )


@dataclass(frozen=True)
class WeightFormat:
    """Bits of projections, inputs per scale where they are codes, and whether upper planes were fitted for drafts.

    The fields are in the order of a plan's `Weights.target_format`.
    """

    bits: int = 16
    group: int | None = None
    hierarchical: bool = False


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """All weights; `head` may share the embedding's storage."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear

    @property
    def format(self) -> WeightFormat:
        """The format of the first projection."""
        first = self.layers[0].qkv
        if isinstance(first, Int8):
            return WeightFormat(8, first.weight.group, first.hierarchical)
        return WeightFormat(4, first.weight.group) if isinstance(first, Int4) else WeightFormat()

    @property
    def upper(self) -> DecoderWeights:
        """What drafts read of hierarchical 8-bit weights: the upper planes, in the same memory."""
        layers = tuple(layer.with_projections(_upper) for layer in self.layers)
        return dataclasses.replace(self, layers=layers, head=_upper(self.head))

    @property
    def bytes(self) -> int:
        """Storage in bytes; tensors that share storage count once."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.tensors()}.values())

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> DecoderWeights:
        """The same weights with `change` applied to each tensor."""
        changed: DecoderWeights = _with_tensors(self, change)
        return changed

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in no particular order; some may share storage."""
        return tensors_of(self)


def _upper(linear: Linear) -> Linear:
    return linear.upper if isinstance(linear, Int8) else linear


def tensors_of(part: object) -> Iterator[Tensor]:
    """The tensors in weights or a part of them, in no particular order."""
    stack = [part]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, tuple):
            stack.extend(item)
        elif dataclasses.is_dataclass(item):
            stack.extend(vars(item).values())


def _with_tensors(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, tuple):
        return tuple(_with_tensors(element, change) for element in item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in dataclasses.fields(item)]
        return dataclasses.replace(item, **{name: _with_tensors(getattr(item, name), change) for name in names})
    return item
