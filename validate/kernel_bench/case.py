"""A case of the kernel bench: one kernel at one size, with its peers, its reference and its target."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.roofline.cost import Cost
from ridgeplan.validate.timing import Bench, Trial

H200_BYTES_PER_S = 4.3e12  # a device copy, read and write, from which time targets are derived
Call = Callable[[int], object]
Peers = Mapping[str, Call]


@dataclass(frozen=True)
class SpeedUp:
    """At least `least` times as fast as the peer."""

    least: float

    def limit_s(self, peer_s: float, roof_s: float) -> float:
        """The longest time that meets the target."""
        return peer_s / self.least


@dataclass(frozen=True)
class RoofShare:
    """At least `least` of the machine's roofline."""

    least: float

    def limit_s(self, peer_s: float, roof_s: float) -> float:
        """The longest time that meets the target."""
        return roof_s / self.least


@dataclass(frozen=True)
class Within:
    """At most `seconds`."""

    seconds: float

    def limit_s(self, peer_s: float, roof_s: float) -> float:
        """The longest time that meets the target."""
        return self.seconds


Target = SpeedUp | RoofShare | Within


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one size.

    call: `call(i)` runs it on variant i of `variants` of its inputs, see `timing.Trial`; so do peers.
    cost: declared cost of all launches of a call. peers: other implementations on the same inputs; consecutive cases
    may share them. error: runs one call and compares with a float32 reference (`relative_error`).
    over: the peer to compare with, by default the fastest.
    """

    kernel: str
    shape: str
    cost: Cost
    call: Call
    peers: Peers
    error: Callable[[], float]
    target: Target
    over: str | None = None
    variants: int = 1

    def trial(self, call: Call) -> Trial:
        """The trial of `call`: this case's, or one of its peers'."""
        return Trial(self.kernel, self.shape, self.cost, call, self.variants)


def fresh(bench: Bench, *shape: int) -> Tensor:
    """New normal numbers in the bench's dtype; unlike views of its pool, they never share data."""
    return torch.randn(shape, dtype=bench.pool.dtype, device=bench.device)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """|result - reference| / |reference| (Euclidean norms, float32)."""
    reference = reference.float()
    return float((result.float() - reference).norm() / reference.norm())


def usable(peers: Peers) -> dict[str, Call]:
    """The peers that run here; a warning names each of the others."""
    found = {}
    for name, call in peers.items():
        try:
            call(0)
        except (RuntimeError, OSError, ImportError) as error:
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"{name} does not run here and is left out: {reason}", stacklevel=2)
        else:
            found[name] = call
    return found
