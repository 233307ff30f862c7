"""Scales of a CPU's kernel classes, from whole rounds and prompts.

Calibration keeps the fastest readings of each kernel, called in a row. In a round, different kernels follow each other
and wait for all cores, and programs that never end slow them, too. Whole rounds of a model say what they take there.
Each class is scaled as a whole, so its fit over sizes stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from ridgeplan.planner.prediction import Prediction, predict_all
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import MAX_SPREAD, MAX_UTILIZATION, Profile, Rates
from ridgeplan.roofline.latency import STEPPED_PARTS
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.validate.calibration.fit import RoundSample
from ridgeplan.validate.calibration.noise import QUICK_AGREEMENT

STIFFNESS = 0.3  # weight of a scale's distance from 1 beside the error of a measured part, both as logarithms
SLOWED = 0.5  # scale below which a class's readings were slowed: no call takes half as long in a round
LARGEST = 50.0  # scale; the smallest is its inverse


def round_plan(sample: RoundSample, shape: ModelShape, profile: Profile) -> Plan:
    """The plan of a round, for a model of `shape` on the profile's machine."""
    workload = Workload(shape.name, profile.hardware.name, sample.context, sample.tokens, sample.batch)
    return preset(sample.preset, workload)


def fitted_scales(profile: Profile, shapes: Sequence[ModelShape], rounds: Sequence[RoundSample]) -> dict[str, float]:
    """How much longer each class takes in `rounds` on models of `shapes` than `profile` says.

    Least squares of the logarithms of draft steps, target steps and prompts. Scales are drawn to 1, so the classes that
    take most of the time change most. Classes that no round runs are not among them.
    """
    if not rounds:
        return {}
    predictions = _predicted(profile, shapes, rounds)
    kinds = sorted({op.kind for predicted in predictions for op in predicted.breakdown} - {"gap"})
    measured_s = np.array([(sample.draft_s, sample.target_s, sample.prefill_s) for sample in rounds])
    timed = _undisturbed(measured_s / _seconds(predictions), [sample.preset for sample in rounds])

    def distances(logarithms: np.ndarray) -> np.ndarray:
        scales = dict(zip(kinds, np.exp(logarithms), strict=True))
        predicted_s = _seconds(_predicted(with_scales(profile, scales), shapes, rounds))
        return np.concatenate([np.log(predicted_s[timed] / measured_s[timed]), STIFFNESS * logarithms])

    limit = math.log(LARGEST)
    fit = least_squares(distances, np.zeros(len(kinds)), bounds=(-limit, limit), xtol=1e-3, ftol=1e-3)
    return {kind: math.exp(logarithm) for kind, logarithm in zip(kinds, fit.x, strict=True)}


def with_scales(profile: Profile, scales: Mapping[str, float]) -> Profile:
    """`profile` whose classes take `scales` times as long, also those for which a related class stood."""
    changed = {kind: scaled(profile.rates(kind), scale) for kind, scale in scales.items()}
    return replace(profile, classes={**profile.classes, **changed})


def scaled(rates: Rates, scale: float) -> Rates:
    """Rates whose calls take `scale` times as long.

    Half of the scale's logarithm joins the spread, as the scale may be another at other sizes.
    """

    def times(part: object) -> dict[str, Any]:
        return {name: scale * getattr(part, name) for name in STEPPED_PARTS}

    return replace(
        rates,
        bandwidth_utilization=min(rates.bandwidth_utilization / scale, MAX_UTILIZATION),
        compute_utilization=min(rates.compute_utilization / scale, MAX_UTILIZATION),
        spread=min(math.hypot(rates.spread, math.log(scale) / 2), MAX_SPREAD),
        steps=tuple(
            replace(step, inverse_utilization=scale * step.inverse_utilization, **times(step)) for step in rates.steps
        ),
        **times(rates),
    )


def _undisturbed(ratios: np.ndarray, presets: Sequence[str]) -> np.ndarray:
    """Which parts count, by their measured times over the predicted ones, [rounds, parts]; 0 is a part without a time.

    Other programs only add time, so of a preset's rounds those count that are within QUICK_AGREEMENT of the fastest.
    """
    timed = ratios > 0
    same = np.array(presets)[:, None] == np.array(presets)
    fastest = np.where(same[:, :, None] & timed, ratios, np.inf).min(axis=1)
    return timed & (ratios <= (1 + QUICK_AGREEMENT) * fastest)


def _seconds(predictions: Sequence[Prediction]) -> np.ndarray:
    """Draft steps, target steps and prompts, [rounds, 3]; a plan without drafts has a draft step of 1 s."""
    times = [(each.draft_step_ms or 1e3, each.target_step_ms, each.best.ttft_ms) for each in predictions]
    return 1e-3 * np.array(times)


def _predicted(profile: Profile, shapes: Sequence[ModelShape], rounds: Sequence[RoundSample]) -> list[Prediction]:
    """Of each round; those of one model in one evaluation."""
    predictions: dict[RoundSample, Prediction] = {}
    for index, shape in enumerate(shapes):
        of_shape = [sample for sample in rounds if sample.model == index]
        plans = [round_plan(sample, shape, profile) for sample in of_shape]
        predictions |= zip(of_shape, predict_all(plans, shape, profile), strict=True)
    return [predictions[sample] for sample in rounds]
