"""Calls that move KV to and from host memory: copies of layers, flushes, gathers, and slots of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from ridgeplan.kernels import offload
from ridgeplan.roofline.cost import Cost
from ridgeplan.runtime.buffers import HostMemory
from ridgeplan.validate.kernel_calls.case import BenchCase, Within, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import GROUP, ResidencySize
from ridgeplan.validate.timing import Bench, KernelCall

LINK_BYTES_PER_S = 40e9  # lowest rate over the link; PCIe 5.0 x16 copies pinned memory at 55 GB/s
RESIDENCY_S = 30e-6
STEPS = 20  # of a choice that drifts, until it comes back


def host_copy_call(bench: Bench, size: ResidencySize) -> KernelCall:
    """One layer's keys, copied to the device; against a copy of the pinned memory by the DMA engines."""
    (source,), out = on_host(bench, size, 1), fresh(bench, *_sizes(size))
    count = torch.full((size.batch,), size.tokens, dtype=torch.int32, device=bench.device)

    def copy(_: int) -> None:
        offload.copy_prefix(source, out, count)

    def error() -> float:
        copy(0)
        return relative_error(out, source)

    cost, peers = offload.copy_prefix_cost(source, size.tokens), {"copy_": lambda _: out.copy_(source)}
    return KernelCall("host_copy", size.name, cost, copy, error=error, peers=peers)


def host_store_call(bench: Bench, size: ResidencySize) -> KernelCall:
    """A flush of one group of every row to the host, to the rows' first tokens."""
    recent = fresh(bench, size.batch, size.kv_heads, 2 * GROUP, size.head_dim)
    (out,), first = on_host(bench, size, 1), torch.zeros(size.batch, dtype=torch.int32, device=bench.device)

    def flush(_: int) -> None:
        offload.flush_to_host(recent, out, first, GROUP, torch.ones_like(first, dtype=torch.bool))

    def error() -> float:
        flush(0)
        return relative_error(out[:, :, :GROUP], recent[:, :, :GROUP])

    return KernelCall("host_store", size.name, offload.flush_to_host_cost(recent, GROUP), flush, error=error)


def host_gather_call(bench: Bench, size: ResidencySize) -> KernelCall:
    """The units that one layer's slots lack; against torch's gather of the same tokens, by the same addresses.

    The units are random, and go into slots one after another.
    """
    keys, values = on_host(bench, size, 2)
    drawn = torch.rand(size.batch, size.kv_heads, size.tokens // size.page, device=bench.device)
    units = drawn.argsort(-1)[..., : size.missing].int().contiguous()
    into = torch.arange(size.missing, dtype=torch.int32, device=bench.device).expand_as(units).contiguous()
    count = torch.full(units.shape[:2], size.missing, dtype=torch.int32, device=bench.device)
    loads = offload.SlotLoads(into, units, into, count)
    tokens = (units[..., None] * size.page + torch.arange(size.page, device=bench.device)).flatten(2).long()
    out = fresh(bench, *tokens.shape, size.head_dim), fresh(bench, *tokens.shape, size.head_dim)
    places = tokens[..., None].expand(out[0].shape)

    def gather(_: int) -> None:
        offload.gather_into_slots((keys, values), out, loads, size.page)

    def by_torch(_: int) -> list[Tensor]:
        return [held.gather(2, places) for held in (keys, values)]

    def error() -> float:
        gather(0)
        return max(relative_error(*pair) for pair in zip(out, by_torch(0), strict=True))

    cost = offload.gather_cost((keys, values), size.missing, size.page)
    return KernelCall("host_gather", size.name, cost, gather, error=error, peers={"gather": by_torch})


def take_slots_call(bench: Bench, size: ResidencySize) -> KernelCall:
    """Slots of a choice of which every step lacks as many units as the last one.

    Each step drops the first `missing` units of random ones and adds new ones. The error is the share of units that are
    not where the table says, and of loads that are too many, after two steps.
    """
    units, sets = size.tokens // size.page, (size.batch, size.kv_heads)
    steps = max(STEPS, -(-2 * size.chosen // size.missing))
    drawn = torch.rand(*sets, units, device=bench.device).argsort(-1)[..., : steps * size.missing].int()
    starts = torch.arange(steps, device=bench.device)[:, None] * size.missing
    places = (starts + torch.arange(size.chosen, device=bench.device)) % drawn.shape[2]
    index = drawn[:, :, places].permute(2, 0, 1, 3).contiguous()  # [steps, batch, kv_heads, chosen]
    count = torch.full(sets, size.chosen, dtype=torch.int32, device=bench.device)
    table = offload.SlotTable.allocate(*sets, units, size.chosen, bench.device)

    def step(variant: int) -> offload.SlotLoads:
        return offload.allocate_slots(table, index[variant], count)

    def error() -> float:
        step(0)
        loads = step(1)
        held = table.unit_of.gather(2, loads.slots.long())
        return float((held != index[1]).float().mean() + (loads.count != size.missing).float().mean())

    return KernelCall(
        "take_slots", size.name, offload.allocate_slots_cost(table, index[0]), step, len(index), error=error
    )


def _cases(
    make: Callable[[Bench, ResidencySize], KernelCall],
    limit_s: Callable[[Cost], float],
    bench: Bench,
    sizes: Iterable[ResidencySize],
) -> Iterator[BenchCase]:
    for size in sizes:
        call = make(bench, size)
        yield BenchCase(call.kind, call, Within(limit_s(call.cost)))


host_copy_cases = partial(_cases, host_copy_call, lambda cost: cost.read_bytes / LINK_BYTES_PER_S)
host_store_cases = partial(_cases, host_store_call, lambda cost: cost.write_bytes / LINK_BYTES_PER_S)
host_gather_cases = partial(_cases, host_gather_call, lambda cost: cost.read_bytes / LINK_BYTES_PER_S)
take_slots_cases = partial(_cases, take_slots_call, lambda _: RESIDENCY_S)


def on_host(bench: Bench, size: ResidencySize, count: int) -> list[Tensor]:
    """`count` tensors of normal numbers, [batch, kv_heads, tokens, head_dim], in host memory as the device sees it."""
    shapes = [(torch.Size(_sizes(size)), bench.pool.dtype)] * count
    nbytes = sum(shape.numel() * dtype.itemsize + GROUP * 2 for shape, dtype in shapes)
    held = HostMemory.allocate(nbytes, bench.device).split(shapes)
    return [tensor.normal_() for tensor in held]


def _sizes(size: ResidencySize) -> tuple[int, int, int, int]:
    return size.batch, size.kv_heads, size.tokens, size.head_dim
