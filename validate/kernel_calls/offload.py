"""Calls that move KV to and from host memory: copies of layers, flushes, gathers, and slots of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.offload import (
    KeysAndValues,
    SlotLoads,
    SlotTable,
    allocate_slots,
    allocate_slots_cost,
    copy_prefix,
    copy_prefix_cost,
    flush_to_host,
    flush_to_host_cost,
    gather_cost,
    gather_into_slots,
)
from ridgeplan.runtime.buffers import HostMemory
from ridgeplan.validate.kernel_calls.case import BenchCase, Within, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import GROUP, ResidencySize
from ridgeplan.validate.timing import Bench, KernelCall

LINK_BYTES_PER_S = 40e9  # lowest rate over the link; PCIe 5.0 x16 copies pinned memory at 55 GB/s
RESIDENCY_S = 30e-6
STEPS = 20  # of a choice that drifts, until it comes back


def host_copy_cases(bench: Bench, sizes: Iterable[ResidencySize]) -> Iterator[BenchCase]:
    """One layer's keys, copied to the device; against a copy of the pinned memory by the DMA engines."""
    for size in sizes:
        copy = HostCopy.draw(bench, size)
        cost = copy_prefix_cost(copy.source, size.tokens)
        call = KernelCall("host_copy", size.name, cost, copy, error=copy.error, peers={"copy_": copy.by_dma})
        yield BenchCase("host_copy", call, _over_link(cost.read_bytes))


def host_store_cases(bench: Bench, sizes: Iterable[ResidencySize]) -> Iterator[BenchCase]:
    """A flush of one group of every row to the host."""
    for size in sizes:
        store = HostStore.draw(bench, size)
        cost = flush_to_host_cost(store.recent, GROUP)
        call = KernelCall("host_store", size.name, cost, store, error=store.error)
        yield BenchCase("host_store", call, _over_link(cost.write_bytes))


def host_gather_cases(bench: Bench, sizes: Iterable[ResidencySize]) -> Iterator[BenchCase]:
    """What one layer's slots miss of a choice; against torch's gather of the same tokens, by the same addresses."""
    for size in sizes:
        gather = HostGather.draw(bench, size)
        cost = gather_cost(gather.source, size.missing, size.page)
        call = KernelCall("host_gather", size.name, cost, gather, error=gather.error, peers={"gather": gather.by_torch})
        yield BenchCase("host_gather", call, _over_link(cost.read_bytes))


def take_slots_cases(bench: Bench, sizes: Iterable[ResidencySize]) -> Iterator[BenchCase]:
    """Slots of a choice of which every step misses as many units as the last one."""
    for size in sizes:
        choice = DriftingChoice.draw(bench, size)
        cost = allocate_slots_cost(choice.table, choice.index[0])
        call = KernelCall("take_slots", size.name, cost, choice, len(choice.index), error=choice.error)
        yield BenchCase("take_slots", call, Within(RESIDENCY_S))


@dataclass(frozen=True, eq=False)
class HostCopy:
    """source, out: [batch, kv_heads, tokens, head_dim], on the host and on the device. count: int32 [batch]."""

    source: Tensor
    out: Tensor
    count: Tensor

    @classmethod
    def draw(cls, bench: Bench, size: ResidencySize) -> HostCopy:
        """All tokens of random keys."""
        (source,), out = on_host(bench, size, 1), fresh(bench, *_sizes(size))
        return cls(source, out, torch.full((size.batch,), size.tokens, dtype=torch.int32, device=bench.device))

    def __call__(self, _: int) -> None:
        """This package's copy."""
        copy_prefix(self.source, self.out, self.count)

    def by_dma(self, _: int) -> None:
        """The peer."""
        self.out.copy_(self.source)

    def error(self) -> float:
        """Of what has been copied."""
        self(0)
        return relative_error(self.out, self.source)


@dataclass(frozen=True, eq=False)
class HostStore:
    """recent: [batch, kv_heads, slots, head_dim] on the device; out: tokens on the host. first, mask: [batch]."""

    recent: Tensor
    out: Tensor
    first: Tensor
    mask: Tensor

    @classmethod
    def draw(cls, bench: Bench, size: ResidencySize) -> HostStore:
        """All rows, to their first tokens."""
        recent = fresh(bench, size.batch, size.kv_heads, 2 * GROUP, size.head_dim)
        first = torch.zeros(size.batch, dtype=torch.int32, device=bench.device)
        return cls(recent, on_host(bench, size, 1)[0], first, torch.ones_like(first, dtype=torch.bool))

    def __call__(self, _: int) -> None:
        """A flush."""
        flush_to_host(self.recent, self.out, self.first, GROUP, self.mask)

    def error(self) -> float:
        """Of what has been written."""
        self(0)
        return relative_error(self.out[:, :, :GROUP], self.recent[:, :, :GROUP])


@dataclass(frozen=True, eq=False)
class HostGather:
    """source: keys and values on the host; out: slots [batch, kv_heads, slots, head_dim]. places: int64, the tokens of
    `loads` as indices of `source`, of the shape of `out`.
    """

    source: KeysAndValues
    out: KeysAndValues
    loads: SlotLoads
    page: int
    places: Tensor

    @classmethod
    def draw(cls, bench: Bench, size: ResidencySize) -> HostGather:
        """Random units, one after another into slots."""
        keys, values = on_host(bench, size, 2)
        sets = (size.batch, size.kv_heads)
        drawn = torch.rand(*sets, size.tokens // size.page, device=bench.device)
        units = drawn.argsort(-1)[..., : size.missing].int().contiguous()
        into = torch.arange(size.missing, dtype=torch.int32, device=bench.device).expand_as(units).contiguous()
        count = torch.full(sets, size.missing, dtype=torch.int32, device=bench.device)
        tokens = (units[..., None] * size.page + torch.arange(size.page, device=bench.device)).flatten(2).long()
        out = [fresh(bench, *tokens.shape, size.head_dim) for _ in range(2)]
        places = tokens[..., None].expand(out[0].shape)
        return cls((keys, values), (out[0], out[1]), SlotLoads(into, units, into, count), size.page, places)

    def __call__(self, _: int) -> None:
        """This package's gather."""
        gather_into_slots(self.source, self.out, self.loads, self.page)

    def by_torch(self, _: int) -> list[Tensor]:
        """The peer."""
        return [held.gather(2, self.places) for held in self.source]

    def error(self) -> float:
        """Of what is in the slots."""
        self(0)
        return max(relative_error(*pair) for pair in zip(self.out, self.by_torch(0), strict=True))


@dataclass(frozen=True, eq=False)
class DriftingChoice:
    """index: int32 [steps, batch, kv_heads, chosen]; each step drops the first `missing` units and adds new ones."""

    table: SlotTable
    index: Tensor
    count: Tensor
    missing: int

    @classmethod
    def draw(cls, bench: Bench, size: ResidencySize) -> DriftingChoice:
        """Of random units."""
        units, sets = size.tokens // size.page, (size.batch, size.kv_heads)
        steps = max(STEPS, -(-2 * size.chosen // size.missing))
        drawn = torch.rand(*sets, units, device=bench.device).argsort(-1)[..., : steps * size.missing].int()
        starts = torch.arange(steps, device=bench.device)[:, None] * size.missing
        places = (starts + torch.arange(size.chosen, device=bench.device)) % drawn.shape[2]
        index = drawn[:, :, places].permute(2, 0, 1, 3).contiguous()
        count = torch.full(sets, size.chosen, dtype=torch.int32, device=bench.device)
        return cls(SlotTable.allocate(*sets, units, size.chosen, bench.device), index, count, size.missing)

    def __call__(self, variant: int) -> SlotLoads:
        """One step."""
        return allocate_slots(self.table, self.index[variant], self.count)

    def error(self) -> float:
        """The share of units that are not where the table says, and of loads that are too many, after two steps."""
        self(0)
        loads = self(1)
        units = self.table.unit_of.gather(2, loads.slots.long())
        wrong = (units != self.index[1]).float().mean() + (loads.count != self.missing).float().mean()
        return float(wrong)


def on_host(bench: Bench, size: ResidencySize, count: int) -> list[Tensor]:
    """`count` tensors of normal numbers, [batch, kv_heads, tokens, head_dim], in host memory as the device sees it."""
    shapes = [(torch.Size(_sizes(size)), bench.pool.dtype)] * count
    nbytes = sum(shape.numel() * dtype.itemsize + GROUP * 2 for shape, dtype in shapes)
    held = HostMemory.allocate(nbytes, bench.device).split(shapes)
    return [tensor.normal_() for tensor in held]


def _sizes(size: ResidencySize) -> tuple[int, int, int, int]:
    return size.batch, size.kv_heads, size.tokens, size.head_dim


def _over_link(moved_bytes: float) -> Within:
    return Within(moved_bytes / LINK_BYTES_PER_S)
