"""The kernel bench: times every kernel call on this machine's GPU, with peers, reference and target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ridgeplan.roofline.cost import Cost
from ridgeplan.runtime.progress import OnProgress
from ridgeplan.validate import machine
from ridgeplan.validate.kernel_calls import (
    attention,
    experts,
    kv_cache,
    latent,
    layer,
    linear,
    offload,
    sampling,
    sparse,
    state,
)
from ridgeplan.validate.kernel_calls.case import BenchCase, Peers
from ridgeplan.validate.kernel_calls.sizes import KERNELS, bench_sizes
from ridgeplan.validate.timing import CUDA_ROTATE_BYTES, Bench, KernelCall

POOL_BYTES = 2 << 30  # memory for measuring the bandwidth
TRIAL_S = 0.04
MATMUL_SIZE = 8192
MAX_ERROR = 0.02  # relative, explained by bfloat16; with a larger error no target is met
PACKAGES = ("ridgeplan", "torch", "triton", "flashinfer-python", "vllm")

# The function that makes a kernel's cases, by kernel: KERNEL_cases in one of the modules of kernel calls.
FAMILIES: Mapping[str, Callable[[Bench, Any], Iterator[BenchCase]]] = {
    name.removesuffix("_cases"): make
    for module in (attention, latent, linear, experts, kv_cache, layer, sampling, sparse, state, offload)
    for name, make in vars(module).items()
    if name.endswith("_cases") and not name.startswith("_")
}


class NoCudaDevice(ValueError):
    """The kernel bench was run on a machine without a CUDA device."""


@dataclass(frozen=True)
class MachinePeaks:
    """The machine's measured bandwidth (a large copy or sum) and its FLOP/s in a large matrix product."""

    bytes_per_s: float
    flops: float

    @classmethod
    def measure(cls, bench: Bench, matmul_size: int) -> MachinePeaks:
        """The peaks of the bench's device."""
        return cls(machine.copy_bytes_per_s(bench), machine.matmul_flops(bench, matmul_size))

    def seconds(self, cost: Cost) -> float:
        """The roofline time of `cost`."""
        return float(max(cost.bytes / self.bytes_per_s, cost.flops / self.flops))


@dataclass(frozen=True)
class KernelRow:
    """One measured case. Times are medians; roof_s is the roofline time, target_s the longest that meets the target.

    peer: the one that the target refers to, else the fastest, else None. notes: why other peers were not timed.
    """

    kernel: str
    shape: str
    ours_s: float
    peers_s: Mapping[str, float]
    peer: str | None
    roof_s: float
    error: float
    target_s: float
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Speed-up over the peer."""
        return None if self.peer is None else self.peers_s[self.peer] / self.ours_s

    @property
    def roof_share(self) -> float:
        """The roofline time over the measured time."""
        return self.roof_s / self.ours_s

    @property
    def met(self) -> bool:
        """Whether the target is met, with an error that bfloat16 explains."""
        return self.ours_s <= self.target_s and self.error <= MAX_ERROR

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; times in microseconds."""
        return {
            "kernel": self.kernel,
            "shape": self.shape,
            "ours_us": _us(self.ours_s),
            "peer": self.peer,
            "peer_us": None if self.peer is None else _us(self.peers_s[self.peer]),
            "peers_us": {name: _us(seconds) for name, seconds in self.peers_s.items()},
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "roof": round(self.roof_share, 3),
            "error": float(f"{self.error:.3g}") if math.isfinite(self.error) else None,
            "target_us": _us(self.target_s) if math.isfinite(self.target_s) else None,
            "met": self.met,
            **({"notes": dict(self.notes)} if self.notes else {}),
        }


@dataclass(frozen=True)
class KernelReport:
    """The results of a run of the bench, with device, software and date."""

    device: str
    software: Mapping[str, str]
    date: str
    peaks: MachinePeaks
    rows: tuple[KernelRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "device": self.device,
            "software": dict(self.software),
            "date": self.date,
            "copy_bytes_per_s": round(self.peaks.bytes_per_s),
            "matmul_flops": round(self.peaks.flops),
            "rows": [row.to_dict() for row in self.rows],
        }


@torch.inference_mode()
def bench_kernels(kernels: Iterable[str] = KERNELS, on_progress: OnProgress | None = None) -> KernelReport:
    """Times `kernels` at all their sizes on this machine's GPU, with calls chained in CUDA graphs (see `Bench`).

    Raises NoCudaDevice.
    """
    bench = Bench.build(_cuda_device(), POOL_BYTES, CUDA_ROTATE_BYTES, TRIAL_S)
    peaks = MachinePeaks.measure(bench, MATMUL_SIZE)
    return KernelReport(
        device=torch.cuda.get_device_name(bench.device),
        software=machine.software(PACKAGES),
        date=machine.today(),
        peaks=peaks,
        rows=tuple(measured(bench, peaks, cases_of(bench, bench_sizes("full"), kernels, on_progress))),
    )


@torch.inference_mode()
def run_kernels_once(kernels: Iterable[str] = KERNELS) -> list[tuple[str, str, float]]:
    """(kernel, shape, error) of every kernel run once at a tiny size, for memory checkers. Raises NoCudaDevice.

    In bfloat16, for which the CUDA C++ kernels run, and in float32, for which Triton's do.
    """
    half = Bench.build(_cuda_device(), 1 << 20, 1, TRIAL_S)
    benches = {"bf16": half, "fp32": replace(half, pool=half.pool.float())}
    return [
        (case.kernel, f"{case.call.name}, {name}", case.call.error())
        for name, bench in benches.items()
        for case in cases_of(bench, bench_sizes("tiny"), kernels)
    ]


def cases_of(
    bench: Bench, sizes: Mapping[str, Sequence[Any]], kernels: Iterable[str], on_progress: OnProgress | None = None
) -> Iterator[BenchCase]:
    """The cases of `kernels`, created lazily, so that only one size's inputs are in memory."""
    chosen = [name for name in KERNELS if name in set(kernels)]
    for done, name in enumerate(chosen):
        if on_progress is not None:
            on_progress(name, done, len(chosen))
        yield from FAMILIES[name](bench, sizes[name])


def measured(bench: Bench, peaks: MachinePeaks, cases: Iterable[BenchCase]) -> Iterator[KernelRow]:
    """A row per case. Peers shared by consecutive cases are timed once."""
    shared: Peers | None = None
    peers_s, notes = dict[str, float](), dict[str, str]()
    for case in cases:
        ours_s = bench.median_s(case.call)  # first, as a peer may leave the device in error
        if case.call.peers is not shared:
            shared = case.call.peers
            peers_s, notes = timed_peers(bench, case.call)
        yield replace(row_of(case, ours_s, peers_s, peaks), notes=notes)


def timed_peers(bench: Bench, call: KernelCall) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of each peer that runs here, and a line on why each other one does not."""
    peers_s, notes = {}, {}
    for name, peer in call.peers.items():
        try:
            peers_s[name] = bench.median_s(replace(call, run=peer))
        except Exception as error:  # noqa: BLE001 - another project's kernels raise what they like
            notes[name] = f"{type(error).__name__}: {error}".partition("\n")[0].strip()
    return peers_s, notes


def row_of(case: BenchCase, ours_s: float, peers_s: Mapping[str, float], peaks: MachinePeaks) -> KernelRow:
    """The row of a case that took `ours_s`, and its peers `peers_s`."""
    roof_s = peaks.seconds(case.call.cost)
    candidates = [name for name in case.over if name in peers_s] or peers_s
    peer = min(candidates, key=peers_s.__getitem__, default=None)
    return KernelRow(
        kernel=case.kernel,
        shape=case.call.name,
        ours_s=ours_s,
        peers_s=peers_s,
        peer=peer,
        roof_s=roof_s,
        error=case.call.error(),
        target_s=case.target.limit_s(math.nan if peer is None else peers_s[peer], roof_s),
    )


def _cuda_device() -> torch.device:
    if not torch.cuda.is_available():
        raise NoCudaDevice("ridgeplan bench kernels needs a CUDA device, and torch finds none here")
    return torch.device("cuda")


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
