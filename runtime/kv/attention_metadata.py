"""Attention metadata: which stored keys and values the attention of one step reads, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.kv_cache.layout import QuantizedKV

if TYPE_CHECKING:
    from ridgeplan.runtime.kv.states import StateStore


@dataclass(frozen=True, eq=False)
class LayerKV:
    """What attention reads of one layer: full-precision slots and codes, as `decode_attention` takes them."""

    keys: Tensor
    values: Tensor
    begin: Tensor
    end: Tensor
    codes: QuantizedKV | None
    groups: Tensor | None


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where one forward pass writes its tokens' KV, and what it attends to; all tensors are on the device.

    positions, slots: int64 [rows, queries], positions of the new tokens in the text and in the full-precision store.
    begin, end: int32 [rows], the range of full-precision slots visible to the first query; each later query sees one
    more. groups: int32 [rows], leading groups that are read as codes, or None for no codes. lower: whether lower codes
    are read with the upper ones. attend: attention of a layer, by its number, queries and this metadata, for passes
    that read only some of the tokens in the groups or before `begin`. scores: where attention leaves a layer's scores
    of what it read, if asked. streamed: whether codes on the host are brought to the device, of a pass that reads all
    of them. windowed: whether the layer holds the tokens of its sliding window alone, all of which any pass reads.
    by_layer: metadata of the layers that differ, as they hold, or read, another number of tokens.
    """

    positions: Tensor
    slots: Tensor
    begin: Tensor
    end: Tensor
    groups: Tensor | None
    lower: bool
    attend: Callable[[int, Tensor, AttentionMetadata], Tensor] | None = None
    scores: Callable[[int], ScoreRequest] | None = None
    streamed: bool = False
    windowed: bool = False
    by_layer: Mapping[int, AttentionMetadata] = field(default_factory=dict)

    def layer_metadata(self, layer: int) -> AttentionMetadata:
        """The metadata of one layer."""
        return self.by_layer.get(layer, self)

    def changed(self, **changes: Any) -> AttentionMetadata:
        """The same with other values of some fields, in every layer that does not hold a window alone."""
        by_layer = {
            layer: metadata if metadata.windowed else replace(metadata, **changes)
            for layer, metadata in self.by_layer.items()
        }
        return replace(self, by_layer=by_layer, **changes)

    def of_store(self, index: int) -> AttentionMetadata:
        """One of several whose slots and ranges are stacked along a first dimension."""
        groups = None if self.groups is None else self.groups[index]
        return replace(self, slots=self.slots[index], begin=self.begin[index], end=self.end[index], groups=groups)


class KVAccess(Protocol):
    """The part of a cache that a forward pass uses, layer by layer."""

    def full(self, layer: int) -> tuple[Tensor, Tensor]:
        """Full-precision keys and values [rows, kv_heads, slots, head_dim], which the pass appends to."""

    @property
    def accepted(self) -> Tensor:
        """int32 [rows], tokens of each row's text that the target has accepted."""

    @property
    def states(self) -> StateStore | None:
        """Recurrent states of layers without attention, if the model has any."""

    def layer_kv(self, layer: int, metadata: AttentionMetadata) -> AbstractContextManager[LayerKV]:
        """What attention reads of a layer, inside the body."""
