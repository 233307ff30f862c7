"""Predictions of plans: figures with bands and sources, breakdown by operation, and samples under uncertainty.

All plans share the same errors: a kernel class that is slower than its calibration slows every plan that uses it, and
a text on which drafts agree less often affects every plan. The difference of two similar plans is therefore known more
precisely than either time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeplan.planner.acceptance import Acceptance, AcceptanceModel
from ridgeplan.planner.acceptance.drafters import BAND_DEVIATIONS, proposal_acceptance
from ridgeplan.planner.acceptance.model import acceptance_of_proposals
from ridgeplan.planner.engines.rates import EngineProfile
from ridgeplan.planner.lowering import adaptation, class_of_op, rates_of, stack, steady_kind, strategy_of, used_classes
from ridgeplan.roofline.catalog.model_shape import KEPT_FORMAT, ModelShape
from ridgeplan.roofline.catalog.profile import LINK_CLASSES, SOURCES, Profile, transferred_spread
from ridgeplan.roofline.collectives import COLLECTIVES
from ridgeplan.roofline.cost import Cost, Term
from ridgeplan.roofline.evaluate import Estimate, at_acceptance, engine_prompts, evaluate, pass_ops
from ridgeplan.roofline.execution import RoundKind, round_shape
from ridgeplan.roofline.latency import KERNEL_CLASSES, Machine, RateTerms, StrategyRates, integer_kind
from ridgeplan.roofline.passes import Op
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.plan.support import layer_needs
from ridgeplan.roofline.round import draft_rates, expected_tokens, prefill_rates, target_rates
from ridgeplan.roofline.strategy import Strategy

if TYPE_CHECKING:
    from ridgeplan.planner.question import Question

ENDS = ("low", "best", "high")  # of a band of acceptance


@dataclass(frozen=True)
class Figures:
    """Headline figures: time per token and to the first token, throughput of the batch, peak memory.

    ttft_request_ms: of a request whose prompt is processed at once. ttft_ms: of the batch's last request, as prompts
    are processed one after another.
    """

    tpot_ms: float
    ttft_request_ms: float
    ttft_ms: float
    tokens_per_s: float
    peak_memory_bytes: float


@dataclass(frozen=True)
class OpTime:
    """All launches of one operation in one part of the work ("prefill", "draft" or "target").

    One of the kind "gap" is the time between a decode pass's kernels, with its layers as launches. arithmetic: how much
    faster than in 16 bits the machine computes it, such as 2 for products in FP8.
    """

    part: str
    op: str
    kind: str
    launches: int
    seconds: float
    flops: float
    bytes: float
    arithmetic: float = 1.0

    @property
    def intensity(self) -> float:
        """FLOP per byte; 0 for time between kernels, which moves none."""
        return self.flops / self.bytes if self.bytes else 0.0

    def roof(self, profile: Profile) -> tuple[str, float]:
        """What bounds it ("memory", "compute", "launches", "link", or "" for time between kernels), and its share.

        Messages between GPUs are bound by their link, whose roof is not this one: their share is 0.

        The roof is the longer of its bytes at the bandwidth and its FLOPs at its arithmetic's peak. Launches bound what
        spends more than half of its time on them.
        """
        if self.kind in COLLECTIVES:
            return "link", 0.0
        memory_s = self.bytes / profile.hardware.bandwidth_bytes_per_s
        compute_s = self.flops / (self.arithmetic * profile.hardware.compute_flops)
        roof_s = max(memory_s, compute_s)
        if not roof_s:
            return "", 0.0
        launching = 2 * self.launches * profile.rates(self.kind).launch_s > self.seconds
        bound = "memory" if memory_s >= compute_s else "compute"
        return "launches" if launching else bound, roof_s / self.seconds


@dataclass(frozen=True)
class PartTimes:
    """One part of the work, of all plans predicted together.

    Seconds and relative speed of the arithmetic of each operation, whether it is a product of integers, and relative
    spread: [plans].
    """

    part: str
    ops: tuple[Op, ...]
    seconds: tuple[np.ndarray, ...]
    arithmetic: tuple[np.ndarray, ...]
    integers: tuple[np.ndarray, ...]
    spread: np.ndarray


@dataclass(frozen=True)
class BreakdownSource:
    """The input of a plan's breakdown: the parts of the work, and the plan's index in their arrays."""

    plan: Plan
    shape: ModelShape
    parts: tuple[PartTimes, ...]
    index: int

    def op_times(self) -> Iterator[OpTime]:
        """The operations that the plan launches, part by part."""
        for times in self.parts:
            columns = times.ops, times.seconds, times.arithmetic, times.integers
            for op, seconds, arithmetic, integers in zip(*columns, strict=True):
                if self._launches(times.part, seconds):
                    total, kind = op.total, class_of_op(self.plan, self.shape, times.part, op)
                    kind = integer_kind(kind) if integers[self.index] else kind
                    flops, moved = _at(total.flops, self.index), _at(total.bytes, self.index)
                    launches = int(_at(op.launches, self.index))
                    yield OpTime(
                        times.part, op.name, kind, launches, float(seconds[self.index]), flops, moved,
                        float(arithmetic[self.index]),
                    )  # fmt: skip

    def seconds_by_class(self, part: str) -> dict[str, float]:
        """Seconds of one part's operations by kernel class."""
        (times,) = (times for times in self.parts if times.part == part)
        by_class: dict[str, float] = {}
        for op, seconds in zip(times.ops, times.seconds, strict=True):
            if self._launches(part, seconds):
                kind = class_of_op(self.plan, self.shape, part, op)
                by_class[kind] = by_class.get(kind, 0.0) + float(seconds[self.index])
        return by_class

    def _launches(self, part: str, seconds: np.ndarray) -> bool:
        """Whether the plan has an operation; not one without launches, or gaps where a profile knows none."""
        return bool(seconds[self.index]) and (part != "draft" or self.plan.speculation.self_drafts)


@dataclass(frozen=True)
class Drafting:
    """The round that is predicted, and what is known of the plan's drafter, as `roofline.drafters` takes it.

    gain: times its tokens that rounds yield which adapt to the text.
    """

    kind: RoundKind = 0
    hit: float = 0.0
    proposal_acceptance: float = 0.0
    gain: float = 1.0

    @classmethod
    def of(cls, plan: Plan, shape: ModelShape, machine: Machine, model: AcceptanceModel) -> Drafting:
        """A plan's round; of one that adapts, that at which it settles at the known acceptance."""
        drafter, kind = plan.speculation.drafter, steady_kind(plan, shape, machine, model)
        if not drafter.active:
            return cls(kind)
        known = proposal_acceptance(drafter.kind, plan.workload)
        gain = adaptation(plan, shape, machine, model, kind, np.array([plan.workload.rank_batch])).item()
        return cls(kind, known.hit, known.at(drafter.depth)[1], gain)

    def of_strategy(self, strategy: Strategy) -> Strategy:
        """The strategy with this round."""
        gamma, passes, depth = round_shape(self.kind)
        tiers = {"proposals": depth, "cascade_passes": passes * (depth > 0)} if strategy.proposals else {}
        return strategy.with_terms(gamma=gamma, adaptation=self.gain, **tiers)

    def tokens(self, acceptance: Term) -> Term:
        """Tokens of a round, at a number or an array."""
        return self.gain * expected_tokens(self.kind, acceptance, self.hit, self.proposal_acceptance)


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of a plan: the best estimate, a band around it, and the weakest source used.

    gamma: drafts per round; the steady-state value if gamma is adaptive. round_s: seconds of a round by part.
    memory_bytes: bytes by purpose.
    """

    best: Figures
    low: Figures
    high: Figures
    source: str
    acceptance: Acceptance
    gamma: int
    tokens_per_round: float
    draft_step_ms: float
    verify_ms: float
    round_s: dict[str, float]
    memory_bytes: dict[str, float]
    prefill_peak_bytes: float
    decode_peak_bytes: float
    offloaded_layers: int
    host_bytes: float
    breakdown_source: BreakdownSource = field(repr=False, compare=False)
    drafting: Drafting = field(default_factory=Drafting, repr=False)
    speedup: float = 1.0
    beats_plain: float | None = None  # probability; None where it was not sampled or the calibration cannot tell

    def __repr__(self) -> str:
        best, low, high = (f"{figures.tpot_ms:.3g}" for figures in (self.best, self.low, self.high))
        return f"Prediction({best} ms per token ({low} to {high}), {self.speedup:.2f}x, {self.source})"

    @cached_property
    def breakdown(self) -> tuple[OpTime, ...]:
        """Every operation of a prefill, a draft step and a target step."""
        return tuple(self.breakdown_source.op_times())

    @property
    def overhead_ms(self) -> float:
        """Milliseconds of a target step outside the operations of `breakdown`: token selection and host transfers."""
        listed_s = sum(op.seconds for op in self.breakdown if op.part == "target")
        return max(0.0, self.verify_ms - 1e3 * listed_s)

    @property
    def target_step_ms(self) -> float:
        """Milliseconds of verification, or of a plain step, with its sampling, as engines measure it."""
        return self.verify_ms + 1e3 * self.round_s["acceptance"]

    @property
    def round_ms(self) -> float:
        """Milliseconds of a whole round."""
        return 1e3 * sum(self.round_s.values())

    @property
    def group_end_loss(self) -> float:
        """Share of a round's tokens that is lost where rounds end with a group (`roofline.round.flush_capped`)."""
        return 1 - self.tokens_per_round / float(self.drafting.tokens(self.acceptance.best))

    @property
    def kernel_spread(self) -> float:
        """Relative spread of the kernels' times in a draft or a target step, whichever is larger."""
        source = self.breakdown_source
        parts = ("draft", "target") if source.plan.speculation.self_drafts else ("target",)
        return max(float(times.spread[source.index]) for times in source.parts if times.part in parts)

    def against(self, baseline: Prediction) -> Prediction:
        """A copy with the speed-up in time per token over `baseline`."""
        return replace(self, speedup=baseline.best.tpot_ms / self.best.tpot_ms)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the best figures at the top level, `low` and `high` beside them, then the parts."""
        skipped = ("best", "low", "high", "acceptance", "breakdown_source", "drafting")
        plain = {name: value for name, value in vars(self).items() if name not in (*skipped, "breakdown")}
        if round_shape(self.drafting.kind).depth:
            plain["drafter"] = {"hit": self.drafting.hit, "proposal_acceptance": self.drafting.proposal_acceptance}
        bands = {name: asdict(getattr(self, name)) for name in ("low", "high", "acceptance")}
        return {**asdict(self.best), **bands, **plain, "round_ms": self.round_ms}


def predict(
    plan: Plan, shape: ModelShape, profile: Profile, overlap: float | None = None, function: ModelShape | None = None
) -> Prediction:
    """Latency, throughput and memory of one plan. overlap, function: see `predict_all`."""
    return predict_all([plan], shape, profile, overlap=overlap, function=function)[0]


def predict_all(
    plans: Sequence[Plan],
    shape: ModelShape,
    profile: Profile,
    machine: Machine | None = None,
    overlap: float | None = None,
    engine: EngineProfile | None = None,
    function: ModelShape | None = None,
) -> list[Prediction]:
    """Predictions of several plans, at the contexts and batches of their workloads, in one evaluation.

    `machine` defaults to the profile's; with less memory, layers are offloaded earlier. `overlap` replaces the share of
    selected tokens that the previous step had selected too, which otherwise comes from each plan's policy. `engine` is
    the profile of the machine's engine, if it has one: bands and sources are then the engine's. `function` is the model
    that weights of this shape compute the function of, where that is another one (inflation): drafts have its
    acceptance.

    An adaptive plan is predicted at its steady-state gamma, with the memory of its largest. Bands combine the spread of
    the calibration, weighted by the time of each kernel class, with the band of the acceptance.
    """
    machine = machine or Machine.of(profile)
    contexts = {plan.workload.context for plan in plans}
    models = {context: AcceptanceModel.of_profile(function or shape, context, profile) for context in contexts}
    rounds = [Drafting.of(plan, shape, machine, models[plan.workload.context]) for plan in plans]
    gammas = [round_shape(each.kind).gamma for each in rounds]
    known_of = cache(lambda plan, gamma: models[plan.workload.context].of(plan, gamma))  # at whatever batch
    known = [
        acceptance_of_proposals(plan, round_shape(each.kind).depth)
        if round_shape(each.kind).proposes_to_target
        else known_of(
            replace(plan, workload=replace(plan.workload, batch=1)),
            max(1, gamma) if plan.speculation.adaptive else None,
        )
        for plan, gamma, each in zip(plans, gammas, rounds, strict=True)
    ]
    # A single plan stays scalar; several are stacked into arrays.
    counts = [1] * len(plans)
    strategies = [strategy_of(plan, shape, machine, 1.0) for plan in plans]
    if overlap is not None:
        strategies = [strategy.with_terms(offload_overlap=overlap) for strategy in strategies]
    strategy = stack([each.of_strategy(item) for item, each in zip(strategies, rounds, strict=True)], counts)
    rates = stack([rates_of(plan, shape, machine) for plan in plans], counts)
    ends = {end: replace(strategy, acceptance=np.array([getattr(item, end) for item in known])) for end in ENDS}
    best = evaluate(shape, machine, ends["best"], rates)
    slow, fast = (at_acceptance(best, ends[end]) for end in ("low", "high"))
    parts = _parts(shape, machine, strategy, rates, len(plans))
    certainties = [
        _certainty(index, plan, shape, known[index], best, parts, profile, engine, machine.drafted_round_s)
        for index, plan in enumerate(plans)
    ]
    return [
        _prediction(index, plan, rounds[index], shape, known[index], (slow, best, fast), parts, certainties[index])
        for index, plan in enumerate(plans)
    ]


def predict_question(plans: Sequence[Plan], question: Question) -> list[Prediction]:
    """Predictions of plans on a question's model, machine and engine.

    Raises PlanError for a plan of which a profiled engine has no times. Those that the plugin lacks are predicted.
    """
    for plan in plans if question.engine is not None else ():
        if not question.priced(plan):
            question.require_engine_runs(plan)
    return predict_all(plans, question.shape, question.profile, question.machine, engine=question.engine)


@dataclass(frozen=True)
class Certainty:
    """The weakest source of a prediction, and the log-symmetric spreads of its decode steps and prefill.

    The ends of a band are the best estimate times and divided by 1 + spread.
    """

    source: str
    spread: float
    prefill_spread: float


def _certainty(
    index: int, plan: Plan, shape: ModelShape, acceptance: Acceptance, best: Estimate, parts: tuple[PartTimes, ...],
    profile: Profile, engine: EngineProfile | None, drafted_round_s: Term,
) -> Certainty:  # fmt: skip
    prefill, draft, target = parts
    prefill_spread = float(prefill.spread[index])
    if engine is not None:
        source, spread = engine.plan_certainty(plan, shape)
        source = max(source, acceptance.source, key=SOURCES.index) if plan.speculation.active else source
        return Certainty(source, BAND_DEVIATIONS * spread, transferred_spread(prefill_spread))
    drafted = float(_at(best.round.passes * best.round.draft_s, index) / _at(best.round.total_s, index))
    spread = float(drafted * draft.spread[index] + (1 - drafted) * target.spread[index])
    if _borrows_rates(shape):
        spread, prefill_spread = transferred_spread(spread), transferred_spread(prefill_spread)
    source = _source(plan, shape, profile, acceptance)
    if plan.speculation.active and np.any(drafted_round_s):  # fitted to few rounds, which leave half of it open
        spread += float(_at(drafted_round_s / best.round.total_s, index)) / 2
        source = max(source, "extrapolated", key=SOURCES.index)
    return Certainty(source, spread, prefill_spread)


def _parts(
    shape: ModelShape, machine: Machine, strategy: Strategy, rates: StrategyRates, count: int
) -> tuple[PartTimes, ...]:
    pass_rates = {
        "prefill": prefill_rates(shape, machine, strategy, rates.target.linear),
        "draft": draft_rates(shape, machine, strategy, rates),
        "target": target_rates(shape, machine, strategy, rates),
    }
    passes = pass_ops(shape, machine, strategy)
    timed = {name: [_timed(op, machine, pass_rates[name]) for op in ops] for name, ops in passes.items()}
    if machine.engine is not None:
        engine = machine.engine
        step = engine.step_of(strategy, strategy.context + strategy.new_tokens / 2)
        timed["target"] = [(op, seconds, 0.0) for op, seconds in engine.timed(shape, machine, step)]
        prompts = engine_prompts(shape, machine, engine, replace(strategy, batch=1))
        timed["prefill"] = [(op, seconds, _spread(op, machine, pass_rates["prefill"])) for op, seconds in prompts]
        arithmetic = partial(engine.arithmetic, shape=shape, step=step)
        return tuple(_part(name, timed[name], count, arithmetic) for name in ("prefill", "draft", "target"))
    for name, gap_s in (("draft", machine.draft_gap_s), ("target", machine.target_gap_s)):
        gap, part_rates = Op("between kernels", "gap", Cost(), shape.layers), pass_rates[name]
        timed[name].append((gap, machine.gap_seconds(part_rates, shape.layers, gap_s), part_rates["gap"].spread))
    return tuple(
        _part(name, rows, count, integers=partial(machine.integers, pass_rates=pass_rates[name]))
        for name, rows in timed.items()
    )


def _timed(op: Op, machine: Machine, rates: dict[str, RateTerms]) -> tuple[Op, Term, Term]:
    """An operation, its seconds and their relative spread."""
    return op, machine.op_seconds(op, rates), _spread(op, machine, rates)


def _spread(op: Op, machine: Machine, rates: dict[str, RateTerms]) -> Term:
    return 0.0 if op.kind in COLLECTIVES else machine.rates_for(op, rates).spread


def _part(
    name: str, timed: Sequence[tuple[Op, Term, Term]], count: int, arithmetic: Callable[[Op], Term] = lambda _: 1.0,
    integers: Callable[[Op], Term] = lambda _: 0.0,
) -> PartTimes:  # fmt: skip
    ops, *terms = zip(*timed, strict=True)
    seconds, spreads, speeds, whole = (
        tuple(np.broadcast_to(each, (count,)) for each in values)
        for values in (*terms, map(arithmetic, ops), map(integers, ops))
    )
    return PartTimes(name, ops, seconds, speeds, whole, np.average(spreads, axis=0, weights=seconds))


def _prediction(
    index: int, plan: Plan, drafting: Drafting, shape: ModelShape, acceptance: Acceptance,
    estimates: tuple[Estimate, Estimate, Estimate], parts: tuple[PartTimes, ...], certainty: Certainty,
) -> Prediction:  # fmt: skip
    slow, best, fast = estimates
    spread, prefill_spread, memory = certainty.spread, certainty.prefill_spread, best.memory

    def figures(near: Estimate, far: Estimate, deviations: int, workspace: float) -> Figures:
        """One end of the band, with `workspace` times the workspace. Throughput, inverse to time, is of the other."""
        resident = _at(near.memory.resident, index)
        prefill_ms = 1e3 * (1 + prefill_spread) ** deviations
        return Figures(
            tpot_ms=1e3 * (_at(near.tpot_s, index) * (1 + spread) ** deviations),
            ttft_request_ms=prefill_ms * _at(near.request_ttft_s, index),
            ttft_ms=prefill_ms * _at(near.ttft_s, index),
            tokens_per_s=plan.workload.batch / (_at(far.tpot_s, index) * (1 + spread) ** -deviations),
            peak_memory_bytes=resident + workspace * (_at(near.memory.peak, index) - resident),
        )

    return Prediction(
        best=figures(best, best, 0, 1),
        low=figures(fast, slow, -1, 0.5),
        high=figures(slow, fast, 1, 1.5),
        source=certainty.source,
        acceptance=acceptance,
        gamma=round_shape(drafting.kind).gamma,
        tokens_per_round=_at(best.tokens_per_round, index),
        draft_step_ms=1e3 * _at(best.round.draft_s, index),
        verify_ms=1e3 * _at(best.round.verify_s, index),
        round_s=_round_s(best, index),
        memory_bytes={name: _at(value, index) for name, value in vars(memory).items()},
        prefill_peak_bytes=_at(memory.prefill_peak, index),
        decode_peak_bytes=_at(memory.decode_peak, index),
        offloaded_layers=int(_at(best.offloaded_layers, index)),
        host_bytes=_at(best.host_bytes, index),
        breakdown_source=BreakdownSource(plan, shape, parts, index),
        drafting=drafting,
    )


def _round_s(estimate: Estimate, index: int) -> dict[str, float]:
    times = estimate.round
    parts = {
        "draft": times.passes * times.draft_s,
        "verification": times.verify_s,
        "acceptance": times.accept_s,
        "selection": times.select_s,
        "flush": times.flush_s,
        "overhead": times.overhead_s,
    }
    if np.any(times.propose_s):
        parts["proposals"] = times.propose_s
    return {name: _at(value, index) for name, value in parts.items()}


def _source(plan: Plan, shape: ModelShape, profile: Profile, acceptance: Acceptance) -> str:
    """The weakest source among the kernel classes of a pass and, if the plan uses them, selection and acceptance."""
    used = [profile.rates(kind).source for kind in used_classes(plan, shape)]
    if plan.speculation.active:
        used.append(acceptance.source)
    if plan.placement.offload and LINK_CLASSES[0] not in profile.classes:
        used.append("prior")  # the link follows its datasheet
    if _borrows_rates(shape):
        used.append("prior")
    return max(used, key=SOURCES.index)


def _borrows_rates(shape: ModelShape) -> bool:
    """Whether kernels that do not exist are costed at the rates of others: of a checkpoint's quantized weights at
    full-precision rates, of layers that the runtime does not execute at those of the nearest that it does."""
    bits = shape.weight_bits
    return bool(layer_needs(shape)) or not (bits.full or bits.format == KEPT_FORMAT)


def _at(value: Any, index: int) -> float:
    """One plan's entry of an array, or the number shared by all plans."""
    array = np.asarray(value, dtype=float)
    return float(array[index] if array.ndim else array)


SAMPLES = 2048
SEED = 0

# Kernel classes of a round's parts other than its passes.
ROUND_CLASSES = {
    "proposals": "gather",
    "acceptance": "sampling",
    "selection": "gather",
    "flush": "quantize",
    "overhead": "gap",
}


def sampled_tpot_ms(
    predictions: Sequence[Prediction], profile: Profile, engine: EngineProfile | None = None
) -> np.ndarray:
    """Milliseconds per token, [plans, samples], with the same errors for all plans. engine: as for `predict_all`.

    Every class's time is scaled by a log-normal factor of the spread of its fit; the acceptance follows a normal
    distribution on either side of its best estimate, as wide as its band there.
    """
    rounds = _scaled([_round_s_by_class(predicted) for predicted in predictions], profile, engine)
    tokens = np.stack([_sampled_tokens(predicted, _deviations()[-1]) for predicted in predictions])
    return 1e3 * rounds / tokens


def sampled_ttft_ms(predictions: Sequence[Prediction], profile: Profile) -> np.ndarray:
    """Milliseconds to the first token, [plans, samples], with the same errors as `sampled_tpot_ms`."""
    return 1e3 * _scaled(
        [_by_class(predicted, "prefill", predicted.best.ttft_ms / 1e3) for predicted in predictions], profile
    )


@cache
def _deviations() -> np.ndarray:
    """Standard normal errors, [kernel classes + 1, samples]; the last row is the acceptance's."""
    return np.random.default_rng(SEED).standard_normal((len(KERNEL_CLASSES) + 1, SAMPLES))


def _scaled(
    seconds: Sequence[Mapping[str, float]], profile: Profile, engine: EngineProfile | None = None
) -> np.ndarray:
    """The sum of each plan's seconds by class, every class scaled by its sampled error: [plans, samples]."""
    spreads = np.array(
        [profile.rates(name).spread if engine is None else engine.class_spread for name in KERNEL_CLASSES]
    )
    factors = np.exp(np.log1p(spreads)[:, None] * _deviations()[:-1])
    return np.array([[by_class.get(name, 0.0) for name in KERNEL_CLASSES] for by_class in seconds]) @ factors


def _round_s_by_class(predicted: Prediction) -> dict[str, float]:
    """Seconds of a round by kernel class; a pass's host time counts in proportion to its operations."""
    spent = predicted.round_s
    drafting = _by_class(predicted, "draft", spent["draft"]) if spent["draft"] else {}
    others = _sum(*({kind: spent[part]} for part, kind in ROUND_CLASSES.items() if part in spent))
    return _sum(_by_class(predicted, "target", spent["verification"]), drafting, others)


def _by_class(predicted: Prediction, part: str, seconds: float) -> dict[str, float]:
    """`seconds` of one part of the work, divided among kernel classes as its operations' times are."""
    by_kind = predicted.breakdown_source.seconds_by_class(part)
    scale = seconds / sum(by_kind.values())
    return {kind: op_s * scale for kind, op_s in by_kind.items()}


def _sum(*parts: Mapping[str, float]) -> dict[str, float]:
    kinds = dict.fromkeys(kind for part in parts for kind in part)
    return {kind: sum(part.get(kind, 0.0) for part in parts) for kind in kinds}


def _sampled_tokens(predicted: Prediction, deviations: np.ndarray) -> np.ndarray:
    """Tokens per round at sampled acceptances: [samples]."""
    known = predicted.acceptance
    width = np.where(deviations > 0, known.high - known.best, known.best - known.low)
    sampled = np.clip(known.best + width * deviations / BAND_DEVIATIONS, 0, 1)
    ratio = predicted.drafting.tokens(sampled) / predicted.drafting.tokens(known.best)
    return np.asarray(predicted.tokens_per_round * ratio)
