"""Roofline time of an operation on a machine, at the utilization of its kernel class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.cost import Cost, Term
from ridgeplan.roofline.device import Device
from ridgeplan.roofline.execution import CPU_SKINNY_GEMM_ROWS, CUDA_FUSED_SWIGLU_ROWS, CUDA_SKINNY_GEMM_ROWS
from ridgeplan.roofline.passes import Op
from ridgeplan.roofline.term_math import maximum, minimum, where


@dataclass(frozen=True)
class RateTerms:
    """Utilizations and launch time of a kernel class as numbers, arrays (one plan each) or symbols."""

    bandwidth_utilization: Term
    compute_utilization: Term
    launch_s: Term
    spread: Term = 0.0  # relative standard deviation of the fit


@dataclass(frozen=True)
class PassRates:
    """Rates of the classes that depend on the formats a decode pass reads: bits of weights and of codes."""

    linear: RateTerms
    head: RateTerms
    attention: RateTerms


@dataclass(frozen=True)
class StrategyRates:
    """A machine's rates for a strategy's formats: of the target's passes and of the drafts'."""

    target: PassRates
    draft: PassRates


@dataclass(frozen=True, kw_only=True)
class Machine(Device):
    """A device with its peak rates, the utilizations of its kernel classes and the host's launch times."""

    bandwidth_bytes_per_s: Term
    compute_flops: Term  # FLOP/s
    host_link_bytes_per_s: Term
    rates: Mapping[str, RateTerms]
    pass_dispatch_s: Term
    layer_dispatch_s: Term
    prefill_layer_dispatch_s: Term
    skinny_gemm_rows: Term  # most rows of this package's dense kernels; beyond, the library's run
    fused_swiglu_rows: Term  # most rows for which the gate and up product applies SwiGLU

    @classmethod
    def of(cls, profile: Profile) -> Machine:
        """The machine that a calibration profile describes."""
        hardware = profile.hardware
        return cls(
            memory_bytes=hardware.memory_bytes,
            element_bytes=hardware.element_bytes,
            num_sms=hardware.num_sms,
            asynchronous=int(profile.asynchronous),
            bandwidth_bytes_per_s=hardware.bandwidth_bytes_per_s,
            compute_flops=hardware.compute_flops,
            host_link_bytes_per_s=hardware.host_link_bytes_per_s * profile.host_link_utilization,
            rates={kernel_class: _rate_terms(profile, kernel_class) for kernel_class in KERNEL_CLASSES},
            pass_dispatch_s=profile.pass_dispatch_s,
            layer_dispatch_s=profile.layer_dispatch_s,
            prefill_layer_dispatch_s=profile.prefill_layer_dispatch_s,
            skinny_gemm_rows=CUDA_SKINNY_GEMM_ROWS if profile.asynchronous else CPU_SKINNY_GEMM_ROWS,
            fused_swiglu_rows=CUDA_FUSED_SWIGLU_ROWS if profile.asynchronous else 0,
        )

    def seconds(self, cost: Cost, rates: RateTerms) -> Term:
        """launch + max(bytes / (bandwidth x utilization), FLOPs / (peak x utilization))."""
        memory_s = cost.bytes / (self.bandwidth_bytes_per_s * rates.bandwidth_utilization)
        compute_s = cost.flops / (self.compute_flops * rates.compute_utilization)
        return rates.launch_s + maximum(memory_s, compute_s)

    def op_seconds(self, op: Op, pass_rates: Mapping[str, RateTerms]) -> Term:
        """Seconds of all launches of one operation of a pass; `pass_rates` as for `rates_for`."""
        return op.launches * self.seconds(op.cost, self.rates_for(op, pass_rates))

    def rates_for(self, op: Op, pass_rates: Mapping[str, RateTerms]) -> RateTerms:
        """The pass's own rates for the operation's class if it has any, else the machine's."""
        return pass_rates[op.kind] if op.kind in pass_rates else self.rates[op.kind]

    def gemm_rates(self, rows: Term, dense: Term, few_rows: RateTerms) -> RateTerms:
        """Rates of a matrix product: `few_rows`, or prefill's for a dense one with more rows."""
        beyond = dense * minimum(maximum(rows - self.skinny_gemm_rows, 0), 1)
        return select_rates(beyond, self.rates["prefill_linear"], few_rows)

    def pass_seconds(
        self,
        ops: Iterable[Op],
        pass_rates: Mapping[str, RateTerms],
        layers: Term,
        layer_dispatch_s: Term | None = None,
    ) -> Term:
        """One forward pass: the device's time and the host's, which overlap on an asynchronous device.

        `layer_dispatch_s` defaults to a decode pass's.
        """
        device_s = sum(self.op_seconds(op, pass_rates) for op in ops)
        per_layer_s = self.layer_dispatch_s if layer_dispatch_s is None else layer_dispatch_s
        host_s = self.pass_dispatch_s + layers * per_layer_s
        return where(self.asynchronous, maximum(device_s, host_s), device_s + host_s)


def select_rates(condition: Term, yes: RateTerms, no: RateTerms) -> RateTerms:
    """`yes` where the 0-or-1 term `condition` is 1, else `no`."""
    return RateTerms(*(where(condition, getattr(yes, f.name), getattr(no, f.name)) for f in fields(RateTerms)))


# Every class of kernels that a pass or a round launches.
KERNEL_CLASSES = (
    "linear", "linear_int8", "linear_int4", "head", "attention", "attention_int4", "attention_int8", "attention_d64",
    "attention_int4_d64", "attention_int8_d64",
    "elementwise", "rope", "quantize", "sampling", "gather", "prefill_attention", "prefill_linear",
)  # fmt: skip


def linear_kind(bits: int) -> str:
    """Kernel class of a linear layer with weights of `bits` bits."""
    return {16: "linear", 8: "linear_int8", 4: "linear_int4"}[bits]


def attention_kind(bits: int, head_dim: int) -> str:
    """Kernel class of decode attention over codes of `bits` bits; 0 is full precision.

    Heads of up to 64 elements have classes of their own: each token costs the same overhead as with a head of 128, for
    half the bytes.
    """
    codes = {0: "attention", 8: "attention_int8", 4: "attention_int4"}[bits]
    return codes if head_dim > 64 else f"{codes}_d64"


def _rate_terms(profile: Profile, kernel_class: str) -> RateTerms:
    rates = profile.rates(kernel_class)
    return RateTerms(rates.bandwidth_utilization, rates.compute_utilization, rates.launch_s, rates.spread)
