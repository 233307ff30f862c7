"""Seconds: the roofline time of an operation on a machine, at the utilization its kernel class reaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.cost import Cost, Term
from ridgeplan.roofline.passes import Op
from ridgeplan.roofline.term_math import maximum, where

# Rows up to which the runtime's dense products have kernels of their own, on a device and on a host.
DEVICE_FEW_ROWS, HOST_FEW_ROWS = 16, 64
DEVICE_GATED_ROWS = 8  # up to which a device's product of gate and up applies the activation, dense or 4-bit


@dataclass(frozen=True)
class RateTerms:
    """Utilizations and launch time of a kernel class as numbers, arrays (one plan each) or symbols."""

    bandwidth_utilization: Term
    compute_utilization: Term
    launch_s: Term
    spread: Term = 0.0  # relative, of the fit


@dataclass(frozen=True)
class Machine:
    """A machine's ceilings and the rates of its kernel classes."""

    bandwidth_bytes_per_s: Term
    compute_flops: Term
    rates: Mapping[str, RateTerms]
    pass_dispatch_s: Term
    layer_dispatch_s: Term
    prefill_layer_dispatch_s: Term
    asynchronous: Term
    memory_bytes: Term
    host_link_bytes_per_s: Term
    element_bytes: Term
    num_sms: Term
    few_rows: Term  # of a dense product: more are the library's, as in prefill
    gated_rows: Term  # up to which the product of gate and up applies the activation itself

    @classmethod
    def of(cls, profile: Profile) -> Machine:
        """The machine a calibration profile describes."""
        hardware = profile.hardware
        return cls(
            bandwidth_bytes_per_s=hardware.bandwidth_bytes_per_s,
            compute_flops=hardware.compute_flops,
            rates={kind: _rate_terms(profile, kind) for kind in KINDS},
            pass_dispatch_s=profile.pass_dispatch_s,
            layer_dispatch_s=profile.layer_dispatch_s,
            prefill_layer_dispatch_s=profile.prefill_layer_dispatch_s,
            asynchronous=int(profile.asynchronous),
            memory_bytes=hardware.memory_bytes,
            host_link_bytes_per_s=hardware.host_link_bytes_per_s * profile.host_link_utilization,
            element_bytes=hardware.element_bytes,
            num_sms=hardware.num_sms,
            few_rows=DEVICE_FEW_ROWS if profile.asynchronous else HOST_FEW_ROWS,
            gated_rows=DEVICE_GATED_ROWS if profile.asynchronous else 0,
        )

    def seconds(self, cost: Cost, rates: RateTerms) -> Term:
        """launch + max(bytes / (bandwidth x utilization), FLOPs / (peak x utilization))."""
        moving = cost.bytes / (self.bandwidth_bytes_per_s * rates.bandwidth_utilization)
        computing = cost.flops / (self.compute_flops * rates.compute_utilization)
        return rates.launch_s + maximum(moving, computing)

    def op_seconds(self, op: Op, own: Mapping[str, RateTerms]) -> Term:
        """All launches of one operation; `own` holds the rates that depend on the formats the pass reads."""
        return op.launches * self.seconds(op.cost, self.rates_of(op, own))

    def rates_of(self, op: Op, own: Mapping[str, RateTerms]) -> RateTerms:
        """The pass's own rates where the operation's class has any, else the machine's."""
        return own[op.kind] if op.kind in own else self.rates[op.kind]

    def pass_seconds(
        self, ops: Iterable[Op], own: Mapping[str, RateTerms], layers: Term, layer_dispatch_s: Term | None = None
    ) -> Term:
        """One forward pass: the device's work, and the host's, which a device that runs by itself overlaps.

        `layer_dispatch_s` is a decode pass's unless given.
        """
        device = sum(self.op_seconds(op, own) for op in ops)
        per_layer_s = self.layer_dispatch_s if layer_dispatch_s is None else layer_dispatch_s
        host = self.pass_dispatch_s + layers * per_layer_s
        return where(self.asynchronous, maximum(device, host), device + host)


def either(condition: Term, yes: RateTerms, no: RateTerms) -> RateTerms:
    """`yes` where the 0-or-1 term `condition` is 1, else `no`."""
    return RateTerms(*(where(condition, getattr(yes, f.name), getattr(no, f.name)) for f in fields(RateTerms)))


# Every class of kernels that a pass or a round launches.
KINDS = (
    "linear", "linear_int8", "linear_int4", "head", "attention", "attention_int4", "attention_int8", "attention_d64",
    "attention_int4_d64", "attention_int8_d64", "merge",
    "elementwise", "rope", "quantize", "sampling", "gather", "prefill_attention", "prefill_linear",
)  # fmt: skip


def linear_kind(bits: int) -> str:
    """Kernel class of a linear layer with weights of `bits` bits."""
    return {16: "linear", 8: "linear_int8", 4: "linear_int4"}[bits]


def attention_kind(bits: int, head_dim: int) -> str:
    """Kernel class of attention over codes of `bits` bits; 0 is full precision. Narrow heads are classes of their own:
    a kernel does as much work around each token of a head of 64 as of one of 128, for half the bytes."""
    codes = {0: "attention", 8: "attention_int8", 4: "attention_int4"}[bits]
    return codes if head_dim > 64 else f"{codes}_d64"


def _rate_terms(profile: Profile, kind: str) -> RateTerms:
    rates = profile.rates(kind)
    return RateTerms(rates.bandwidth_utilization, rates.compute_utilization, rates.launch_s, rates.spread)
