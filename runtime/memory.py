"""Memory checks before loading, and the peak memory of a generation."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ridgeplan.planner.capacity import MEMORY_UTILIZATION, Offloaded, missing_memory, offloaded_layers, usable_bytes
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import Plan, Weights
from ridgeplan.runtime.buffers import available_bytes
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.heap import keep_freed_memory, return_freed_memory
from ridgeplan.runtime.model.checkpoint import loaded_bytes

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_MAPPINGS = Path("/proc/self/smaps")
HOST_ALLOCATOR = "DefaultCPUAllocator"  # in torch's message; the error is a plain RuntimeError
SMALLER = "allowed: a shorter context, a smaller batch or another KV format"


@dataclass(frozen=True)
class PeakMemory:
    """Peaks in bytes; None where the platform does not report them.

    allocated: on CUDA, the bytes that torch has allocated; on a CPU, the growth of the process. device: on CUDA, the
    bytes that the driver reports as used by all processes, including the reserve of torch's allocator. outside: the
    bytes outside that reserve that were in use before the engine: CUDA context, loaded kernels, other processes.
    """

    allocated: int | None
    device: int | None = None
    outside: int | None = None


class MemoryMeter:
    """Peak memory since construction, or since the last `restart`.

    On a CPU the interpreter and its libraries do not count, but `shared_bytes` of weights loaded earlier do. What the
    process freed before does not count either: its allocator gives that back to the system first.
    """

    def __init__(self, device: torch.device, shared_bytes: int = 0) -> None:
        self._device = device
        self._outside = _outside_bytes(device) if device.type == "cuda" else None
        if device.type != "cuda":
            return_freed_memory()
        self._library_bytes = _library_bytes()
        self._before_bytes = max(0, (_status_bytes("VmRSS") or 0) - shared_bytes)
        self._reset()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leaves out what a CPU's process grows by inside the body, which loads code."""
        before_bytes = (_status_bytes("VmRSS") or 0) - _library_bytes()
        yield
        self._before_bytes += max(0, (_status_bytes("VmRSS") or 0) - _library_bytes() - before_bytes)

    def restart(self) -> None:
        """Resets the peak, as a generation begins, whose operations then use the memory of those before."""
        self._reset()
        if self._device.type != "cuda":
            keep_freed_memory()

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _CLEAR.exists():
            return_freed_memory()
            try:
                _CLEAR.write_text("5")  # resets VmHWM to the current resident set (proc(5))
            except PermissionError:
                return  # the peak of the whole process is too high, but better than none

    def peak(self) -> PeakMemory:
        """The peaks so far."""
        if self._device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(self._device)
            return PeakMemory(self.peak_bytes(), reserved + _outside_bytes(self._device), self._outside)
        return PeakMemory(self.peak_bytes())

    def peak_bytes(self) -> int | None:
        """The peak of what was allocated so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        peak = _status_bytes("VmHWM")
        loaded_bytes = _library_bytes() - self._library_bytes  # code that ran for the first time
        return None if peak is None else max(0, peak - self._before_bytes - loaded_bytes)


def require_memory(
    plan: Plan,
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    shared_bytes: int,
    memory_utilization: float = MEMORY_UTILIZATION,
) -> Offloaded:
    """The number of layers to offload so that the plan's predicted peak fits into usable memory, and the bytes left.

    Usable memory is the free memory, at most `memory_utilization` of a GPU's memory, and at most the memory that the
    plan's placement allows. shared_bytes: weights that are already on the device.
    Raises WorkloadError if the plan does not fit, before anything is allocated. Nothing is checked on a host that does
    not report its available memory.
    """
    available = _available(device, dtype, shared_bytes, memory_utilization)
    if available is None:
        return Offloaded()
    limit = plan.placement.memory_bytes or available.memory_bytes
    available = replace(available, memory_bytes=min(available.memory_bytes, limit))
    missing = missing_memory(plan, shape, available)
    if missing:
        raise WorkloadError(missing)
    return offloaded_layers(plan, shape, available)


def require_weight_memory(
    source: str,
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    weights: Weights = Weights(),  # noqa: B008
) -> None:
    """Raises WorkloadError if the weights in the folder `source` exceed what is free, before any of them is read.

    The sizes come from the weights' files, not from the configuration; 16-bit weights double if `dtype` is float32.
    weights: as for `loaded_bytes`.
    """
    available = _available(device, dtype, 0, 1.0)
    needed_bytes = loaded_bytes(source, shape, weights, dtype)
    if available is not None and needed_bytes > available.memory_bytes:
        raise WorkloadError(
            f"the weights in {source} take {needed_bytes / 1e9:.1f} GB as {dtype} and "
            f"{available.memory_bytes / 1e9:.1f} GB are free; allowed: a smaller model"
        )


def _available(device: torch.device, dtype: torch.dtype, shared_bytes: int, memory_utilization: float) -> Device | None:
    """A device with the memory that may be allocated, plus `shared_bytes`, which predictions count; None if unknown."""
    if device.type != "cuda":
        free_bytes = available_bytes()
        if free_bytes is None:
            return None
        memory_bytes, cores = free_bytes + shared_bytes, torch.get_num_threads()
        return Device(memory_bytes=memory_bytes, element_bytes=dtype.itemsize, num_sms=cores, asynchronous=0)
    torch.cuda.empty_cache()  # memory of closed engines that torch's allocator still holds is free too
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    usable = min(free_bytes + shared_bytes, usable_bytes(total_bytes, memory_utilization))
    return Device(memory_bytes=usable, element_bytes=dtype.itemsize, num_sms=num_sms)


@contextlib.contextmanager
def readable_out_of_memory(device: torch.device) -> Iterator[None]:
    """Turns an allocation that fails into a one-line WorkloadError, and on a GPU frees what the body had allocated."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The error's frames keep their tensors alive as long as the error is referenced.
        traceback.clear_frames(error.__traceback__)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        raise WorkloadError(
            f"out of memory: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free on {device}; {SMALLER}"
        ) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and HOST_ALLOCATOR not in str(error):
            raise
        raise WorkloadError(f"out of memory on {device}; {SMALLER}") from error


def _outside_bytes(device: torch.device) -> int:
    """Bytes in use on a GPU that are not torch's allocator's."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _library_bytes() -> int:
    """Resident bytes of shared libraries, whose pages are read as their code first runs."""
    if not _MAPPINGS.exists():
        return 0
    resident_bytes, is_library = 0, False
    for line in _MAPPINGS.read_text(errors="replace").splitlines():
        field, *values = line.split()
        if not field.endswith(":"):
            is_library = len(values) > 4 and ".so" in Path(values[4]).name
        elif is_library and field == "Rss:":
            resident_bytes += int(values[0]) * 1024
    return resident_bytes


def _status_bytes(field: str) -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
