"""Rates of an engine, fitted to measured steps, and how certain a prediction at them is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from ridgeplan.planner.engines.formats import DTYPES, ENGINES
from ridgeplan.planner.engines.measurements import (
    EngineMeasurements,
    MeasuredStep,
    load_measurements,
    shipped_measurements,
    user_engine_path,
)
from ridgeplan.roofline.catalog.files import NoHomeFolder, existing_path
from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.parallel import SINGLE
from ridgeplan.roofline.catalog.profile import BOUND_SHARE, TRANSFER_SPREAD, Profile, profile_for, shipped_profiles
from ridgeplan.roofline.collectives import COLLECTIVES, Network
from ridgeplan.roofline.engine import (
    FULL_BITS,
    HALF_BITS,
    PROMPT_SHARE,
    WIDTHS,
    EngineRates,
    EngineReserve,
    EngineStep,
    KVRate,
    launch_kind,
    read_seconds,
    weight_bits,
    width_is,
)
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import DrafterKind, Plan, PlanError, Workload, require

BAND = 1.645  # deviations on either side that hold 90%
NOISE = 0.02  # relative, of a measured step
# Before any measurement: inverse utilizations and seconds, and by how much a rate may depart from them, relatively.
# 16-bit products stream 4.3 of an H200's 4.8 TB/s beyond their launch; 4-bit ones are Marlin's, timed there.
ASSUMED = {
    "launch": (4e-6, 1.0), "small_launch": (2e-6, 1.0), "expert_launch": (4e-5, 1.0),
    "packed_expert_launch": (4e-5, 1.0), "linear 16": (1.12, 0.05), "linear 8": (1.2, 0.2), "linear 4": (1.8, 0.3),
    "expert 16": (1.2, 0.5), "expert 8": (1.4, 0.5), "expert 4": (2.0, 0.5), "kv bf16": (1.1, 0.5),
    "kv fp8": (1.5, 0.5),
}  # fmt: skip
LAUNCHES = ("launch", "small_launch", "expert_launch", "packed_expert_launch")
UNKNOWN_KV = (1.5, 100.0)  # of kinds that ASSUMED does not have
TRANSFERRED = 0.2  # by how much a user's rate may depart from the shipped one, relatively
SM_SHARES = (1.0, 2.5)  # between which the fit looks
WAVES = ("bf16", "fp8")  # kinds of KV cache that FlashAttention-3 reads
# Deviations of a prediction beyond what was measured, in quadrature.
OTHER_MODEL, OTHER_EXPERTS = 0.03, 0.1
LATENTS = 0.1  # attention to latent rows, at the rates of keys and values; one sequence takes up to twice as long
OCTAVE, EXPERT_OCTAVE = 0.04, 0.1  # for every doubling of the batch or the context beyond those of like steps
SEVERAL_GPUS = 0.1  # steps with messages between GPUs, of which this package measured none
OTHER_BYTES = 1.1e9  # of an H200: 0.24 GB of libraries, 0.1 to 0.5 GB of graphs, 0.6 GB that the driver holds back
FP8_RATES = frozenset({"kv fp8", "linear 8", "expert 8"})
MAIN_SHARE = 0.1  # of a step's time, from which on a rate decides which measured steps are like it
NEAR_MACHINE = 0.06  # another GPU that runs the same attention kernels
PLUGIN_LAUNCHES = 0.76  # fitted to an earlier day's steps; the six of docs/vllm.md are within 2.5%
# What a round with drafts takes there on top: least relative squares over six measured rounds of gamma 4, within 7%.
PLUGIN_ROUND_S = 4.5e-3


def certainty_of_drafts(source: str, spread: float, lookup: bool) -> tuple[str, float]:
    """Source and spread of a round, from those of a step. Nobody measured passes with lookups."""
    if lookup:
        return "prior", math.hypot(spread, TRANSFER_SPREAD)
    return source, math.hypot(spread, OTHER_MODEL)


def terms(step: EngineStep, kind: str, shape: ModelShape, hardware: Hardware) -> dict[str, float]:
    """What each rate is multiplied by in a step that memory bounds: launches, or seconds at the full bandwidth."""
    totals: dict[str, float] = defaultdict(float)
    for op in step.of_stage(shape).operations(shape):
        if op.kind in COLLECTIVES:
            continue
        width = next(width for width in WIDTHS if width_is(weight_bits(op, shape, step), width))
        totals[launch_kind(op, width == WIDTHS[-1])] += float(op.launches)
        part = "expert" if op.kind == "grouped_linear" else "linear"
        name = f"kv {kind}" if op.category == "attention" else f"{part} {width}"
        totals[name] += float(read_seconds(op, shape, hardware, step))
    return {name: total for name, total in totals.items() if total}


def fit(measured: EngineMeasurements, rows: Sequence[MeasuredStep], base: EngineRates | None = None) -> EngineRates:
    """The rates with the least relative squares over rows of the measurements, which memory bounds.

    base: rates that hold where the rows say nothing, and from which they may depart by a fifth; without them, ASSUMED.
    """
    if base is not None:
        start = {name: (rate, TRANSFERRED) for name, rate in named_rates(base).items()}
        return _least_squares(measured, rows, start, {kind: rate.sm_share for kind, rate in base.kv.items()})[0]
    shares: dict[str, float] = {}
    for kind in WAVES if runs_in_waves(measured.hardware) else ():
        shares = {**shares, kind: _best_share(measured, rows, kind, shares)}
    return _least_squares(measured, rows, ASSUMED, shares)[0]


def _best_share(
    measured: EngineMeasurements, rows: Sequence[MeasuredStep], kind: str, others: Mapping[str, float]
) -> float:
    """The `sm_share` of a kind of KV cache with the least squares over its rows and those of kinds that have theirs."""
    from scipy.optimize import minimize_scalar  # which takes a while to import, and only engines need

    of_kind = [row for row in rows if DTYPES[row.kv].kind in (kind, *others)]

    def squares(share: float) -> float:
        return _least_squares(measured, of_kind, ASSUMED, {**others, kind: share})[1]

    return float(minimize_scalar(squares, bounds=SM_SHARES, method="bounded", options={"xatol": 0.02}).x)


def _least_squares(
    measured: EngineMeasurements, rows: Sequence[MeasuredStep], start: Mapping[str, tuple[float, float]],
    sm_shares: Mapping[str, float],
) -> tuple[EngineRates, float]:  # fmt: skip
    """The rates, and the sum of squares in deviations. start: each rate, and its relative deviation."""
    from scipy.optimize import nnls

    kinds = dict.fromkeys(f"kv {DTYPES[row.kv].kind}" for row in rows)
    start = {**dict.fromkeys(kinds, UNKNOWN_KV), **start}
    first = _rates({name: rate for name, (rate, _) in start.items()}, measured.hardware, sm_shares)
    system, target = [], []
    for row in rows:
        per_rate = terms(row.step(first), DTYPES[row.kv].kind, measured.shape_of(row), measured.hardware)
        seconds = row.tpot_ms / 1e3
        system.append([per_rate.get(name, 0.0) * rate / seconds / NOISE for name, (rate, _) in start.items()])
        target.append(1 / NOISE)
    inverses = [1 / deviation for _, deviation in start.values()]
    scales, residual = nnls(np.array([*system, *np.diag(inverses)]), np.array([*target, *inverses]))
    rates = {name: float(scale * rate) for scale, (name, (rate, _)) in zip(scales, start.items(), strict=True)}
    return _rates(rates, measured.hardware, sm_shares), float(residual)


def named_rates(rates: EngineRates) -> dict[str, float]:
    """Rates by their names in ASSUMED."""
    return {
        **{name: getattr(rates, f"{name}_s") for name in LAUNCHES},
        **{f"linear {width}": rates.linear_inverse[width] for width in WIDTHS},
        **{f"expert {width}": rates.expert_inverse[width] for width in WIDTHS},
        **{f"kv {kind}": rate.inverse for kind, rate in rates.kv.items()},
    }


@cache
def _library(hardware: Hardware) -> Profile:
    return profile_for(hardware, shipped_profiles())


def _rates(named: Mapping[str, float], hardware: Hardware, sm_shares: Mapping[str, float]) -> EngineRates:
    library = _library(hardware)
    kinds = [name.removeprefix("kv ") for name in named if name.startswith("kv ")]
    return EngineRates(
        **{f"{name}_s": named[name] for name in LAUNCHES},
        linear_inverse={width: named[f"linear {width}"] for width in WIDTHS},
        expert_inverse={width: named[f"expert {width}"] for width in WIDTHS},
        kv={kind: KVRate(named[f"kv {kind}"], sm_shares.get(kind, 0.0)) for kind in kinds},
        linear_compute=PROMPT_SHARE * library.rates("prefill_linear").compute_utilization,
        attention_compute=library.rates("prefill_attention").compute_utilization,
        reserve=reserve_of(hardware),
        coded_speedup=2.0 / PROMPT_SHARE if _has_fp8(hardware) else 1.0,
        network=Network.of(hardware),
    )


def reserve_of(hardware: Hardware) -> EngineReserve:
    """What vLLM reserves on a GPU: its largest pass is 8192 tokens on one of 70 GiB or more, 2048 on smaller ones."""
    large = hardware.memory_bytes >= 70 * 2**30 and hardware.compute_capability != "8.0"
    return EngineReserve(batched_tokens=8192 if large else 2048, other_bytes=OTHER_BYTES)


def _has_fp8(hardware: Hardware) -> bool:
    """Whether an NVIDIA GPU computes in fp8: Ada, Hopper and later. Others unpack it in different kernels."""
    major, _, minor = hardware.compute_capability.partition(".")
    return major.isdecimal() and (int(major), int(minor or 0)) >= (8, 9)


def is_ampere(hardware: Hardware) -> bool:
    """Whether an NVIDIA GPU is of the Ampere generation, which has no fp8."""
    major, _, minor = hardware.compute_capability.partition(".")
    return major == "8" and minor in ("0", "6", "7")


def runs_in_waves(hardware: Hardware) -> bool:
    """Whether FlashAttention-3 runs, whose tiles of a sequence are counted."""
    return hardware.compute_capability.startswith("9.")


def transferred(rates: EngineRates, source: Hardware, target: Hardware) -> EngineRates:
    """Rates on another machine: launches keep their time, and what memory bounds its share of the bandwidth.

    What instructions bind keeps its speed per SM and clock, as far as the fastest stream of its kind allows.
    """
    issue = target.issue_rate / source.issue_rate if source.issue_rate and target.issue_rate else 1.0
    slower = target.bandwidth_bytes_per_s / source.bandwidth_bytes_per_s / issue
    before = named_rates(rates)
    after = dict(before)
    streams = {"kv": before["kv bf16"], "linear": before["linear 16"], "expert": before["linear 16"]}
    for name, inverse in before.items():
        fastest = streams.get(name.partition(" ")[0])
        if fastest and inverse * BOUND_SHARE > fastest:
            after[name] = max(fastest, inverse * slower)
    if is_ampere(target):  # fp8 KV saves memory but no time: decoding gained 0.4% to 5.5% (vllm-project/vllm#42058)
        after["kv fp8"] = FULL_BITS / HALF_BITS * after["kv bf16"]
    shares = {
        kind: rate.sm_share * after[f"kv {kind}"] / (before[f"kv {kind}"] * slower) for kind, rate in rates.kv.items()
    }
    return _rates(after, target, shares if runs_in_waves(target) else {})


@dataclass(frozen=True)
class EngineProfile:
    """An engine on a machine: its rates, the measurements behind them, and their relative deviation (`spread`).

    engine, hardware: those asked about; the measurements may be another engine's or machine's.
    """

    engine: str
    hardware: Hardware
    measured: EngineMeasurements
    rates: EngineRates
    spread: float

    @property
    def title(self) -> str:
        """The engine's name."""
        return ENGINES[self.engine].title

    @property
    def is_stand_in(self) -> bool:
        """Whether another engine was measured."""
        return self.measured.engine != self.engine

    @property
    def is_transferred(self) -> bool:
        """Whether another machine was measured."""
        return self.measured.hardware.name != self.hardware.name

    def notes(self) -> Iterator[str]:
        """What was measured, or that it stands in for what was not."""
        steps = f"{ENGINES[self.measured.engine].title} {self.measured.version} on {self.measured.device}"
        steps += f", {len(self.measured.rows)} steps measured in {self.measured.date}"
        if self.is_stand_in or self.is_transferred:
            yield (
                f"no profile of {self.title} on {self.hardware.name}: times are transferred from {steps}; "
                f"`ridgeplan calibrate --engine {self.engine}` measures it"
            )
        else:
            yield f"times are of {steps}"

    def step(self, workload: Workload, weight_bits: float, kv: str) -> EngineStep:
        """A plain decode step of a workload halfway through the generation, with a cache of an engine's dtype."""
        dtype = DTYPES[kv]
        tokens = workload.context + workload.new_tokens / 2
        return EngineStep(workload.rank_batch, tokens, weight_bits, dtype.bits, self.rates.kv_rate(dtype.kind))

    def overhead_s(self, workload: Workload, shape: ModelShape, machine: Machine) -> float:
        """What the launches of the engine's measured step take longer than those of a machine's kernels would.

        With this package's kernels in vLLM, `PLUGIN_LAUNCHES` of it is left.
        """
        operations = list(self.step(workload, FULL_BITS, "auto").operations(shape))
        launches = [(float(op.launches), launch_kind(op, packed=False)) for op in operations]
        engine_s = sum(count * getattr(self.rates, f"{kind}_s") for count, kind in launches)
        own_s = sum(float(op.launches) * float(machine.rates[op.kind].launch_s) for op in operations)
        return PLUGIN_LAUNCHES * max(0.0, engine_s - own_s)

    def with_overhead(self, workload: Workload, shape: ModelShape, machine: Machine) -> Machine:
        """A machine whose rounds take `overhead_s` longer, and those with drafts `PLUGIN_ROUND_S` on top."""
        overhead_s = self.overhead_s(workload, shape, machine)
        return replace(machine, round_s=machine.round_s + overhead_s, drafted_round_s=PLUGIN_ROUND_S)

    def plan_certainty(self, plan: Plan, shape: ModelShape) -> tuple[str, float]:
        """`certainty` of a plan's round: as little with a block drafter as with lookups."""
        kv, bits = self.kv_dtype(plan), FULL_BITS if plan.weights.target_bits == 16 else HALF_BITS
        source, spread = self.certainty(self.step(plan.workload, bits, kv), DTYPES[kv].kind, shape)
        lookup = plan.speculation.drafter.kind in (DrafterKind.SUFFIX, DrafterKind.BLOCK)
        return certainty_of_drafts(source, spread, lookup) if plan.speculation.active else (source, spread)

    def is_measured(self, plan: Plan, shape: ModelShape) -> bool:
        """Whether some measured step depends on every rate of a plan that decodes plainly, at whatever size."""
        kv, bits = self.kv_dtype(plan), FULL_BITS if plan.weights.target_bits == 16 else HALF_BITS
        step = self.step(plan.workload, bits, kv)
        return self._measured_rates.issuperset(terms(step, DTYPES[kv].kind, shape, self.hardware))

    def kv_dtype(self, plan: Plan) -> str:
        """The engine's cache dtype that is nearest to a plan's format."""
        return ENGINES[self.engine].formats(plan)[1]

    def formats_text(self, plan: Plan) -> str:
        """How the engine is told a plan's formats."""
        engine = ENGINES[self.engine]
        quantization, kv = engine.formats(plan)
        arguments = [f"{engine.quantization} {quantization}"] if quantization else []
        arguments += [f"{engine.kv_cache_dtype} {kv}"] if kv != "auto" else []
        formats = f"in {self.title}: {' '.join(arguments) or 'weights and KV cache as in the checkpoint'}"
        if plan.speculation.drafter.kind is DrafterKind.SUFFIX:
            formats += ", and ngram by `ridgeplan export`, whose passes were not measured: its lookup is not priced"
        if plan.speculation.drafter.kind is DrafterKind.HEAD:
            formats += ", and a head, which `ridgeplan export --draft-method eagle3 --draft-model ID` names"
        return formats

    def certainty(self, step: EngineStep, kind: str, shape: ModelShape) -> tuple[str, float]:
        """The source of a prediction, and its relative deviation by how like the step is to those that were measured.

        kind: of the KV cache. Rates that nothing was measured for add to it by their share of the step's time.
        """
        shares = self._shares(step, kind, shape)
        unmeasured = sum(share for name, share in shares.items() if name not in self._measured_rates)
        main = {name for name, share in shares.items() if share >= MAIN_SHARE and name in self._measured_rates}
        alike = [row for row, names in self._rates_of_rows if main <= names] or self.measured.rows
        parts = {
            "unmeasured": TRANSFER_SPREAD * unmeasured,
            "extrapolated": (EXPERT_OCTAVE if shape.is_moe else OCTAVE) * octaves_beyond(step, alike),
            "model": self._model_deviation(shape),
            "messages": SEVERAL_GPUS if shape.parallel != SINGLE else 0.0,
        }
        return self._source(parts), math.hypot(self.class_spread, *parts.values())

    @property
    def class_spread(self) -> float:
        """The deviation of a rate: that of the fit, and for another engine or machine what its transfer adds."""
        near = runs_in_waves(self.hardware) and runs_in_waves(self.measured.hardware)
        machine = (NEAR_MACHINE if near else TRANSFER_SPREAD) if self.is_transferred else 0.0
        return math.hypot(self.spread, machine, TRANSFER_SPREAD if self.is_stand_in else 0.0)

    def _source(self, parts: Mapping[str, float]) -> str:
        if parts["unmeasured"] > self.spread:
            return "prior"
        if parts["extrapolated"] > self.spread or parts["model"] >= OTHER_EXPERTS or parts["messages"]:
            return "extrapolated"
        return "transferred" if self.is_transferred or self.is_stand_in else "calibrated"

    @cached_property
    def _rates_of_rows(self) -> list[tuple[MeasuredStep, frozenset[str]]]:
        """Every measured step, and the names of the rates that it depends on."""
        machine, shape_of = self.measured.hardware, self.measured.shape_of
        return [
            (row, frozenset(terms(row.step(self.rates), DTYPES[row.kv].kind, shape_of(row), machine)))
            for row in self.measured.rows
        ]

    @cached_property
    def _measured_rates(self) -> frozenset[str]:
        """The names of the rates that any fitted row depends on, as far as the same kernels run on the machine.

        SGLang quantizes an fp8 cache in kernels of its own, which are slow at small batches (sgl-project/sglang#30815).
        """
        names = frozenset().union(*(names for row, names in self._rates_of_rows if not row.held_out))
        other_kernels = frozenset({"kv fp8"}) if self.is_stand_in else frozenset()
        return names - other_kernels - (frozenset() if _has_fp8(self.hardware) else FP8_RATES)

    @cached_property
    def _row_of_each_model(self) -> tuple[MeasuredStep, ...]:
        return tuple({row.model: row for row in self.measured.rows}.values())

    def _shares(self, step: EngineStep, kind: str, shape: ModelShape) -> dict[str, float]:
        """Each rate's share of a step's time."""
        per_rate = terms(step, kind, shape, self.hardware)
        named = {**named_rates(self.rates), f"kv {kind}": self.rates.kv_rate(kind).inverse}
        seconds = {name: value * named[name] for name, value in per_rate.items()}
        return {name: value / sum(seconds.values()) for name, value in seconds.items()}

    def _model_deviation(self, shape: ModelShape) -> float:
        """By which a model differs from the measured ones: the same, another, or experts unlike any measured."""
        if shape.is_mla:
            return LATENTS
        if any(_sizes(shape) == _sizes(self.measured.shape_of(row)) for row in self._row_of_each_model):
            return 0.0
        return OTHER_EXPERTS if shape.is_moe else OTHER_MODEL


def octaves_beyond(step: EngineStep, rows: Sequence[MeasuredStep]) -> float:
    """Doublings of a step's batch and of its context beyond the largest of measured steps, or below the smallest."""
    octaves = 0.0
    for size, measured in (
        (float(step.batch), [row.batch for row in rows]),
        (float(step.context), [row.context for row in rows]),
    ):
        octaves += max(math.log2(size / max(measured)), math.log2(min(measured) / size), 0.0)
    return octaves


def _sizes(shape: ModelShape) -> tuple[object, ...]:
    return shape.layers, shape.hidden, shape.intermediate, shape.experts, shape.expert_intermediate, shape.kv_heads


@cache
def _fitted() -> tuple[EngineMeasurements, EngineRates, float]:
    """The shipped measurements, their rates on the machine that was measured, and the deviation of held-out rows."""
    measured = shipped_measurements()
    rates = fit(measured, measured.fitted)
    return measured, rates, deviation(rates, measured)


@cache
def _shipped(hardware: Hardware) -> tuple[EngineMeasurements, EngineRates, float]:
    """The shipped measurements, their rates on a machine, and the deviation of held-out rows."""
    measured, rates, spread = _fitted()
    same = measured.hardware.name == hardware.name
    return measured, rates if same else transferred(rates, measured.hardware, hardware), spread


@cache
def _shipped_profile(engine: str, hardware: Hardware) -> EngineProfile:
    """The engine's profile by the shipped measurements; one, as it keeps what it derives from all of them."""
    return EngineProfile(engine, hardware, *_shipped(hardware))


def engine_profile(engine: str, hardware: Hardware, path: Path | None = None) -> EngineProfile:
    """The profile of an engine on a machine: fitted to a file of measurements, by default the user's own if it is
    there and of that machine, else the shipped ones.

    Raises BadEngineProfile for a damaged file, and PlanError for one of another engine or for a CPU.
    """
    require(hardware.kind == "gpu", f"{ENGINES[engine].title} has no profile for {hardware.name}; allowed: a GPU")
    measured = _users_own(engine, hardware) if path is None else load_measurements(path)
    if measured is None:
        return _shipped_profile(engine, hardware)
    if measured.engine != engine:
        raise PlanError(f"{str(path)!r} is a profile of {measured.engine}; allowed: one of {engine}")
    _, base, _ = _shipped(measured.hardware)
    rates = fit(measured, measured.fitted, base)
    spread = max(deviation(rates, measured), NOISE)
    if measured.hardware.name != hardware.name:
        rates = transferred(rates, measured.hardware, hardware)
    return EngineProfile(engine, hardware, measured, rates, spread)


def _users_own(engine: str, hardware: Hardware) -> EngineMeasurements | None:
    """The measurements that `ridgeplan calibrate --engine` saved, if they are of this machine."""
    try:
        path = existing_path(str(user_engine_path(engine)))
    except NoHomeFolder:
        return None
    measured = load_measurements(path) if path else None
    return measured if measured and measured.hardware.name == hardware.name else None


def deviation(rates: EngineRates, measured: EngineMeasurements) -> float:
    """The relative deviation of the rows that are held out, or of all rows where none is; without latents."""
    held_out = [row for row in measured.rows if row.held_out] or measured.rows
    held_out = [row for row in held_out if not measured.shape_of(row).is_mla] or held_out
    return float(np.sqrt(np.mean([error(rates, measured, row) ** 2 for row in held_out])))


def error(rates: EngineRates, measured: EngineMeasurements, row: MeasuredStep) -> float:
    """The relative error of a row's prediction."""
    seconds = rates.step_s(measured.shape_of(row), measured.hardware, row.step(rates))
    return float(1e3 * seconds / row.tpot_ms - 1)
