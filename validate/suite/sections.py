"""Sections of the suite that need no real model: kernels, steps of random models, and regret.

Every candidate's round is measured on the whole model. The tokens that a round yields are the planner's own estimate,
the same for prediction and measurement, so that regret tells how well plans are ranked by their costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import torch

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.prediction import Prediction, predict, predict_all
from ridgeplan.planner.quality import Quality, quality_of
from ridgeplan.planner.recommend import recommend
from ridgeplan.planner.recommendation import Recommendation
from ridgeplan.planner.search import families
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import ROUTER_S, Profile
from ridgeplan.roofline.execution import rate_rows
from ridgeplan.roofline.latency import INTEGER, Machine
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import PRESETS, family_key, preset_name
from ridgeplan.roofline.plan.support import only_estimated
from ridgeplan.runtime.progress import OnProgress
from ridgeplan.validate.calibration.calls import bench_for, class_calls
from ridgeplan.validate.calibration.noise import steady_reading
from ridgeplan.validate.calibration.sizes import Suite
from ridgeplan.validate.random_model import RandomModel, RoundTimes, measured_round, random_cache
from ridgeplan.validate.suite.report import RegretRow, SuiteRow
from ridgeplan.validate.timing import KernelCall

KERNELS_METHOD = (
    "Each kernel as the runtime calls it, on inputs larger than the caches; the fastest of two readings or more, two "
    "of which agree within 10%. Predicted by the rates of its class."
)


DRAFT_STEP = "draft step"


def predicted_seconds(call: KernelCall, machine: Machine) -> float:
    """Seconds of a call by the cost model, at the rates of its class; of experts without their router."""
    kind = call.kind if call.kind in machine.rates else call.kind.removesuffix(INTEGER)
    rates = machine.rates[kind].at_rows(rate_rows(call.kind, call.rows, call.width, call.depth))
    router_s = ROUTER_S if kind.startswith("grouped") else 0
    return float(machine.seconds(call.cost, rates, call.width, call.depth, call.tiles)) - router_s


@torch.inference_mode()
def kernel_rows(profile: Profile, device: torch.device, sizes: Suite, on_progress: OnProgress) -> Iterator[SuiteRow]:
    """A row for every kernel call of `sizes`, in microseconds."""
    machine, bench = Machine.of(profile), bench_for(device, sizes)
    classes = class_calls(bench, sizes, profile.hardware.num_sms)
    for done, (kind, calls) in enumerate(classes.items()):
        on_progress(kind, done, len(classes))
        for call in calls:
            measured_us = 1e6 * steady_reading(partial(bench.readings, call)).seconds
            predicted_us, source = 1e6 * predicted_seconds(call, machine), profile.rates(kind).source
            yield SuiteRow(
                section="kernels", kind=kind, case=call.name, unit="us", predicted=predicted_us, measured=measured_us,
                source=source,
            )  # fmt: skip


STEPS_METHOD = (
    "Random weights of the whole model in the shape's own layers; the cache is filled with random values. Medians of "
    "rounds after two that warm up, each part timed by the device's clock inside the captured graph, on a CPU by the "
    "host's. A step includes the sampling of its tokens. 4-bit draft layers are copies of one."
)
OUTPUT_POINTS = (0.25, 0.75)  # of an output: the middles of its halves
OUTPUTS_METHOD = (
    "Time per token over a whole output after its prompt: the mean of steps in the middle of each half of the output, "
    "with random weights as in steps. Selections that keep generated tokens whole read them beside their budget. "
    "Predicted: the mean over the output."
)
NEW_TOKENS = 256  # more than the timed rounds can add


def rows_of(plan: Plan, model: RandomModel, profile: Profile, times: RoundTimes) -> Iterator[SuiteRow]:
    """A plain step, or a draft step and a verification, in milliseconds, and the prediction for the same lengths."""
    for kind, predicted_ms in predicted_parts(plan, model.shape, profile, times.grown).items():
        seconds = times.draft_s if kind == DRAFT_STEP else times.verify_s
        yield plan_row("steps", plan, kind, "ms", predicted_ms, 1e3 * seconds, profile.source)


def predicted_parts(plan: Plan, shape: ModelShape, profile: Profile, grown: int) -> dict[str, float]:
    """Milliseconds of a plain step, or of a verification and a draft step, while a sequence gains `grown` tokens."""
    ran = replace(plan, workload=replace(plan.workload, new_tokens=grown))
    predicted = predict(ran, shape, profile)
    if not predicted.gamma:
        return {"plain step": predicted.target_step_ms}
    return {"verification": predicted.target_step_ms, DRAFT_STEP: predicted.draft_step_ms}


def output_row(plan: Plan, model: RandomModel, profile: Profile) -> SuiteRow:
    """The row of a plan without drafts over the output of its workload. Raises BusyMachine."""
    predicted_ms = predict(plan, model.shape, profile).best.tpot_ms
    seconds = [
        measured_round(model, plan, random_cache(model, plan, int(share * plan.workload.new_tokens))).total_s
        for share in OUTPUT_POINTS
    ]
    return SuiteRow(
        section="outputs", kind="time per token of an output", model=model.shape.name, case=output_text(plan),
        unit="ms", predicted=predicted_ms, measured=1e3 * fmean(seconds), source=profile.source,
    )  # fmt: skip


def output_text(plan: Plan) -> str:
    """A plan and the lengths of its prompt and output in a few words."""
    workload = plan.workload
    return f"{preset_name(plan)}, {workload.context} in {workload.new_tokens} out, batch {workload.batch}"


def plan_row(
    section: str, plan: Plan, kind: str, unit: str, predicted: float, measured: float, source: str
) -> SuiteRow:
    """The row of a figure of a plan."""
    return SuiteRow(
        section=section, kind=kind, model=plan.workload.model, case=case_text(plan), unit=unit, predicted=predicted,
        measured=measured, source=source,
    )  # fmt: skip


def case_text(plan: Plan) -> str:
    """A plan and its workload in a few words."""
    workload, gamma = plan.workload, plan.speculation.gamma
    named = f"{preset_name(plan)}, gamma {gamma}" if gamma else preset_name(plan)
    return f"{named}, {workload.context} tokens, batch {workload.batch}"


NEAR_BEST = 1.2  # candidates up to this much slower than the best, as predicted, are measured
QUALITY = Quality.NEAR_LOSSLESS  # the default of `recommend`
REGRET_METHOD = (
    "Measured time per token of the recommended plan over the best measured of all executable candidates of the same "
    f"quality that are predicted within {NEAR_BEST - 1:.0%} of the best, and the presets, "
    "minus 1. Where they are more than the suite measures, the best of each family and the fastest are taken and the "
    "rest is counted. Rounds as "
    "in steps, all layers, without flushes; tokens per round are the planner's estimate for prediction and measurement "
    "alike, and, where a real model is given, also those at the acceptance measured of its drafts of the same kind."
)


@dataclass(frozen=True)
class RegretCandidate:
    """A plan that might be recommended, with its prediction."""

    plan: Plan
    predicted: Prediction

    @property
    def tpot_ms(self) -> float:
        """Predicted time per token."""
        return self.predicted.best.tpot_ms

    @property
    def family(self) -> tuple[object, ...]:
        """What it shares with plans of other gammas and ratios."""
        return family_key(self.plan)


def regret_row(
    model: RandomModel,
    profile: Profile,
    context: int,
    batch: int,
    max_candidates: int,
    function: ModelShape | None = None,
) -> RegretRow:
    """Measures the candidates of one workload, at most `max_candidates` beside those that are always measured.

    function: a real model, whose measured acceptance candidates have, too.

    Raises NothingFits where none fits into the model's memory, and BusyMachine.
    """
    answer = recommend(
        model.shape, "auto", context, batch=batch, new_tokens=NEW_TOKENS, quality=QUALITY.value, profile=profile,
        yarn=True, memory_limit=float(model.machine.memory_bytes),
    )  # fmt: skip
    ranked = candidates(answer, model.shape, profile, model)
    chosen, left_out = to_measure(ranked, answer.plan, max_candidates)
    measured_ms = {candidate.plan: _measured_ms(model, candidate) for candidate in chosen}
    known = None if function is None else AcceptanceModel.of_profile(function, context, profile)
    return row_of(answer.plan, chosen, measured_ms, left_out, known)


def row_of(
    recommended: Plan,
    chosen: Sequence[RegretCandidate],
    measured_ms: dict[Plan, float],
    left_out: int,
    known: AcceptanceModel | None = None,
) -> RegretRow:
    """The row of measured candidates, of which `recommended` is one. known: acceptance of a real model's drafts."""
    best = min(measured_ms, key=lambda plan: measured_ms[plan])
    workload = recommended.workload
    return RegretRow(
        model=workload.model,
        context=workload.context,
        batch=workload.batch,
        recommended=case_text(recommended),
        recommended_ms=measured_ms[recommended],
        best=case_text(best),
        best_ms=measured_ms[best],
        left_out=left_out,
        candidates=tuple(
            {
                "plan": preset_name(candidate.plan),
                "gamma": candidate.predicted.gamma,
                "acceptance": candidate.predicted.acceptance.best,
                **_measured_acceptance(known, candidate.plan),
                "predicted_ms": candidate.tpot_ms,
                "measured_ms": measured_ms[candidate.plan],
            }
            for candidate in chosen
        ),
    )


def _measured_acceptance(known: AcceptanceModel | None, plan: Plan) -> dict[str, float]:
    measured = None if known is None else known.measured(plan)
    return {} if measured is None else {"measured_acceptance": measured}


def candidates(
    answer: Recommendation, shape: ModelShape, profile: Profile, model: RandomModel
) -> list[RegretCandidate]:
    """All executable plans of the allowed quality that fit, the fastest first as predicted; each once."""
    fitting = model.fitting(list(dict.fromkeys((answer.plan, *_executable(answer.plan.workload, shape)))))
    ranked = map(RegretCandidate, fitting, predict_all(fitting, shape, profile))
    return sorted(ranked, key=lambda candidate: candidate.tpot_ms)


def _executable(workload: Workload, shape: ModelShape) -> Iterator[Plan]:
    """The presets, then every point of the search space."""
    grids = (
        family.plan(gamma, ratio)
        for family in families(workload, offload=False)
        for gamma in family.gammas
        for ratio in family.ratios
    )
    for plan in (*_presets(workload), *grids):
        if not only_estimated(plan, shape) and QUALITY.allows(quality_of(plan)):
            yield plan


def _presets(workload: Workload) -> list[Plan]:
    return [make(workload) for make in PRESETS.values()]


def to_measure(
    ranked: Sequence[RegretCandidate], recommended: Plan, max_candidates: int
) -> tuple[list[RegretCandidate], int]:
    """The candidates to measure, and the number of those near the best that are left out.

    ranked: the fastest first. max_candidates: of those near the best, beside the best of each family there. The
    recommended plan and the presets are always measured.
    """
    named = {recommended, *_presets(recommended.workload)}
    near = [candidate for candidate in ranked if candidate.tpot_ms <= NEAR_BEST * ranked[0].tpot_ms]
    best_of_family = {candidate.family: candidate for candidate in reversed(near)}
    always = [
        candidate
        for candidate in ranked
        if candidate.plan in named or best_of_family.get(candidate.family) is candidate
    ]
    others = [candidate for candidate in near if candidate not in always]
    return always + others[:max_candidates], max(0, len(others) - max_candidates)


def _measured_ms(model: RandomModel, candidate: RegretCandidate) -> float:
    """Time per token of a measured round at the predicted tokens per round."""
    return 1e3 * measured_round(model, candidate.plan).total_s / candidate.predicted.tokens_per_round
