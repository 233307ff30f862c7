"""One round by kernel: the device time of each class of operations, traced by torch, beside its prediction.

Once all plans are measured, a few rounds of each run again under a profiler. A kernel's class follows from its name,
its part of the round from the timestamps in the graph. With PDL a kernel starts before the one ahead of it ends; its
whole time counts, waiting included, so the sum of all kernels may exceed the round.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import profiler
from torch.autograd import DeviceType

from ridgeplan.planner.prediction import OpTime, predict
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.round import sampling_seconds
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.speculation.rounds import PHASES
from ridgeplan.runtime.statistics import Statistics
from ridgeplan.validate.decode_bench.inflated_model import InflatedModel
from ridgeplan.validate.decode_bench.report import DecodeOptions, DecodeRow, run_order
from ridgeplan.validate.measure import WARM_TOKENS, Measured

TRACED_ROUNDS = 4  # minimum


@dataclass(frozen=True)
class Launch:
    """One kernel launch or copy, in microseconds of the device's clock."""

    name: str
    begin_us: float
    end_us: float


def attach() -> None:
    """Attaches the profiler for good, as graphs captured before, or between two uses, may crash or hang it.

    Source: pytorch issues 75504 and pull request 112507.
    """
    os.environ.update(TEARDOWN_CUPTI="0", DISABLE_CUPTI_LAZY_REINIT="1")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]):
        torch.cuda.synchronize()


def traced(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> tuple[Launch, ...]:
    """All launches of some rounds after prefill, ordered by start."""
    new_tokens = min(engine.plan.workload.new_tokens, TRACED_ROUNDS * (engine.plan.speculation.gamma + 1) + 1)
    engine.generate([prompt[:WARM_TOKENS] for prompt in prompts], min(2, new_tokens), sampling)
    recording = KernelRecording()
    engine.generate(prompts, new_tokens, sampling, on_progress=recording.begin)
    return recording.launches()


class KernelRecording:
    """The profiler, recording a generation after its prefill."""

    def __init__(self) -> None:
        self._profiler: profiler.profile | None = None

    def begin(self, tokens: int) -> None:
        """Starts recording at the first call, which comes after prefill."""
        if self._profiler is None:
            torch.cuda.synchronize()
            self._profiler = profiler.profile(activities=[profiler.ProfilerActivity.CUDA])
            self._profiler.start()

    def launches(self) -> tuple[Launch, ...]:
        """Stops recording and returns the launches, ordered by start."""
        assert self._profiler is not None, "nothing was generated"
        torch.cuda.synchronize()
        self._profiler.stop()
        events = (event for event in self._profiler.events() or () if event.device_type == DeviceType.CUDA)
        launches = (Launch(event.name, event.time_range.start, event.time_range.end) for event in events)
        return tuple(sorted(launches, key=lambda launch: launch.begin_us))


def busy_us(launches: Iterable[Launch]) -> float:
    """Time in which at least one of `launches`, ordered by start, ran."""
    busy, until = 0.0, float("-inf")
    for launch in launches:
        busy += max(0.0, launch.end_us - max(launch.begin_us, until))
        until = max(until, launch.end_us)
    return busy


DRAFT, VERIFY, KEEP = PHASES
LINEAR, HEAD, SAMPLING, SELECTION, OTHER = "linear", "head", "sampling", "selection", "other"
GAP = "between kernels"  # predicted only: no kernel runs meanwhile
STAMP = "_record_timestamp_kernel"
# Regular expressions for the names of kernels by class: this package's, and cuBLAS's.
KERNELS = {
    "attention": r"attend|progressive|index_list|_((sparse|latent)_)?attention_kernel|merge|_merge_kernel",
    SELECTION: r"_(head_logits|(head_|page_)?scores|two_bit|histogram|count|write)_kernel|two_bit_(scan|choose)",
    LINEAR: r"linear|experts|_(product|integer|planes|sum|copy|route|blocks|experts|activation)_kernel|"
    r".*(nvjet|gemm|gemv|cutlass|xmma|splitKreduce).*",
    "norm": r"_add_rms_norm_kernel",
    "rope + append": r"_((rope|rotate)_append|append|tables)_kernel",
    "swiglu": r"_swiglu_kernel",
    "state": r"_(delta_step|gated_norm)_kernel",
    SAMPLING: r"filter|_(best|join_best|agree|softmax|join|accept|weigh|pick|row_uniform|match|propose)_kernel",
    "host link": r"_(copy_prefix|gather|flush_to_host|flush_codes|allocate_slots)_kernel",
    "flush and shift": r"quantize|_(quantize|pack|shift)_kernel",
}
CLASSES = (*KERNELS, HEAD, OTHER, GAP)
Key = tuple[str, str]  # part of a round, class


class NoBreakdown(ValueError):
    """A breakdown was requested without a CUDA device."""


@dataclass(frozen=True)
class ClassTime:
    """One class of operations in one part of a round. kernels: microseconds per round by name."""

    part: str
    operation: str
    launches: float
    measured_us: float
    predicted_us: float
    kernels: Mapping[str, float]


@dataclass(frozen=True)
class Breakdown:
    """A round of one plan by class. Microseconds.

    busy_us: time in which any kernel ran. traced_round_us: a profiled round; round_us: one without the profiler.
    """

    rows: tuple[ClassTime, ...]
    rounds: int
    busy_us: float
    traced_round_us: float
    round_us: float

    @property
    def kernels_us(self) -> float:
        """The sum over all kernels."""
        return sum(row.measured_us for row in self.rows)

    @property
    def overlap_us(self) -> float:
        """The part of the sum that is counted more than once, as kernels overlap."""
        return self.kernels_us - self.busy_us

    @property
    def predicted_us(self) -> float:
        """Predicted microseconds of the whole round."""
        return sum(row.predicted_us for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        sums = {name: getattr(self, name) for name in ("kernels_us", "overlap_us", "predicted_us")}
        return {**vars(self), **sums, "rows": [vars(row) | {"kernels": dict(row.kernels)} for row in self.rows]}


def breakdowns(model: InflatedModel, rows: Sequence[DecodeRow], options: DecodeOptions) -> list[Breakdown]:
    """One breakdown per row of a report of `bench_decode`, with the report's own options.

    Profiling comes last and builds new engines: once used, the profiler stays attached to the device and may slow down
    what runs later. Draft weights use self-generated calibration text, which changes no kernel's time.
    Raises NoBreakdown where the model is not on a CUDA device.
    """
    require_cuda(model.device.type)
    attach()
    profile = options.profile
    plans = [row.case.plan(model.shape, profile, options.new_tokens) for row in rows]
    by_row: dict[int, Breakdown] = {}
    drafts: dict[int, DecoderWeights] = {}
    for index in sorted(range(len(rows)), key=lambda index: run_order(rows[index].case, plans[index])):
        launches = _launches(model, plans[index], drafts, options)
        by_row[index] = breakdown(plans[index], model.shape, profile, rows[index].measured, launches)
    return [by_row[index] for index in range(len(rows))]


def require_cuda(device: str) -> None:
    """Raises NoBreakdown for other types of devices: a CPU's operations are not the predicted kernels."""
    if device != "cuda":
        raise NoBreakdown("a breakdown by kernel needs a CUDA device, and torch finds none here")


def _launches(
    model: InflatedModel, plan: Plan, drafts: dict[int, DecoderWeights], options: DecodeOptions
) -> tuple[Launch, ...]:
    """A plan's launches. Only the draft weights of its engine are kept, by group in `drafts`."""
    prompts = options.prompts(model.tokenizer, plan.workload.context, plan.workload.batch)
    with model.shared_engine(plan, drafts) as engine:
        return traced(engine, prompts, SamplingParams(options.temperature))


def breakdown(
    plan: Plan, shape: ModelShape, profile: Profile, measured: Measured, launches: Sequence[Launch]
) -> Breakdown:
    """The traced rounds of `plan` and the prediction for the measured lengths."""
    predicted = predicted_us(plan, measured, shape, profile)
    rounds = rounds_of(launches)
    by_key: defaultdict[Key, list[Launch]] = defaultdict(list)
    for round_launches in rounds:
        for key, launch in classified(round_launches):
            by_key[key].append(launch)
    count = max(len(rounds), 1)
    rows = (_row(plan, key, by_key[key], predicted.get(key, 0.0), count) for key in _keys(by_key, predicted))
    spans = [round_launches[-1][1].end_us - round_launches[0][1].begin_us for round_launches in rounds]
    return Breakdown(
        rows=tuple(rows),
        rounds=len(rounds),
        busy_us=sum(busy_us(launch for _, launch in round_launches) for round_launches in rounds) / count,
        traced_round_us=sum(spans) / count,
        round_us=_round_us(measured.statistics),
    )


def rounds_of(launches: Sequence[Launch]) -> list[list[tuple[str, Launch]]]:
    """The launches of every complete round with their parts.

    A round has timestamps at its start and after each part; launches after the last one, such as the copy of its
    figures to the host, do not belong to it.
    """
    stamps = [index for index, launch in enumerate(launches) if launch.name == STAMP]
    readings = len(PHASES) + 1
    complete = (stamps[at : at + readings] for at in range(0, len(stamps) - readings + 1, readings))
    return [_parts(launches, at) for at in complete]


def _parts(launches: Sequence[Launch], stamps: Sequence[int]) -> list[tuple[str, Launch]]:
    spans = zip(PHASES, pairwise(stamps), strict=True)
    return [(part, launch) for part, (begin, end) in spans for launch in launches[begin:end]]


def classified(launches: Sequence[tuple[str, Launch]]) -> list[tuple[Key, Launch]]:
    """The launches of a round with their parts and classes. The head is the product that sampling follows."""
    keyed: list[tuple[Key, Launch]] = []
    following = ""
    for part, launch in reversed(launches):
        kind = class_of(launch.name)
        if kind == LINEAR and following == SAMPLING:
            kind = HEAD
        elif kind not in (LINEAR, OTHER):
            following = kind
        keyed.append(((part, kind), launch))
    return keyed[::-1]


def class_of(kernel: str) -> str:
    """The class of a kernel's name, except HEAD."""
    return next((kind for kind, names in KERNELS.items() if re.fullmatch(names, kernel)), OTHER)


def predicted_us(plan: Plan, measured: Measured, shape: ModelShape, profile: Profile) -> dict[Key, float]:
    """Microseconds of a predicted round by part and class; they add up to the round.

    Time of a part that is not in its operations (selection by every query, waits for the host or the link) is OTHER.
    """
    workload = measured.workload(plan.workload)
    predicted = predict(replace(plan, workload=workload), shape, profile)
    seconds: defaultdict[Key, float] = defaultdict(float)
    for op in predicted.breakdown:
        if op.part != "prefill":
            part, times = (DRAFT, plan.speculation.gamma) if op.part == "draft" else (VERIFY, 1)
            seconds[part, class_of_op(op)] += times * op.seconds
    a_draw_s = sampling_seconds(shape, Machine.of(profile), workload.batch)
    seconds[DRAFT, SAMPLING] += plan.speculation.gamma * a_draw_s
    for part, name in ((DRAFT, "draft"), (VERIFY, "verification")):
        rest_s = predicted.round_s[name] - sum(value for key, value in seconds.items() if key[0] == part)
        seconds[part, OTHER] += rest_s
    seconds[VERIFY, SAMPLING] += predicted.round_s["acceptance"]
    seconds[KEEP, "flush and shift"] += predicted.round_s["flush"]
    seconds[DRAFT, SELECTION] += predicted.round_s["selection"]
    seconds[KEEP, GAP] += predicted.round_s["overhead"]
    return {key: 1e6 * value for key, value in seconds.items()}


def class_of_op(op: OpTime) -> str:
    """The class of an operation of the model."""
    if op.op == "lm head":
        return HEAD
    if op.kind == "gap":
        return GAP
    if op.op in ("state update", "gated norm"):
        return "state"
    kind = re.search("linear|attention|rope", op.kind)
    named = re.search("norm|swiglu|rotary", op.op)
    match = kind or named
    return {"rope": "rope + append", "rotary": "rope + append"}.get(match[0], match[0]) if match else OTHER


def _keys(*tables: Mapping[Key, Any]) -> Iterator[Key]:
    """The keys with a value in any of the tables, in the order of a round."""
    return (key for key in product(PHASES, CLASSES) if any(table.get(key) for table in tables))


def _row(plan: Plan, key: Key, launches: Sequence[Launch], predicted: float, rounds: int) -> ClassTime:
    part, kind = key
    kernels: defaultdict[str, float] = defaultdict(float)
    for launch in launches:
        kernels[launch.name] += (launch.end_us - launch.begin_us) / rounds
    bits = plan.weights.draft_bits if part == DRAFT else plan.weights.target_bits
    operation = kind if kind != LINEAR else "linear dense" if bits == 16 else f"linear int{bits}"
    return ClassTime(part, operation, len(launches) / rounds, sum(kernels.values()), predicted, kernels)


def _round_us(statistics: Statistics) -> float:
    """Mean device time of a round."""
    flush_s = statistics.flush_s / max(statistics.rounds, 1)
    return 1e6 * (statistics.gamma * statistics.draft_s + statistics.verify_s + flush_s)
