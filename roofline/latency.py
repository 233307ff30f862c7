"""Roofline time of an operation on a machine: device properties, and rates at the utilization of each kernel class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from ridgeplan.roofline.catalog.profile import LINK_CLASSES, MAX_ROW_STEPS, Profile, Rates
from ridgeplan.roofline.cost import Cost, Term, hypot, indicator, maximum, minimum, where
from ridgeplan.roofline.execution import (
    CPU_SKINNY_GEMM_ROWS,
    CUDA_FUSED_SWIGLU_ROWS,
    CUDA_LIBRARY_GEMM_ROWS,
    CUDA_SCAN_HEAD_DIM,
    CUDA_SCAN_HEADS,
    INTEGER_ELEMENTS,
    filled,
    most_integer_inputs,
    takes_integers,
)
from ridgeplan.roofline.passes import Op

if TYPE_CHECKING:
    from ridgeplan.roofline.engine import EngineRates

GIB = 2**30  # bytes


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device's memory, and the properties that buffer sizes depend on.

    memory_bytes: available to plans. element_bytes: of a full-precision element, 2 for bf16 on a GPU, 4 for fp32 on a
    CPU. num_sms: streaming multiprocessors, or cores of a CPU. asynchronous: 1 where the device works while the host
    launches more (a GPU), 0 where both are the same (a CPU). grouped_experts: 1 where prompts' routed experts are a
    library's grouped products (`kernels/experts/grouped.py`). engine: a serving engine that runs plans on the device,
    with times and memory of its own; None for this package's runtime.
    """

    memory_bytes: Term
    element_bytes: Term
    num_sms: Term
    asynchronous: Term = 1
    grouped_experts: int = 0
    engine: EngineRates | None = None


UNLIMITED_ROWS = 1 << 40


@dataclass(frozen=True)
class StepTerms:
    """A `RowStep` as numbers or arrays."""

    above_rows: Term
    launch_s: Term
    inverse_utilization: Term
    tile_s: Term
    fill_s: Term
    width_s: Term
    depth_s: Term


NO_STEP = StepTerms(UNLIMITED_ROWS, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
# Parts of a class's time that each step of rows adds to.
STEPPED_PARTS = ("launch_s", "tile_s", "fill_s", "width_s", "depth_s")


@dataclass(frozen=True)
class RateTerms:
    """A kernel class's `Rates` as numbers, arrays (one plan each) or symbols.

    steps: those of the class, then `NO_STEP` up to MAX_ROW_STEPS, so that those of several plans can be stacked.
    integer_inputs: of products of integers, most inputs with the rows that the rates are for (of one row, most elements
    of x); 0 for other kernels.
    """

    bandwidth_utilization: Term
    compute_utilization: Term
    launch_s: Term
    spread: Term = 0.0  # relative standard deviation of the fit
    tile_s: Term = 0.0
    fill_s: Term = 0.0
    width_s: Term = 0.0
    depth_s: Term = 0.0
    steps: tuple[StepTerms, ...] = ()
    integer_inputs: Term = 0.0

    @classmethod
    def of(cls, rates: Rates) -> RateTerms:
        """A profile's rates."""
        steps = [StepTerms(**vars(step)) for step in rates.steps]
        terms = {item.name: getattr(rates, item.name) for item in fields(cls) if hasattr(rates, item.name)}
        return cls(**terms | {"steps": (*steps, *[NO_STEP] * (MAX_ROW_STEPS - len(steps)))})

    def at_rows(self, rows: Term) -> RateTerms:
        """The rates of calls with `rows` rows: every step below them is added."""
        elements = self.integer_inputs
        taken = [(step, 1 - indicator(rows, step.above_rows)) for step in self.steps if step is not NO_STEP]

        def total(first: Term, name: str) -> Term:
            added = [(getattr(step, name), reached) for step, reached in taken]
            return first + sum(value * reached for value, reached in added if not _is_zero(value))

        return replace(
            self,
            bandwidth_utilization=1 / total(1 / self.bandwidth_utilization, "inverse_utilization"),
            **{name: total(getattr(self, name), name) for name in STEPPED_PARTS},
            steps=(),
            integer_inputs=elements if _is_zero(elements) else most_integer_inputs(rows, elements),
        )


def _is_zero(value: Term) -> bool:
    """Whether a number, not an array or a symbol, is 0: most parts of most steps are, and cost time to add."""
    return isinstance(value, float) and value == 0


FULL_LINK = RateTerms(1.0, 1.0, 0.0)


@dataclass(frozen=True)
class PassRates:
    """Rates of the classes that depend on the formats a decode pass reads: bits of weights and of codes."""

    linear: RateTerms
    head: RateTerms
    attention: RateTerms
    experts: RateTerms
    integers: RateTerms  # of linear layers, where their products are computed as integers
    head_integers: RateTerms


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
    draft_gap_s: Term = 0.0  # what a draft's pass takes on the device beyond its kernels
    target_gap_s: Term = 0.0
    round_s: Term = 0.0  # what a round takes beyond its passes
    drafted_round_s: Term = 0.0  # what a round with drafts takes beyond `round_s`
    link_rates: Mapping[str, RateTerms] = field(default_factory=dict)  # of `LINK_CLASSES`, as shares of the link
    decode_gemm_rows: Term  # most rows of dense products with a decode pass's rates; beyond, they have prefill's
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
            grouped_experts=int(hardware.compute_capability.startswith("9.")),  # Hopper
            bandwidth_bytes_per_s=hardware.bandwidth_bytes_per_s,
            compute_flops=hardware.compute_flops,
            host_link_bytes_per_s=hardware.host_link_bytes_per_s * profile.host_link_utilization,
            rates={kernel_class: RateTerms.of(profile.rates(kernel_class)) for kernel_class in KERNEL_CLASSES}
            | {
                kind: replace(RateTerms.of(profile.classes[kind]), integer_inputs=float(INTEGER_ELEMENTS[bits]))
                for kind, bits in INTEGER_CLASSES.items()
                if kind in profile.classes
            },
            link_rates={kind: RateTerms.of(profile.classes[kind]) for kind in LINK_CLASSES if kind in profile.classes},
            pass_dispatch_s=profile.pass_dispatch_s,
            layer_dispatch_s=profile.layer_dispatch_s,
            prefill_layer_dispatch_s=profile.prefill_layer_dispatch_s,
            draft_gap_s=profile.draft_gap_s,
            target_gap_s=profile.target_gap_s,
            round_s=profile.round_s,
            decode_gemm_rows=CUDA_LIBRARY_GEMM_ROWS if profile.asynchronous else CPU_SKINNY_GEMM_ROWS,
            fused_swiglu_rows=CUDA_FUSED_SWIGLU_ROWS if profile.asynchronous else 0,
        )

    def seconds(self, cost: Cost, rates: RateTerms, width: Term = 0, depth: Term = 0, tiles: Term = 0) -> Term:
        """The time of one launch, by the formula of `ridgeplan.roofline.catalog.profile.Rates`; `tiles` of all SMs."""
        memory_s = cost.bytes / (self.bandwidth_bytes_per_s * rates.bandwidth_utilization)
        compute_s = cost.flops / (self.compute_flops * rates.compute_utilization)
        sm_tiles = tiles / self.num_sms
        work_s = hypot(maximum(memory_s, compute_s), sm_tiles * rates.tile_s)
        fill_s = filled(sm_tiles) * rates.fill_s
        return rates.launch_s + fill_s + work_s + width * rates.width_s + depth * rates.depth_s

    def link_seconds(self, kind: str, moved_bytes: Term) -> Term:
        """The time to move bytes over the link to the host, by a class of `LINK_CLASSES`; 0 for none.

        A class that is not calibrated moves them as fast as copies of pinned memory do.
        """
        rates = self.link_rates.get(kind, FULL_LINK)
        launch_s = rates.launch_s * minimum(moved_bytes, 1)
        return launch_s + moved_bytes / (self.host_link_bytes_per_s * rates.bandwidth_utilization)

    def op_seconds(self, op: Op, pass_rates: Mapping[str, RateTerms]) -> Term:
        """Seconds of all launches of one operation of a pass; `pass_rates` as for `rates_for`."""
        return op.launches * self.seconds(op.cost, self.rates_for(op, pass_rates), op.width, op.depth, op.tiles)

    def rates_for(self, op: Op, pass_rates: Mapping[str, RateTerms]) -> RateTerms:
        """The pass's own rates for the operation's kind if it has any, else the machine's."""
        rates = pass_rates.get(op.kind)
        if rates is None:
            return self.rates[op.kind]
        rates, integers = pass_rates.get(op.rate_kind, rates), self.integers(op, pass_rates)
        return rates if _is_zero(integers) else select_rates(integers, pass_rates[integer_kind(op.kind)], rates)

    def integers(self, op: Op, pass_rates: Mapping[str, RateTerms]) -> Term:
        """1 where the operation is a product of integers, with the rates of that class, else 0."""
        rates = pass_rates.get(integer_kind(op.kind))
        if rates is None or _is_zero(rates.integer_inputs):
            return 0.0
        return takes_integers(op.depth, rates.integer_inputs)

    def gemm_rates(self, rows: Term, dense: Term, decode: RateTerms) -> RateTerms:
        """Rates of a matrix product of `rows` rows: those of its class in a decode pass, as far as they were measured.

        Dense products with more rows have prefill's, or those of the last step where these are slower.
        """
        few = decode.at_rows(rows)
        beyond = dense * minimum(maximum(rows - self.decode_gemm_rows, 0), 1)
        return select_rates(beyond, slower_rates(self.rates["prefill_linear"], few), few)

    def pass_seconds(self, ops: Iterable[Op], pass_rates: Mapping[str, RateTerms], layers: Term, gap_s: Term) -> Term:
        """One decode pass: the device's time and the host's, which overlap on an asynchronous device.

        `gap_s` is what the pass takes beyond its layers and kernels, and the class "gap" what each layer does.
        """
        device_s = sum(self.op_seconds(op, pass_rates) for op in ops) + self.gap_seconds(pass_rates, layers, gap_s)
        return self._with_host(device_s, self.pass_dispatch_s + layers * self.layer_dispatch_s)

    def gap_seconds(self, pass_rates: Mapping[str, RateTerms], layers: Term, gap_s: Term) -> Term:
        """What one decode pass takes on the device between its kernels; arguments as for `pass_seconds`."""
        return gap_s + layers * pass_rates["gap"].launch_s

    def prefill_seconds(self, ops: Iterable[Op], pass_rates: Mapping[str, RateTerms], layer_launches: Term) -> Term:
        """A prefill whose layers are launched `layer_launches` times in all."""
        device_s = sum(self.op_seconds(op, pass_rates) for op in ops)
        return self._with_host(device_s, self.pass_dispatch_s + layer_launches * self.prefill_layer_dispatch_s)

    def _with_host(self, device_s: Term, host_s: Term) -> Term:
        return where(self.asynchronous, maximum(device_s, host_s), device_s + host_s)


def select_rates(condition: Term, yes: RateTerms, no: RateTerms) -> RateTerms:
    """`yes` where the 0-or-1 term `condition` is 1, else `no`; both without steps."""
    return _combined(lambda first, second: where(condition, first, second), yes, no)


def slower_rates(first: RateTerms, second: RateTerms) -> RateTerms:
    """The slower of two rates in each of their parts, without steps: no call is faster than at either."""
    slow = _combined(maximum, first, second)
    return replace(
        slow,
        bandwidth_utilization=minimum(first.bandwidth_utilization, second.bandwidth_utilization),
        compute_utilization=minimum(first.compute_utilization, second.compute_utilization),
    )


def _combined(choose: Callable[[Term, Term], Term], first: RateTerms, second: RateTerms) -> RateTerms:
    names = [item.name for item in fields(RateTerms) if item.name != "steps"]
    return RateTerms(**{name: choose(getattr(first, name), getattr(second, name)) for name in names})


INTEGER = "_integer"  # ends the classes of products that are computed as integers, by Hopper's kernels alone
INTEGER_CLASSES: Mapping[str, int] = {"linear_int8_integer": 8, "linear_int4_integer": 4}  # and bits
STORED_LINEAR = "linear_stored"  # linear layers and heads with weights as a GGUF file stores them

# Every class of kernels that a pass or a round launches.
KERNEL_CLASSES = (
    "linear", "linear_int8", "linear_int4", STORED_LINEAR, "head",
    "grouped_linear", "grouped_linear_int8", "grouped_linear_int4", "attention", "attention_int4", "attention_int8",
    "attention_d64", "attention_int4_d64", "attention_int8_d64", "attention_d256", "attention_int4_d256",
    "attention_int8_d256", "attention_mla", "gap", "elementwise", "state", "rope",
    "quantize", "sampling", "gather", "prefill_attention", "prefill_attention_d64", "prefill_linear",
    "two_bit_scan", "two_bit_scan_wide", "top_k", "sparse_attention", "sparse_attention_full", "sparse_attention_wide",
    "progressive_attention", "progressive_attention_wide",
)  # fmt: skip

# Of these, those that scan 2-bit keys, and the same for heads that the CUDA C++ kernels do not take.
WIDE = "_wide"
SCANS = ("two_bit_scan", "progressive_attention")
WIDE_SCANS = tuple(kind + WIDE for kind in SCANS)


def linear_kind(bits: int) -> str:
    """Kernel class of a linear layer with weights of `bits` bits."""
    return {16: "linear", 8: "linear_int8", 4: "linear_int4"}[bits]


def integer_kind(kind: str) -> str:
    """The kind of those products of `kind` that are computed as integers, or their kernel class."""
    return f"{kind}{INTEGER}"


def experts_kind(bits: int) -> str:
    """Kernel class of routed experts with weights of `bits` bits."""
    return f"grouped_{linear_kind(bits)}"


# What ends the names of attention's classes, by the largest head that each was timed with on a GPU.
HEAD_CLASSES = {64: "_d64", 128: "", 256: "_d256"}
TIMED_HEAD_DIM = max(HEAD_CLASSES)  # larger ones take its classes; kernels for them were compiled, never run


def attention_kind(bits: int, head_dim: int) -> str:
    """Kernel class of decode attention over codes of `bits` bits; 0 is full precision.

    Heads of up to 64 elements have classes of their own: each token costs the same overhead as with a head of 128, for
    half the bytes. So have those of more than 128, which other kernels read.
    """
    codes = {0: "attention", 8: "attention_int8", 4: "attention_int4"}[bits]
    return codes + HEAD_CLASSES[next((size for size in HEAD_CLASSES if head_dim <= size), TIMED_HEAD_DIM)]


def sparse_attention_kind(bits: int, head_dim: int) -> str:
    """Kernel class of decode attention to chosen tokens, read as codes of `bits` bits; 0 is full precision."""
    if head_dim > CUDA_SCAN_HEAD_DIM:
        return f"sparse_attention{WIDE}"
    return "sparse_attention" if bits else "sparse_attention_full"


def scan_kind(kind: str, q_heads: int, kv_heads: int, head_dim: int) -> str:
    """Kernel class of one of `SCANS`: other kernels scan for many query heads of a KV head, and for large heads."""
    return kind + WIDE if q_heads > CUDA_SCAN_HEADS * kv_heads or head_dim > CUDA_SCAN_HEAD_DIM else kind


def prefill_attention_kind(head_dim: int) -> str:
    """Kernel class of a prompt's attention: heads of up to 64 elements use tensor cores less well."""
    return "prefill_attention" if head_dim > 64 else "prefill_attention_d64"
