"""What a machine's rates become on another machine: which kernels run there, and what limits each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ridgeplan.roofline.catalog.hardware import Hardware

if TYPE_CHECKING:
    from ridgeplan.roofline.catalog.profile import Profile, Rates

# Below this share of the best class's bandwidth a class is taken to be bound by instructions, not by memory.
STREAMING_SHARE = 0.85


def transferred_classes(profile: Profile, hardware: Hardware) -> dict[str, Rates]:
    """Rates of every class on `hardware`, by what would run and bind there.

    Machines without this package's Hopper kernels get the portable ones' rates. Streaming keeps its share of the
    bandwidth. What instructions bind (unpacking codes, many rows per byte, tiles of outputs) keeps its speed per SM and
    clock, as far as memory allows. Launches, and chains of dependent steps, keep their time.
    """
    scale = _issue_scale(profile.hardware, hardware)
    classes = {**profile.classes, **_portable(profile, hardware)}
    ceiling = max(rates.bandwidth_utilization for rates in classes.values())
    bandwidth = hardware.bandwidth_bytes_per_s / profile.hardware.bandwidth_bytes_per_s
    return {name: _transferred(rates, min(1.0, ceiling), bandwidth, scale) for name, rates in classes.items()}


def _portable(profile: Profile, hardware: Hardware) -> Mapping[str, Rates]:
    differs = profile.hardware.has_hopper_kernels and not hardware.has_hopper_kernels
    return profile.portable if differs else {}


def _issue_scale(source: Hardware, target: Hardware) -> float:
    """Speed of instruction-bound kernels relative to the source's; that of the peaks where a clock is unknown."""
    if source.issue_rate and target.issue_rate:
        return target.issue_rate / source.issue_rate
    return target.compute_flops / source.compute_flops


def _transferred(rates: Rates, ceiling: float, bandwidth: float, issue: float) -> Rates:
    """`bandwidth` and `issue`: speed of memory and of instructions relative to the source's."""

    def inverse(found: float) -> float:
        """The inverse utilization there of one whose inverse here is `found`."""
        bound_by_memory = found * ceiling <= 1 / STREAMING_SHARE
        return found if bound_by_memory else max(1 / ceiling, found * bandwidth / issue)

    total = here = inverse(1 / rates.bandwidth_utilization)
    measured, steps = 1 / rates.bandwidth_utilization, []
    for step in rates.steps:
        measured += step.inverse_utilization
        total = max(total, inverse(measured))
        steps.append(replace(step, inverse_utilization=total - here, width_s=step.width_s / issue))
        here = total
    first = inverse(1 / rates.bandwidth_utilization)
    kept = first == 1 / rates.bandwidth_utilization
    utilization = rates.bandwidth_utilization if kept else 1 / first
    return replace(rates, bandwidth_utilization=utilization, width_s=rates.width_s / issue, steps=tuple(steps))
