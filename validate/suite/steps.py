"""Steps: a plain step, a draft step and a verification of whole models, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ridgeplan.planner.plan import Plan
from ridgeplan.planner.prediction import predict
from ridgeplan.planner.presets import preset_name
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.validate.random_rounds import RandomModel, RoundTimes, measured_round
from ridgeplan.validate.suite.results import SuiteRow

METHOD = (
    "Random weights of the whole model in the shape's own layers; the cache is filled with random values. Medians of "
    "rounds after two that warm up, each part timed by the device's clock inside the captured graph, on a CPU by the "
    "host's. A step includes the sampling of its tokens. 4-bit draft layers are copies of one."
)
NEW_TOKENS = 256  # more than the timed rounds can add


def step_rows(model: RandomModel, plan: Plan, profile: Profile) -> Iterator[SuiteRow]:
    """The rows of one plan's round, in milliseconds."""
    yield from rows_of(plan, model, profile, measured_round(model, plan))


def rows_of(plan: Plan, model: RandomModel, profile: Profile, times: RoundTimes) -> Iterator[SuiteRow]:
    """A plain step, or a draft step and a verification, beside the prediction for the tokens that were there."""
    ran = replace(plan, workload=replace(plan.workload, new_tokens=times.grown))
    predicted = predict(ran, model.shape, profile)
    target_ms = predicted.target_step_ms
    pairs = {"verification": (target_ms, times.verify_s), "draft step": (predicted.draft_step_ms, times.draft_s)}
    if not predicted.gamma:
        pairs = {"plain step": (target_ms, times.verify_s)}
    for kind, (predicted_ms, seconds) in pairs.items():
        yield SuiteRow(
            section="steps",
            kind=kind,
            model=model.shape.name,
            case=case_text(plan),
            unit="ms",
            predicted=predicted_ms,
            measured=1e3 * seconds,
            source=profile.source,
        )


def case_text(plan: Plan) -> str:
    """A plan and its workload in a few words."""
    workload, gamma = plan.workload, plan.speculation.gamma
    named = f"{preset_name(plan)}, gamma {gamma}" if gamma else preset_name(plan)
    return f"{named}, {workload.context} tokens, batch {workload.batch}"
