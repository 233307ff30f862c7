"""This machine's figures: measured for a CPU, from the catalog for a known GPU."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ridgeplan.roofline.catalog.hardware import FIGURES, Hardware, detect_hardware, load_hardware
from ridgeplan.roofline.cost import Cost
from ridgeplan.runtime.buffers import available_bytes
from ridgeplan.validate.timing import Bench, KernelCall

MEASURED = "measured by ridgeplan calibrate"
REPORTED = "as the system reports it"
UNKNOWN_CACHE_BYTES = 32 << 20  # if the system does not report it; larger than most
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def copy_bytes_per_s(bench: Bench) -> float:
    """Bandwidth of a large copy, or of a large sum if that is faster. Counts bytes read and written."""
    half = bench.pool.numel() // 2
    source, target = bench.pool[:half], torch.empty_like(bench.pool[:half])
    copy, read = Cost(read_bytes=source.nbytes, write_bytes=target.nbytes), Cost(read_bytes=bench.pool.nbytes)
    copied = bench.seconds(KernelCall("copy", "half the pool", copy, lambda _: target.copy_(source)))
    summed = bench.seconds(KernelCall("sum", "the pool", read, lambda _: bench.pool.sum()))
    return max(copy.bytes / copied, read.bytes / summed)


def matmul_flops(bench: Bench, size: int) -> float:
    """FLOP/s of a square product of random matrices in the models' dtype."""
    left, right = bench.random(2, size, size)
    cost = Cost(2 * size**3, left.nbytes + right.nbytes, left.nbytes)
    return float(cost.flops / bench.seconds(KernelCall("matmul", str(size), cost, lambda _: left @ right)))


def host_link_bytes_per_s(bench: Bench) -> float:
    """Bandwidth of a large copy from pinned host memory to a CUDA device."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=bench.device)
    cost = Cost(write_bytes=host.nbytes)
    return host.nbytes / bench.seconds(KernelCall("host link", "pinned", cost, lambda _: device.copy_(host, True)))


def free_library_workspaces(device: torch.device) -> None:
    """Frees cuBLAS workspaces, so that the next peak counts its own. Graphs captured before must not be replayed."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()


def cpu_hardware(bandwidth_bytes_per_s: float, compute_flops: float) -> Hardware:
    """This machine's CPU with its measured speeds."""
    kept = "compute_flops: this package runs no integer products on a CPU"
    return Hardware(
        name=f"cpu-{_slug(cpu_model())}",
        kind="cpu",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        compute_flops=compute_flops,
        int8_flops=compute_flops,
        l2_bytes=last_cache_bytes(),
        num_sms=torch.get_num_threads(),
        host_link_bytes_per_s=bandwidth_bytes_per_s,
        element_bytes=4,
        sources={
            **dict.fromkeys(FIGURES, REPORTED),
            "bandwidth_bytes_per_s": f"{MEASURED}: a large copy or sum",
            "compute_flops": f"{MEASURED}: a large fp32 product",
            "int8_flops": f"taken from {kept}",
            "host_link_bytes_per_s": "taken from bandwidth_bytes_per_s: a CPU has its memory at hand",
            "num_sms": "threads that torch computes with",
        },
    )


def cuda_hardware(bench: Bench, bandwidth_bytes_per_s: float, compute_flops: float) -> Hardware:
    """The catalog's entry for this GPU, else measured figures and the driver's."""
    known = detect_hardware()
    if known is not None:
        return load_hardware(known)
    properties: Any = torch.cuda.get_device_properties(bench.device)
    measured = ("bandwidth_bytes_per_s", "compute_flops", "host_link_bytes_per_s")
    return Hardware(
        name=_slug(properties.name),
        memory_bytes=properties.total_memory,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        compute_flops=compute_flops,
        int8_flops=compute_flops,
        l2_bytes=properties.L2_cache_size,
        num_sms=properties.multi_processor_count,
        host_link_bytes_per_s=host_link_bytes_per_s(bench),
        compute_capability=f"{properties.major}.{properties.minor}",
        sources={
            **dict.fromkeys(FIGURES, REPORTED),
            **dict.fromkeys(measured, MEASURED),
            "int8_flops": "taken from compute_flops: integer products were not measured",
        },
    )


def measured_here() -> dict[str, Any]:
    """The origin of results: device, date, and versions."""
    return {"device": device_here(), "date": today(), "software": software()}


def today() -> str:
    """The date in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def software(packages: Iterable[str] = ("torch", "ridgeplan")) -> dict[str, str]:
    """Versions of those packages that are installed, by default of torch and of this package."""
    versions = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def device_here() -> str:
    """The name of the first GPU, else of the processor."""
    return device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the processor for any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def free_bytes(device: torch.device) -> float:
    """Memory that torch may still allocate; 1e18 where the host does not report it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what earlier engines freed counts as free
        return float(torch.cuda.mem_get_info(device)[0])
    return float(available_bytes() or 1e18)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as Linux reports it, else the platform's."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine() or "unknown"


def last_cache_bytes(caches: Path = _CACHES) -> int:
    """Size of the last-level cache, or a large guess if the system does not report it."""
    sizes = [file.read_text().strip() for file in caches.glob("index*/size")]
    known = [int(size[:-1]) * _SIZE_UNITS[size[-1]] for size in sizes if re.fullmatch(r"\d+[KMG]", size)]
    return max(known, default=UNKNOWN_CACHE_BYTES)


def _slug(name: str) -> str:
    """Lower-case words joined by hyphens, without trademark signs."""
    plain = re.sub(r"\((r|tm|c)\)", " ", name.casefold())
    return "-".join(re.findall(r"[a-z0-9.]+", plain))
