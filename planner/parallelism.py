"""Degrees of parallelism: those that GPUs allow, the best of them for a question, and why the others lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from ridgeplan.planner.quantities import size_text, time_text
from ridgeplan.planner.question import Objective, Question, SearchOptions
from ridgeplan.planner.search import Candidate
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.parallel import MAX_DEVICES, SINGLE, Parallel
from ridgeplan.roofline.catalog.sharding import uneven
from ridgeplan.roofline.collectives import COLLECTIVES
from ridgeplan.roofline.engine import EngineStep
from ridgeplan.roofline.plan.plan import require

MINIMIZED = {Objective.LATENCY: "time", Objective.TOTAL: "time of a request", Objective.MEMORY: "memory"}
TOLERANCE = 0.05  # by how much fewer GPUs, or fewer kinds of parallelism, may be slower: no messages were measured here


@dataclass(frozen=True)
class StepShares:
    """Milliseconds of a plain decode step by what they are spent on."""

    weights_ms: float
    kv_ms: float
    messages_ms: float
    other_ms: float


@dataclass(frozen=True)
class DegreeChoice:
    """One choice of degrees with its best plan, and why it lost; "" for the chosen one.

    peak_bytes: of the GPU that holds most.
    """

    parallel: Parallel
    gpus: int
    plan: str
    tpot_ms: float
    peak_bytes: float
    fits: bool
    step: StepShares | None
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"degrees": str(self.parallel)}


def possible_degrees(options: SearchOptions, shape: ModelShape) -> tuple[Parallel, ...]:
    """The degrees that the options allow, whether the engine can shard the model by them or not.

    With `gpus`, all products that divide it; without, those that are named, of which missing ones are 1. Data
    parallelism within a replica is for models with experts: others run as replicas. Raises PlanError where none is.
    """
    named = options.tensor_parallel, options.pipeline_parallel, options.data_parallel
    gpus = options.least_gpus
    divisors = [degree for degree in range(1, min(gpus, MAX_DEVICES) + 1) if gpus % degree == 0]
    free = divisors if options.gpus else [1]
    axes = [[degree] if degree else free for degree in named]
    if options.data_parallel is None and not shape.is_moe:
        axes[2] = [1]
    possible = []
    for tensor, pipeline, data in product(*axes):
        if gpus % (tensor * pipeline * data) == 0:
            experts = shape.is_moe and tensor * data > 1
            whole = (False, True) if options.expert_parallel is None else (options.expert_parallel,)
            possible += [Parallel(tensor, pipeline, data, expert) for expert in whole if experts or not expert]
    routed = shape.is_moe or not options.expert_parallel
    require(routed, f"expert_parallel is true, but {shape.name} has no experts; allowed: false")
    degrees = " x ".join(str(degree) for degree in named if degree)
    into = " into ranks of tp or dp for whole experts" * bool(options.expert_parallel)
    require(bool(possible), f"the degrees {degrees} do not divide {gpus} GPUs{into}; allowed: those whose product does")
    return tuple(possible)


def divided(question: Question) -> tuple[dict[Parallel, Question], dict[Parallel, str]]:
    """The question at all degrees that it allows, and why the engine cannot shard the model by the others.

    The question itself where it is for one GPU. Raises PlanError where the engine can shard it by none of them.
    """
    if not question.options.several_gpus or question.workload.parallel != SINGLE:
        return {question.workload.parallel: question}, {}
    possible = possible_degrees(question.options, question.shape)
    refused = {parallel: problem for parallel in possible if (problem := uneven(question.shape, parallel))}
    parallel, problem = next(iter(refused.items()), (SINGLE, ""))
    require(len(refused) < len(possible), f"{problem} do not divide by {parallel}; allowed: degrees that divide them")
    return {each: question.on_gpus(each) for each in possible if each not in refused}, refused


def choose_degrees(
    question: Question, best_plan: Callable[[Question], Candidate]
) -> tuple[Question, tuple[DegreeChoice, ...]]:
    """The question at its best degrees, and every choice from the best to the worst.

    best_plan: of a question at some degrees, or its smallest where none fits. Without choices where the question is
    for one GPU. Raises PlanError as `divided` does.
    """
    questions, refused = divided(question)
    if not refused and [*questions] == [question.workload.parallel]:
        return question, ()
    best = {parallel: (sharded, best_plan(sharded)) for parallel, sharded in questions.items()}
    chosen = _chosen(best)
    rows = [_row(*best[parallel], best[chosen]) for parallel in best]
    rows.sort(key=lambda row: (row.parallel != chosen, not row.fits, best[row.parallel][1].score))
    unsharded = [
        DegreeChoice(parallel, parallel.gpus, "", math.inf, 0.0, False, None, f"{problem} do not divide")
        for parallel, problem in refused.items()
    ]
    return best[chosen][0], (*rows, *unsharded)


def _chosen(best: dict[Parallel, tuple[Question, Candidate]]) -> Parallel:
    fits = [candidate.rejection(question) is None for question, candidate in best.values()]
    scores, peaks = zip(*((candidate.score, candidate.peak_bytes) for _, candidate in best.values()), strict=True)
    return [*best][int(preferred_degrees([*best], *map(np.array, (scores, peaks, fits))))]


def preferred_degrees(
    degrees: Sequence[Parallel], scores: np.ndarray, peak_bytes: np.ndarray, fits: np.ndarray
) -> np.ndarray:
    """Index of the fastest degrees, or within the tolerance those of fewer GPUs and fewer kinds; else the least memory.

    scores (lower is better), peak_bytes, fits: of each degree's plan, [degrees, ...].
    """
    scores = np.where(fits, scores, np.inf)
    near = scores <= (1 + TOLERANCE) * scores.min(axis=0)
    sizes = [(parallel.gpus, _kinds(parallel)) for parallel in degrees]
    ranks = np.reshape([sorted(sizes).index(size) for size in sizes], (-1, *[1] * (scores.ndim - 1)))
    keys = np.where(fits.any(axis=0), scores, peak_bytes), np.where(near & fits, ranks, len(sizes))
    return np.lexsort(keys, axis=0)[0]


def _kinds(parallel: Parallel) -> int:
    return sum(degree > 1 for degree in (parallel.tensor, parallel.pipeline, parallel.data)) + parallel.expert


def _row(question: Question, candidate: Candidate, winner: tuple[Question, Candidate]) -> DegreeChoice:
    parallel, rejection = question.workload.parallel, candidate.rejection(question)
    step = step_shares(question, candidate)
    won = question is winner[0]
    verdict = rejection or ("" if won else "; ".join(_why_slower(question, candidate, step, winner)))
    return DegreeChoice(
        parallel, parallel.gpus, candidate.name, 1e3 * candidate.tpot_s, candidate.peak_bytes, rejection is None, step,
        verdict,
    )  # fmt: skip


def _why_slower(
    question: Question, candidate: Candidate, step: StepShares, winner: tuple[Question, Candidate]
) -> Iterator[str]:
    """The time against the winner's, or what else is minimized, and which part of a step it is lost in."""
    best, objective = step_shares(*winner), question.options.objective
    ratio, times = candidate.score / winner[1].score, candidate.tpot_s / winner[1].tpot_s
    unmeasured = times < 0.99 * ratio and objective is Objective.LATENCY
    slow_end = f", and {ratio:.2f}x at the slow end of its band, as its rates were not measured" * unmeasured
    yield f"{times if unmeasured else ratio:.2f}x the {MINIMIZED[objective]}{slow_end}"
    parallel, chosen = question.workload.parallel, winner[0].workload.parallel
    if ratio <= 1 + TOLERANCE:
        if parallel.gpus > chosen.gpus:
            yield f"within {TOLERANCE:.0%}, and {chosen} needs fewer GPUs"
        elif _kinds(parallel) > _kinds(chosen):
            yield f"within {TOLERANCE:.0%}, and {chosen} has fewer kinds of parallelism"
        return
    if objective is Objective.MEMORY:
        return
    lost = {
        "weights take": step.weights_ms - best.weights_ms,
        "the KV cache takes": step.kv_ms - best.kv_ms,
        "messages take": step.messages_ms - best.messages_ms,
    }
    part = max(lost, key=lambda name: lost[name])
    if lost[part] <= 0:
        yield "its prompts take longer"
        return
    yield f"{part} {time_text(lost[part])} more of a step"
    batch = question.workload.rank_batch
    if part == "weights take" and parallel.pipeline > 1:
        idle = f", {parallel.pipeline - batch} of which idle at batch {batch}" if batch < parallel.pipeline else ""
        yield f"a token passes {parallel.pipeline} stages in turn{idle}"
    if part == "the KV cache takes" and parallel.data * parallel.pipeline > 1:
        yield "a sequence's KV is read by fewer GPUs"
    if parallel.expert and part == "weights take":
        yield "the busiest GPU has more than its share of activated experts"


def step_shares(question: Question, candidate: Candidate) -> StepShares:
    """Where a plain decode step of the plan goes."""
    machine, shape, engine = question.machine, question.shape, question.engine
    assert engine is not None
    step: EngineStep = _step(question, candidate)
    parts = dict.fromkeys(("weights", "kv", "messages", "other"), 0.0)
    for op, seconds in engine.rates.timed(shape, machine, step):
        kind = "messages" if op.kind in COLLECTIVES else {"linear": "weights", "attention": "kv"}.get(op.category)
        parts[kind or "other"] += 1e3 * float(np.asarray(seconds))
    return StepShares(*parts.values())


def _step(question: Question, candidate: Candidate) -> EngineStep:
    engine, plan = question.engine, candidate.plan
    assert engine is not None
    bits = 16 if plan.weights.target_bits == 16 else 8
    return engine.step(plan.workload, bits, engine.kv_dtype(plan))


def degree_lines(choices: Sequence[DegreeChoice]) -> Iterator[str]:
    """A line per choice, the chosen one first: degrees, time, memory of a GPU, why it lost, and a plan that differs."""
    for row in choices:
        figures = f"{time_text(row.tpot_ms)}, {size_text(row.peak_bytes)} a GPU, " if row.step else ""
        plan = f"{row.plan}, " if row.plan not in ("", choices[0].plan) else ""
        yield f"{row.parallel}: {plan}{figures}{row.verdict or 'chosen'}"
