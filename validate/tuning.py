"""Tuning of a plan's sparse ratio and gamma on a text, in the three steps of SpecAttn (section 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from ridgeplan.planner.acceptance import AcceptanceRow, row_name
from ridgeplan.planner.lowering import round_costs
from ridgeplan.planner.search import RATIOS
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.plan.plan import Plan, require
from ridgeplan.roofline.round import RoundCosts, flush_capped, tokens_at
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.speculation.gamma_control import Evidence
from ridgeplan.validate.acceptance import Passage, measured_row, named_shape
from ridgeplan.validate.machine import device_name
from ridgeplan.validate.measure import Progress, silent
from ridgeplan.validate.prompts import prompt_batch

STABLE = 0.97  # of the most tokens per round: with more tokens read, acceptance rises no further


@dataclass(frozen=True)
class TuningPoint:
    """A ratio and gamma with measured tokens per round and predicted times."""

    ratio: float
    gamma: int
    tokens_per_round: float
    round_ms: float

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


@dataclass(frozen=True)
class Landscape:
    """Acceptance and round times of a plan at every ratio.

    acceptance_at: conditional acceptance by position, by ratio. round_s: seconds of a round, by ratio and gamma.
    group: tokens between flushes, at which rounds end; None where the target reads no codes.
    """

    acceptance_at: Mapping[float, Sequence[float]]
    round_s: Callable[[float, int], float]
    group: int | None = None

    def candidate(self, ratio: float, gamma: int) -> TuningPoint:
        """One point."""
        tokens = tokens_at(self.acceptance_at[ratio], gamma)
        capped = tokens if self.group is None else float(flush_capped(tokens, self.group))
        return TuningPoint(ratio, gamma, capped, 1e3 * self.round_s(ratio, gamma))


def tune_steps(known: Landscape, gammas: Sequence[int]) -> tuple[Step, ...]:
    """The three steps; the last has the result. A single ratio needs the step for gamma only."""
    ratios, largest = sorted(known.acceptance_at), max(gammas)
    first = _stable([known.candidate(ratio, largest) for ratio in ratios])
    second = _fastest("gamma", (known.candidate(first.chosen.ratio, gamma) for gamma in gammas))
    if len(ratios) == 1:
        return (second,)
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


MIN_DRAFTS = 32  # of a position, for a row of its own


@dataclass(frozen=True)
class MeasuredDrafts:
    """Counts of a plan's drafts by position in a round: verified by the target, and accepted."""

    plan: Plan
    verified_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @classmethod
    def of(cls, engine: Engine, prompts: Sequence[Sequence[int]]) -> MeasuredDrafts:
        """Counts from a generation of the engine's plan at temperature 1, which ignores stop tokens."""
        tokens = engine.plan.workload.new_tokens
        figures = engine.generate(prompts, tokens, SamplingParams(temperature=1.0)).statistics
        return cls(engine.plan, figures.verified_at, figures.accepted_at)

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
        for position, (verified, accepted) in enumerate(zip(self.verified_at, self.accepted_at, strict=True), start=1):
            if name and verified >= MIN_DRAFTS:
                where = f"{verified} drafts at position {position} after {text}, {device_name(engine.device)}"
                yield measured_row(
                    engine.device.type, shape, text, context, where, calibrated=calibrated, draft=name,
                    acceptance=(accepted + 0.5) / (verified + 1), ratio=float(drafts.share_of(context, self.ratio)),
                    gamma=self.plan.speculation.gamma, position=position, tokens=verified,
                )  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """The tuned plan, the steps that led to it, plain decoding's time, and the measured rows of acceptance."""

    plan: Plan
    steps: tuple[Step, ...]
    plain_ms: float
    rows: tuple[AcceptanceRow, ...]

    @property
    def chosen(self) -> TuningPoint:
        """The last step's choice."""
        return self.steps[-1].chosen

    @property
    def speedup(self) -> float:
        """Over a plain step of the same target."""
        return self.plain_ms / self.chosen.tpot_ms


def tune(
    plan: Plan,
    model: str,
    passage: Passage,
    profile: Profile,
    largest: int,
    device: str | None = None,
    on_progress: Progress = silent,
) -> Tuning:
    """The plan with the sparse ratio and the gamma that are fastest for a text, at the profile's rates.

    model, device: as for `ridgeplan.runtime.load`. passage: its tokens are generated after each prompt. largest: gamma
    of the measurement, and the largest that is considered. An adaptive plan keeps adapting, up to the tuned gamma.
    Raises PlanError for a plan without drafts, PromptError for a text that is too short, and what `load` raises.
    """
    require(plan.speculation.active, "the plan has gamma 0; allowed: a plan that drafts")
    require(1 <= largest <= MAX_GAMMA, f"the largest gamma is {largest}; allowed: 1 to {MAX_GAMMA}")
    plans = list(_measured_plans(plan, largest, passage.tokens))
    drafts, rows, shape = _measure(plans, model, passage, device, on_progress)

    @cache
    def costs(ratio: float) -> RoundCosts:
        return round_costs(_with(plan, ratio=ratio, gamma=largest, adaptive=False), shape, profile, range(largest + 1))

    known = Landscape(
        acceptance_at={measured.ratio: measured.acceptance_at for measured in drafts},
        round_s=lambda ratio, gamma: costs(ratio).seconds[gamma],
        group=plan.kv.group if plan.kv.format.buffered else None,
    )
    steps = tune_steps(known, range(1, largest + 1))
    best = steps[-1].chosen
    tuned = _with(plan, ratio=best.ratio, gamma=best.gamma)
    return Tuning(tuned, steps, 1e3 * costs(best.ratio).plain_s, tuple(rows))


def _measured_plans(plan: Plan, largest: int, tokens: int) -> Iterator[Plan]:
    """The plan at every ratio, with rounds of `largest` drafts that generate `tokens` tokens."""
    for ratio in _ratios(plan, tokens):
        fixed = _with(plan, ratio=ratio, gamma=largest, adaptive=False)
        yield replace(fixed, workload=replace(plan.workload, new_tokens=tokens))


def _ratios(plan: Plan, tokens: int) -> list[float]:
    """Ascending ratios. Of those at which the selection reads only its minimum of tokens, the largest one."""
    if not plan.speculation.sparse:
        return [1.0]
    ratios = sorted({*RATIOS, plan.speculation.ratio})
    longest, min_tokens = plan.workload.context + tokens, plan.speculation.selection.min_tokens
    alike = sum(ratio * longest <= min_tokens for ratio in ratios)
    return ratios[max(alike - 1, 0) :]


def _with(plan: Plan, ratio: float, **changes: Any) -> Plan:
    speculation = plan.speculation.with_ratio(ratio) if plan.speculation.sparse else plan.speculation
    return replace(plan, speculation=replace(speculation, **changes))


def _measure(
    plans: Sequence[Plan], model: str, passage: Passage, device: str | None, on_progress: Progress
) -> tuple[list[MeasuredDrafts], list[AcceptanceRow], ModelShape]:
    """Counts and rows of every plan, and the model's shape as it runs. Weights are loaded and quantized once."""
    engine: Engine | None = None
    measured: list[MeasuredDrafts] = []
    rows: list[AcceptanceRow] = []
    name = named_shape(model).name
    for number, plan in enumerate(plans):
        on_progress(f"ratio {plan.speculation.ratio:g}", number, len(plans))
        weights, drafts = (engine.weights, engine.draft_weights) if engine else (None, None)
        engine = load(
            plan, model, device=device, weights=weights, draft_weights=drafts, calibration=passage.calibration
        )
        shape = replace(engine.config.shape, name=name)
        prompts = prompt_batch(engine.tokenizer, plan.workload.context, plan.workload.batch, passage.text)
        measured.append(MeasuredDrafts.of(engine, prompts))
        rows += measured[-1].rows(engine, shape, passage.name, passage.calibration is not None)
        engine.close()
    on_progress("tuned", len(plans), len(plans))
    return measured, rows, shape
