"""The link to the host as this package uses it: copies of layers, gathers of tokens, writes, and a cache's streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ridgeplan.kernels.residency.gather import KeysAndValues, gather_into_slots
from ridgeplan.kernels.residency.leading_copy import copy_leading
from ridgeplan.kernels.residency.slots import SlotLoads
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.offload.host_memory import HostMemory

SIZE = 1 << 29  # bytes that a copy moves
HEADS, HEAD_DIM = 8, 128
REPEATS = 5


@torch.inference_mode()
def measured_link(device: torch.device, size: int = SIZE) -> dict[str, float]:
    """GB/s to the device by this package's copies, by gathers of tokens and of pages of 16, and to the host."""
    tokens = size // (2 * HEADS * HEAD_DIM * 2)
    shapes = [(torch.Size((1, HEADS, tokens, HEAD_DIM)), torch.bfloat16)] * 2
    keys, values = HostMemory.allocate(size, device).split(shapes)
    held = keys, values
    out = torch.zeros_like(keys, device=device), torch.zeros_like(values, device=device)
    count = torch.full((1,), tokens, dtype=torch.int32, device=device)
    rates = {
        "copy": size / _seconds(device, partial(_copy, held, out, count)) / 1e9,
        "store": size / _seconds(device, partial(_copy, out, held, count)) / 1e9,
    }
    for page in (1, 16):
        loads, moved = random_loads(tokens, page, device)
        seconds = _seconds(device, partial(gather_into_slots, held, out, loads, page))
        rates[f"gather of {page}"] = moved / seconds / 1e9
    return rates


def _copy(source: KeysAndValues, out: KeysAndValues, count: Tensor) -> None:
    for held, copied in zip(source, out, strict=True):
        copy_leading(held, copied, count)


def random_loads(tokens: int, page: int, device: torch.device) -> tuple[SlotLoads, int]:
    """Loads of a quarter of the tokens, in random units, and the bytes that they move."""
    units = tokens // page
    wanted = units // 4
    chosen = torch.stack([torch.randperm(units)[:wanted] for _ in range(HEADS)])[None].int().to(device)
    into = torch.arange(wanted, dtype=torch.int32, device=device).expand(1, HEADS, wanted).contiguous()
    count = torch.full((1, HEADS), wanted, dtype=torch.int32, device=device)
    return SlotLoads(into, chosen, into, count), 2 * HEADS * wanted * page * HEAD_DIM * 2


@torch.inference_mode()
def streaming_seconds(cache: Cache) -> tuple[float, int]:
    """Seconds to bring all layers on the host to the device once, without any computation, and the bytes moved."""
    stream = cache.stream
    if stream is None:
        return 0.0, 0
    old = cache.quantized(cache.lengths)
    entries = old // cache.config.group if cache.config.format.quantized else old

    def once() -> None:
        for layer in range(len(stream.layers)):
            stream.fetch(layer, entries)
            stream.release(layer)

    seconds = _seconds(cache.lengths.device, once)
    held = sum(part.nbytes for parts in stream.layers for part in parts)
    return seconds, int(held * float(entries.float().mean()) / stream.layers[0][0].shape[2])


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """The median of some runs."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[REPEATS // 2]
