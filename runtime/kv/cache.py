"""The KV cache of all layers: a full-precision store, groups of codes, and the rule that quantizes tokens.

A row of n tokens keeps quantized(n) = max(0, n // G - 1) * G of them as codes, so that G to 2G - 1 recent tokens stay
in full precision (QuantSpec, section 4.3.2). The split depends on the length alone, not on where rounds ended
(docs/papers.md, QuantSpec-4), so the quantized target is one well-defined model.

After an eviction n counts the tokens that are stored, fewer than the position in the text, and it may differ by layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.token_rows import TokenRows
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata, LayerKV
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.states import StateStore
from ridgeplan.runtime.kv.storage import CodedLayers, KVStore
from ridgeplan.runtime.offload.host_store import HostKVStore
from ridgeplan.runtime.offload.movable import movable_layers
from ridgeplan.runtime.offload.slot_store import SlotStore
from ridgeplan.runtime.offload.slots import ChosenTokens, LoadsAhead, SlotLoader
from ridgeplan.runtime.offload.streaming import LayerStream


class Cache:
    """Preallocated storage: keys and values [layers, batch, kv_heads, slots, head_dim], and their codes.

    With a buffer (formats int8 and int4x2), slot = stored tokens before it - quantized(n). The other formats keep every
    stored token in full precision; bf16+int4 adds upper codes for drafts.
    lengths, ends: int32 [batch], stored tokens of each row in the layers that hold most, and the length at which its
    generation stops. evicted: int32 [batch], tokens of the text that even these layers no longer hold. fewer: int32
    [stores or more, batch], stored tokens that the layers of each store hold less than `lengths`. Layers are those
    with attention; recurrent states of the others are in `states`.
    """

    def __init__(self, model: ModelShape, config: KVCacheConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.rows = config.batch
        self.layers, self.q_heads, self.kv_heads = model.kv_layers, model.q_heads, model.cache_sizes[0]
        self.first_on_host = self.layers - config.host_layers
        self._heads = model.heads_of_each
        self.movable = movable_layers(model, config, device, dtype)
        self.stores: list[KVStore | HostKVStore]
        if self.movable:
            self.stores = self.movable.stores(self.first_on_host)
            self._places = _places(self.stores)
        else:
            # Layers that are alike share a store. With windows they do so wherever they are; those without come first.
            layers = sorted(range(self.layers), key=self._kind) if config.windows else range(self.layers)
            parts = [(kind, list(same)) for kind, same in groupby(layers, self._kind)]
            self.stores = [self._allocated(model, *part, device, dtype) for part in parts]
            places = {layer: (store, at) for store, (_, same) in enumerate(parts) for at, layer in enumerate(same)}
            self._places = [places[layer] for layer in range(self.layers)]
        self.states = StateStore.allocate(model, config, device, dtype)
        self.lengths = torch.zeros(config.batch, dtype=torch.int32, device=device)
        self.ends = torch.full_like(self.lengths, config.longest)
        self.evicted = torch.zeros_like(self.lengths)
        self.prompt_tokens = torch.zeros_like(self.lengths)  # of `lengths`, those of the row's prompt
        self.fewer = self.lengths.new_zeros(max(2, len(self.stores)), config.batch)
        self.stream: LayerStream | None = None
        if config.streams:
            spare = 0 if config.buffered else config.buffer_slots
            self.stream = LayerStream(self._host_parts(), config.prefetch + 1, device, spare)
        self.loader: SlotLoader | None = None
        slots = self._slots
        if config.elastic and slots is not None:
            self.loader = SlotLoader(slots, config.prefetch, device)

    @property
    def bytes(self) -> int:
        """Storage on the device: keys, values, codes, planes, layers on their way from the host, and states."""
        stored = self.movable.bytes if self.movable else sum(store.bytes for store in self.stores)
        return stored + sum(each.bytes for each in (self.stream, self.states) if each)

    @property
    def keys(self) -> Tensor:
        """Keys of all layers, of a cache that has one store."""
        (store,) = self.stores
        return store.keys

    @property
    def values(self) -> Tensor:
        """Values of all layers, of a cache that has one store."""
        (store,) = self.stores
        return store.values

    def reset(self, rows: int) -> None:
        """Empties the cache and activates its first `rows` rows, each up to the full context."""
        self.rows = rows
        for tensor in (self.lengths, self.evicted, self.prompt_tokens, self.fewer, self.ends):
            tensor.zero_()
        self.ends[:rows] = self.config.longest
        for store in self.stores:
            store.reset()
        if self.stream is not None:
            self.stream.reset()

    def place(self, resident: int) -> None:
        """From now on the first `resident` layers are on the device; of a cache whose placement adapts."""
        assert self.movable is not None, "its placement adapts"
        self.stores = self.movable.stores(resident)
        self._places = _places(self.stores)
        self.first_on_host = resident
        if self.stream is not None:
            self.stream.layers = self._host_parts()
        slots = self._slots
        if self.loader is not None and slots is not None:
            self.loader.store = slots

    def resume(self, tokens: int) -> bool:
        """Drops all but the first `tokens` of the first row, which can then grow again; returns whether that is exact.

        What is already codes cannot become full precision again, nor does a selector take back what it has scored, nor
        does a recurrent state forget a token.
        """
        held, group = int(self.lengths[0]), self.config.group
        if not tokens <= held or tokens // group != held // group:
            return False
        if self.states and tokens < int(self.states.committed[0]):
            return False
        for store, (layer, *_) in self.window_layers.items():
            dropped = int(self.fewer[store, 0])
            if dropped > 0 and tokens - dropped < self.config.window(layer):
                return False
        self.rows = 1
        self.lengths[0] = tokens
        self.ends.zero_()
        self.ends[0] = self.config.longest
        return True

    def limit(self, new_tokens: int) -> None:
        """Ends every row `new_tokens` tokens after its current length."""
        self.ends[: self.rows] = self.lengths[: self.rows] + new_tokens

    def stop(self, row: int) -> None:
        """Ends a row now."""
        self.ends[row] = 0

    @contextlib.contextmanager
    def all_stopped(self) -> Iterator[None]:
        """Deactivates all rows inside the body, so that rounds only write to slots that the next round overwrites."""
        ends = self.ends.clone()
        self.ends.zero_()
        try:
            yield
        finally:
            self.ends.copy_(ends)

    def quantized(self, lengths: Tensor) -> Tensor:
        """Tokens held as codes at these lengths: `KVCacheConfig.quantized_groups` on the device."""
        return (lengths // self.config.group - 1).clamp_min(0) * self.config.group

    def active(self) -> Tensor:
        """bool [rows], whether a row has not reached its end."""
        return self.lengths[: self.rows] < self.ends[: self.rows]

    def max_tokens(self) -> Tensor:
        """Tokens [rows], at least 1, that a round may add to an active row.

        A round stops at the row's end and, if the target reads or chooses by codes, at the next multiple of the group,
        where a flush changes what it reads.
        """
        lengths, group = self.lengths[: self.rows], self.config.group
        max_tokens = (self.ends[: self.rows] - lengths).clamp_min(1)
        return torch.minimum(max_tokens, group - lengths % group) if self.config.target_uses_codes else max_tokens

    @property
    def accepted(self) -> Tensor:
        """int32 [rows], tokens of each row's text, whether or not layers still hold them."""
        return (self.lengths + self.evicted)[: self.rows]

    def store_of(self, layer: int) -> int:
        """The number of the store that holds a layer."""
        return self._places[layer][0]

    def stored(self, layer: int) -> Tensor:
        """int32 [rows], tokens that a layer holds of each row."""
        return (self.lengths - self.fewer[self.store_of(layer)])[: self.rows]

    def full(self, layer: int) -> tuple[Tensor, Tensor]:
        """Full-precision keys and values [rows, kv_heads, slots, head_dim] of a layer."""
        store, index = self._place(layer)
        return store.keys[index, : self.rows], store.values[index, : self.rows]

    def codes(self, layer: int) -> QuantizedKV:
        """Quantized groups of a layer."""
        coded, index = self._coded(layer)
        return coded.codes.rows(coded.rows(index, 0, self.rows))

    @contextlib.contextmanager
    def layer_kv(self, layer: int, metadata: AttentionMetadata) -> Iterator[LayerKV]:
        """What a pass with this metadata reads of a layer, inside the body: what lies on the host as copies."""
        keys, values = self.full(layer)
        if layer < self.first_on_host or not metadata.streamed:
            codes = None if metadata.groups is None else self.near_codes(layer)
            yield LayerKV(keys, values, metadata.begin, metadata.end, codes, metadata.groups)
            return
        assert self.stream is not None, "layers are offloaded"
        if not self.stream.begun:
            self.begin_streaming()
        number = layer - self.first_on_host
        copies = self.stream.fetch(number)
        try:
            if metadata.groups is None:
                yield self._with_recent(layer, copies, metadata)
            else:
                coded, index = self._coded(layer)
                codes = coded.staged(index, self.rows, copies)
                yield LayerKV(keys, values, metadata.begin, metadata.end, codes, metadata.groups)
        finally:
            self.stream.release(number)

    def _with_recent(self, layer: int, copies: Sequence[Tensor], metadata: AttentionMetadata) -> LayerKV:
        """Old tokens of a full-precision layer, copied from the host, with its recent ones behind them."""
        rows, first_recent = self.rows, self.config.window_slots
        old = self.quantized(self.lengths[:rows])
        # Attention reads lengths before the kernel ahead of it has ended, so that they must not come last.
        begin, end = torch.zeros_like(old), metadata.end - first_recent + old
        for old_tokens, slots in zip(copies, self.full(layer), strict=True):
            recent = slots[:, :, first_recent:]
            places = old[:, None] + torch.arange(recent.shape[2], device=old.device)
            old_tokens[:rows].scatter_(2, places[:, None, :, None].expand(recent.shape).long(), recent)
        return LayerKV(copies[0][:rows], copies[1][:rows], begin, end, None, None)

    def near_codes(self, layer: int) -> QuantizedKV:
        """Codes of a layer that drafts read: those that stay on the device, where all others lie on the host."""
        window = self._coded(layer)[0].window
        return window.codes.rows(slice(0, self.rows)) if window else self.codes(layer)

    def begin_streaming(self) -> None:
        """Starts copies of the first offloaded layers, for the next pass of the target."""
        if self.stream and self.first_on_host < self.layers:
            old = self.quantized(self.lengths)
            self.stream.begin(old // self.config.group if self.config.buffered else old)

    def load_chosen(self, layer: int, choice: ChosenTokens, ahead: LoadsAhead | None = None) -> Tensor:
        """The slots in `full` of the chosen old tokens or pages; those of a layer on the host are loaded first.

        ahead: the result of `begin_loading`, if the selection was known before the pass.
        """
        if self.loader is None or layer < self.first_on_host:
            return choice[0]
        number = layer - self.first_on_host
        return self.loader.load(number, choice) if ahead is None else ahead.slots(number)

    def begin_loading(self, choose: Callable[[int], ChosenTokens], shared_across_layers: bool) -> LoadsAhead | None:
        """Starts loading the slots of layers on the host for a query whose selection is known before its pass.

        choose: from a layer's index to its selection. shared_across_layers: whether it is the same in all layers.
        """
        if self.loader is None or self.first_on_host == self.layers:
            return None
        return LoadsAhead(self.loader, lambda layer: choose(layer + self.first_on_host), shared_across_layers)

    def loads(self) -> tuple[int, int]:
        """Tokens or pages that steps have requested from layers on the host, and how many of them had to be loaded."""
        return (0, 0) if self._slots is None else self._slots.loads()

    @property
    def _slots(self) -> SlotStore | None:
        """The layers on the host of which chosen tokens are loaded, if any are there."""
        last = self.stores[-1]
        return last if isinstance(last, HostKVStore) else last.loaded

    def loaded_codes(self, layer: int) -> TokenRows | None:
        """The codes that slots hold of a layer on the host; None for any other layer."""
        store, index = self._place(layer)
        if layer < self.first_on_host or isinstance(store, HostKVStore) or store.loaded is None:
            return None
        return store.loaded.codes(index - self.first_on_host, self.rows)

    def planes(self, layer: int) -> DraftPlanes | None:
        """Quantized groups of a layer by token, if they are kept."""
        coded, index = self._coded(layer)
        return coded.planes.rows(coded.rows(index, 0, self.rows)) if coded.planes else None

    def two_bit_keys(self, layer: int) -> TwoBitKeys:
        """2-bit keys of a layer's quantized groups, of a cache that keeps them."""
        store, index = self._place(layer)
        if isinstance(store, HostKVStore):
            assert store.two_bit is not None, "its format has codes"
            return store.two_bit.of_layer(index, self.rows)
        planes = self.planes(layer)
        assert planes is not None, "plans that choose by 2-bit keys hold codes"
        return TwoBitKeys.of(self.codes(layer), planes)

    def oldest_group(self, first: Tensor) -> Tensor:
        """Keys [layers, batch, kv_heads, group, head_dim] of the group that grows old next.

        first: int32 [batch], its first token. The layers must hold equally many tokens, but for those with a window,
        whose keys are undefined, as are those of rows that do not hold the whole group.
        """
        keys = [self._oldest(store, first) for store in self.stores]
        if not self.config.windows:
            return torch.cat(keys) if len(keys) > 1 else keys[0]
        places = [(0, 0) if self.config.window(layer) else place for layer, place in enumerate(self._places)]
        return torch.stack([keys[store][at] for store, at in places])

    def _oldest(self, store: KVStore | HostKVStore, first: Tensor) -> Tensor:
        keys = store.keys
        slots = torch.arange(self.config.group, device=first.device).expand(len(first), -1)
        if isinstance(store, HostKVStore):
            slots = slots + self.config.window_slots
        elif not self.config.buffered:
            slots = slots + first[:, None]
        slots = slots.clamp_max(keys.shape[3] - 1).long()
        sizes = (*keys.shape[:3], self.config.group, keys.shape[4])
        return keys.gather(3, slots[None, :, None, :, None].expand(sizes))

    def store_prompt(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Stores what a layer keeps of a row's prompt, [kv_heads, tokens, head_dim], in the order of the text."""
        store, index = self._place(layer)
        store.store_prompt(index, row, keys, values)

    def finish_prompt(self, row: int, tokens: int) -> None:
        """Sets a row's lengths for a prompt of `tokens`, once every layer has stored what it keeps."""
        kept, longest = self.config.kept(tokens) or (tokens,) * self.layers, self.config.stored(tokens)
        self.lengths[row] = self.prompt_tokens[row] = longest
        if self.states:
            self.states.committed[row] = tokens
        self.evicted[row] = tokens - longest
        if len(self.stores) > 1 or self.config.windows:
            fewer = [longest - kept[self._places.index((store, 0))] for store in range(len(self.stores))]
            self.fewer[: len(fewer), row] = torch.tensor(fewer, dtype=torch.int32)

    def advance(self, tokens: Tensor) -> None:
        """Extends each row by `tokens`, int32 [rows], and quantizes groups that are no longer recent.

        Of layers with a window, the oldest group leaves that no query sees any more.
        """
        flushing = self.config.format.quantized or isinstance(self.stores[-1], HostKVStore)
        fewer = self.fewer[: len(self.stores)]
        before = self.quantized(self.lengths - fewer) if flushing else None
        self.lengths[: self.rows] += tokens
        self._slide()
        if before is None:
            return
        crossed = self.quantized(self.lengths - fewer) > before
        if not crossed.is_cuda and not bool(crossed.any()):
            return  # on a GPU, masked kernels are cheaper than a synchronization
        for store, was, crosses in zip(self.stores, before, crossed, strict=True):
            if store.flushes:
                store.flush(was, crosses)

    def _slide(self) -> None:
        """Drops the oldest group of rows that hold a window and a whole group before it."""
        for layer, (index, at) in enumerate(self._places):
            window, store = self.config.window(layer), self.stores[index]
            if at or not window:
                continue
            assert isinstance(store, KVStore), "layers with a window stay on the device"
            crossed = self.lengths - self.fewer[index] >= window + self.config.group
            if crossed.is_cuda or bool(crossed.any()):
                store.drop_oldest(crossed)
                self.fewer[index] += crossed.int() * self.config.group

    def _kind(self, layer: int) -> tuple[int, int, bool, tuple[int, int]]:
        """What stores differ by: a layer's window, tokens that it holds, whether all of it lies on the host, and its
        heads with their channels."""
        on_host = layer >= self.first_on_host and not self.config.buffered
        return self.config.window(layer), self.config.capacity(layer), on_host, self._heads[layer][1:]

    def _allocated(
        self,
        model: ModelShape,
        kind: tuple[int, int, bool, tuple[int, int]],
        layers: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> KVStore | HostKVStore:
        window, tokens, on_host, (kv_heads, head_dim) = kind
        model = replace(model, kv_heads=kv_heads, head_dim=head_dim)
        config, store = self.config.of_windows if window else self.config, HostKVStore if on_host else KVStore
        return store.allocate(model, config, len(layers), tokens, device, dtype)

    @property
    def window_layers(self) -> dict[int, list[int]]:
        """The layers that hold a window, by their store."""
        layers: dict[int, list[int]] = {}
        for layer, (store, _) in enumerate(self._places):
            if self.config.window(layer):
                layers.setdefault(store, []).append(layer)
        return layers

    def _host_parts(self) -> Sequence[Sequence[Tensor]]:
        """What lies on the host of every layer that does."""
        store = self.stores[-1]
        if isinstance(store, HostKVStore):
            return store.on_host
        return [self._coded(layer)[0].host_parts for layer in range(self.first_on_host, self.layers)]

    def _coded(self, layer: int) -> tuple[CodedLayers, int]:
        store, index = self._place(layer)
        assert isinstance(store, KVStore), "a full-precision layer on the host has no codes"
        return store.coded_layer(index)

    def _place(self, layer: int) -> tuple[KVStore | HostKVStore, int]:
        store, index = self._places[layer]
        return self.stores[store], index


def _places(stores: Sequence[KVStore | HostKVStore]) -> list[tuple[int, int]]:
    """The store of each layer, and the layer's index in it."""
    return [(place, layer) for place, store in enumerate(stores) for layer in range(store.layers)]
