"""Tuning of a plan's sparse ratio and gamma on a text, in the three steps of SpecAttn (section 3.4).

Every ratio and gamma that a step compares is a generation whose tokens and time are measured. The quick form has one
generation per ratio and costs all gammas at a profile's rates with the acceptance that the largest gamma had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceRow, row_name
from ridgeplan.planner.acceptance.model import AcceptanceModel
from ridgeplan.planner.lowering import estimate_kinds, round_costs
from ridgeplan.planner.search import RATIOS
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import KVFormat, Plan, Speculation, require, require_within
from ridgeplan.roofline.round import RoundCosts, flush_capped, tokens_at
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.speculation.gamma_control import Evidence
from ridgeplan.validate.acceptance import Passage, named_shape, rows_by_position
from ridgeplan.validate.engines import SharedWeights
from ridgeplan.validate.machine import device_name
from ridgeplan.validate.measure import Measured, is_busy, measure, widest
from ridgeplan.validate.prompts import prompt_batch

STABLE = 0.97  # of the most tokens per round: with more tokens read, acceptance rises no further


@dataclass(frozen=True)
class TuningPoint:
    """A ratio and gamma with tokens per round and a round's time. acceptance_at: conditional, by position."""

    ratio: float
    gamma: int
    tokens_per_round: float
    round_ms: float
    acceptance_at: tuple[float, ...] = ()

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token of a sequence."""
        return self.round_ms / self.tokens_per_round


@dataclass(frozen=True)
class Step:
    """The candidates that one step compared, and the index of its choice."""

    name: str
    candidates: tuple[TuningPoint, ...]
    index: int

    @property
    def chosen(self) -> TuningPoint:
        """The step's choice."""
        return self.candidates[self.index]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [{**asdict(candidate), "tpot_ms": candidate.tpot_ms} for candidate in self.candidates]
        return {"name": self.name, "candidates": rows, "chosen": rows[self.index]}


class Candidates(Protocol):
    """What the steps compare."""

    @property
    def ratios(self) -> Sequence[float]:
        """Ascending."""

    def candidate(self, ratio: float, gamma: int) -> TuningPoint:
        """One point."""


@dataclass(frozen=True)
class Landscape:
    """Measured acceptance and predicted round times of a plan at every ratio.

    acceptance_at: conditional acceptance by position, by ratio. round_s: seconds of a round, by ratio and gamma.
    group: tokens between flushes, at which rounds end; None where the target reads no codes.
    """

    acceptance_at: Mapping[float, Sequence[float]]
    round_s: Callable[[float, int], float]
    group: int | None = None

    @property
    def ratios(self) -> Sequence[float]:
        """See `Candidates`."""
        return sorted(self.acceptance_at)

    def candidate(self, ratio: float, gamma: int) -> TuningPoint:
        """See `Candidates`."""
        tokens = tokens_at(self.acceptance_at[ratio], gamma)
        capped = tokens if self.group is None else float(flush_capped(tokens, self.group))
        acceptance_at = tuple(self.acceptance_at[ratio][:gamma])
        return TuningPoint(ratio, gamma, capped, 1e3 * self.round_s(ratio, gamma), acceptance_at)


def tune_steps(known: Candidates, gammas: Sequence[int]) -> tuple[Step, ...]:
    """The three steps; the last has the result. A single ratio needs the step for gamma only."""
    ratios, largest = known.ratios, max(gammas)
    if len(ratios) == 1:
        return (_fastest("gamma", (known.candidate(ratios[0], gamma) for gamma in gammas)),)
    first = _stable([known.candidate(ratio, largest) for ratio in ratios])
    second = _fastest("gamma", (known.candidate(first.chosen.ratio, gamma) for gamma in gammas))
    third = _fastest("ratio again", (known.candidate(ratio, second.chosen.gamma) for ratio in ratios))
    return first, second, third


def _stable(candidates: Sequence[TuningPoint]) -> Step:
    """The smallest ratio with nearly the most tokens per round."""
    max_tokens = max(candidate.tokens_per_round for candidate in candidates)
    index = next(at for at, candidate in enumerate(candidates) if candidate.tokens_per_round >= STABLE * max_tokens)
    return Step("ratio", tuple(candidates), index)


def _fastest(name: str, candidates: Iterable[TuningPoint]) -> Step:
    options = tuple(candidates)
    return Step(name, options, min(range(len(options)), key=lambda index: options[index].tpot_ms))


@dataclass(frozen=True)
class MeasuredDrafts:
    """Counts of a plan's drafts by position in a round: verified by the target, and accepted."""

    plan: Plan
    verified_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """The plan's share of the tokens that drafts read, unless its floor is more."""
        return self.plan.speculation.ratio

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """Conditional acceptance by position; one that few drafts reached is about that of the one before."""
        mean = (sum(self.accepted_at) + 0.5) / (sum(self.verified_at) + 1)
        return tuple(Evidence(self.verified_at, self.accepted_at).acceptance_at(mean))

    def rows(self, engine: Engine, shape: ModelShape, text: str, calibrated: bool) -> Iterator[AcceptanceRow]:
        """A row for every position that enough drafts reached; none for drafts that read what the target reads.

        shape: by the name that the rows have. Acceptance is the mean of Jeffreys' posterior, so it is never 0 or 1.
        """
        name, drafts, context = row_name(self.plan), self.plan.speculation.selection, self.plan.workload.context
        counts = zip(self.accepted_at, self.verified_at, strict=True)
        acceptance = [(accepted + 0.5) / (verified + 1) for accepted, verified in counts]
        if name:
            yield from rows_by_position(
                engine.device.type, shape, text, context, device_name(engine.device), self.verified_at, acceptance,
                calibrated=calibrated, draft=name, ratio=float(drafts.share_of(context, self.ratio)),
                gamma=self.plan.speculation.gamma,
            )  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """The tuned plan, the steps that led to it, plain decoding's time, and the measured rows of acceptance.

    measured: whether times are measured, not predicted. generations: that were run. spread: the widest of their rounds'
    times, by which other work on the machine shows; None if unknown.
    """

    plan: Plan
    steps: tuple[Step, ...]
    plain_ms: float
    rows: tuple[AcceptanceRow, ...]
    measured: bool = True
    generations: int = 0
    spread: float | None = None

    @property
    def chosen(self) -> TuningPoint:
        """The last step's choice."""
        return self.steps[-1].chosen

    @property
    def speedup(self) -> float | None:
        """Over a plain step of the same target; None where other work slowed the generations.

        That shows by the spread of rounds, or by a gain beyond the tokens of a round, which takes a plain step or more.
        """
        ratio = self.plain_ms / self.chosen.tpot_ms
        noisy = self.measured and (is_busy(self.spread) or ratio > self.chosen.tokens_per_round)
        return None if noisy else ratio


@dataclass(frozen=True)
class Schedule:
    """The generations that tuning needs. quick: one per ratio, with rounds of the largest gamma.

    ratios: ascending. gammas: to consider.
    """

    plan: Plan
    tokens: int
    largest: int
    quick: bool = False

    def __post_init__(self) -> None:
        require(self.plan.speculation.active, "the plan has gamma 0; allowed: a plan that drafts")
        require_within("the largest gamma", self.largest, 1, MAX_GAMMA)

    @property
    def gammas(self) -> range:
        """To consider."""
        return range(1, self.largest + 1)

    @property
    def ratios(self) -> list[float]:
        """Ascending. Of those at which the selection reads only its minimum of tokens, the largest one."""
        plan = self.plan
        if not plan.speculation.sparse:
            return [1.0]
        ratios = sorted({*RATIOS, plan.speculation.ratio})
        longest, min_tokens = plan.workload.context + self.tokens, plan.speculation.selection.min_tokens
        alike = sum(ratio * longest <= min_tokens for ratio in ratios)
        return ratios[max(alike - 1, 0) :]

    @property
    def max_generations(self) -> int:
        """Points that steps share are measured once, so that fewer may do."""
        ratios = len(self.ratios)
        return ratios if self.quick else ratios + (self.largest - 1) + (ratios - 1) + 1  # plain decoding

    def plan_at(self, ratio: float, gamma: int) -> Plan:
        """The plan of a point's generation."""
        fixed = _with(self.plan, ratio=ratio, gamma=gamma, adaptive=False)
        return replace(fixed, workload=replace(self.plan.workload, new_tokens=self.tokens))

    @property
    def plain_plan(self) -> Plan:
        """Plain decoding with the same target; what only drafts read is left out."""
        plan, bits = self.plan_at(self.ratios[0], 1), self.plan.weights.target_bits
        drafts_only = plan.kv.format is KVFormat.SHADOW and not plan.attention.selection.needs_codes
        kv = replace(plan.kv, format=KVFormat.FULL) if drafts_only else plan.kv
        return replace(plan, kv=kv, weights=replace(plan.weights, draft_bits=bits), speculation=Speculation())

    def predicted_s(self, shape: ModelShape, profile: Profile) -> float:
        """Seconds of all generations at a profile's rates, with prompts and without loading. Raises PlanError."""
        plan, machine = self.plan_at(self.ratios[-1], self.largest), Machine.of(profile)
        model = AcceptanceModel.of_profile(shape, plan.workload.context, profile)
        estimate = estimate_kinds(plan, shape, machine, model, [self.largest])
        seconds = estimate.ttft_s + estimate.tpot_s * self.tokens
        return self.max_generations * float(np.max(seconds))


def tune(
    plan: Plan,
    model: str,
    passage: Passage,
    profile: Profile | None,
    largest: int,
    device: str | None = None,
    on_progress: OnProgress = silent,
    quick: bool = False,
) -> Tuning:
    """The plan with the sparse ratio and the gamma that the three steps choose for a text.

    Each ratio and gamma that the steps compare is a generation at temperature 1, whose time counts. quick: one per
    ratio; all gammas are costed at the profile's rates, which only this form needs, with its acceptance. model, device:
    as for `ridgeplan.runtime.load`. passage: its tokens are generated after each prompt. largest: the largest gamma to
    consider. An adaptive plan keeps adapting, up to the tuned gamma.
    Raises PlanError for a plan without drafts, PromptError for a text that is too short, and what `load` raises.
    """
    schedule = Schedule(plan, passage.tokens, largest, quick)
    trials = Trials(schedule, SharedWeights(model, device, passage.calibration), passage, on_progress)
    if not quick:
        steps = tune_steps(trials, schedule.gammas)
        plain_ms = trials.run(schedule.plain_plan, "plain decoding").measured.tpot_ms
    else:
        assert profile is not None, "the quick form predicts times"
        largest_rounds = [trials.trial(ratio, largest).drafts for ratio in schedule.ratios]
        shape = trials.shape
        assert shape is not None, "a generation ran"

        @cache
        def costs(ratio: float) -> RoundCosts:
            fixed = _with(plan, ratio=ratio, gamma=largest, adaptive=False)
            return round_costs(fixed, shape, profile, range(largest + 1))

        known = Landscape(
            acceptance_at={drafts.ratio: drafts.acceptance_at for drafts in largest_rounds},
            round_s=lambda ratio, gamma: costs(ratio).seconds[gamma],
            group=plan.kv.group if plan.kv.format.buffered else None,
        )
        steps = tune_steps(known, schedule.gammas)
        plain_ms = 1e3 * costs(steps[-1].chosen.ratio).plain_s
    on_progress("tuned", 1, 1)
    best = steps[-1].chosen
    tuned = _with(plan, ratio=best.ratio, gamma=best.gamma)
    spread = None if quick else widest(trials.spreads)
    return Tuning(tuned, steps, plain_ms, tuple(trials.rows), not quick, len(trials.spreads), spread)


def _with(plan: Plan, ratio: float, **changes: Any) -> Plan:
    speculation = plan.speculation.with_ratio(ratio) if plan.speculation.sparse else plan.speculation
    return replace(plan, speculation=replace(speculation, **changes))


@dataclass(frozen=True)
class Trial:
    """The generation of one point: its time, and its drafts."""

    measured: Measured
    drafts: MeasuredDrafts

    @property
    def point(self) -> TuningPoint:
        """The point with what was measured."""
        speculation, tokens = self.drafts.plan.speculation, self.measured.statistics.tokens_per_round
        round_ms = self.measured.tpot_ms * tokens
        return TuningPoint(speculation.ratio, speculation.gamma, tokens, round_ms, self.drafts.acceptance_at)


@dataclass(eq=False)
class Trials:
    """Runs the generations of a schedule, each point once. Weights are loaded and quantized once.

    shape: the model's, as it runs, once a generation did. rows: acceptance by position, of every point. spreads: of
    each generation's times.
    """

    schedule: Schedule
    shared: SharedWeights
    passage: Passage
    on_progress: OnProgress
    shape: ModelShape | None = None
    rows: list[AcceptanceRow] = field(default_factory=list)
    spreads: list[float | None] = field(default_factory=list)
    _trials: dict[tuple[float, int], Trial] = field(default_factory=dict)
    _draft_weights: DecoderWeights | None = None

    @property
    def ratios(self) -> Sequence[float]:
        """See `Candidates`."""
        return self.schedule.ratios

    def candidate(self, ratio: float, gamma: int) -> TuningPoint:
        """See `Candidates`."""
        return self.trial(ratio, gamma).point

    def trial(self, ratio: float, gamma: int) -> Trial:
        """The generation of a point."""
        if (ratio, gamma) not in self._trials:
            plan = self.schedule.plan_at(ratio, gamma)
            self._trials[ratio, gamma] = self.run(plan, f"ratio {ratio:g}, gamma {gamma}")
        return self._trials[ratio, gamma]

    def run(self, plan: Plan, what: str) -> Trial:
        """A generation at temperature 1, which ignores stop tokens; its rows of acceptance are kept."""
        self.on_progress(what, len(self.spreads), self.schedule.max_generations)
        calibrated = plan.weights.quantized and self.passage.calibration is not None
        with self.shared.engine(plan, self._draft_weights) as engine:
            self._draft_weights = engine.draft_weights
            self.shape = replace(engine.config.shape, name=named_shape(self.shared.model).name)
            prompts = prompt_batch(engine.tokenizer, plan.workload.context, plan.workload.batch, self.passage.text)
            measured = measure(engine, prompts, plan.workload.new_tokens, SamplingParams(temperature=1.0))
            figures = measured.statistics
            drafts = MeasuredDrafts(plan, figures.verified_at, figures.accepted_at)
            self.rows += drafts.rows(engine, self.shape, self.passage.name, calibrated)
        self.spreads.append(measured.spread)
        return Trial(measured, drafts)
