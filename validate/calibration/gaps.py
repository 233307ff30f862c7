"""What rounds take on a GPU beyond the sum of their kernels.

In a chain of one kernel, each call starts while the last one ends, and finds its code and parameters cached. Between
the different kernels of a pass that works less well; and a round has small operations that no class covers: positions
and slots, random numbers, the check that logits are finite, the results that the host reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import nnls

from ridgeplan.planner.plan import Plan, Workload
from ridgeplan.planner.prediction import predict
from ridgeplan.planner.presets import preset
from ridgeplan.roofline.catalog.profile import Profile, Rates, RowStep
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.latency import Machine
from ridgeplan.validate.calibration.samples import RoundSample
from ridgeplan.validate.random_rounds import RandomModel, measured_round

WORKLOADS = ((1800, 1), (7000, 3), (1800, 11))  # context, batch
PRESETS = ("autoregressive", "quantspec")
NEW_TOKENS = 256  # more than the timed rounds add
GAP_STEPS = (4, 8, 16)  # rows above which gaps may be longer: kernels of libraries start later than this package's


@dataclass(frozen=True)
class Unexplained:
    """Measured minus predicted seconds of a draft step, a target step and the rest of a round, of a model."""

    layers: int
    batch: int
    queries: int  # of the target's pass
    draft_s: float | None  # None without drafts
    target_s: float
    round_s: float

    @classmethod
    def of(cls, measured: RoundSample, shape: ModelShape, profile: Profile) -> Unexplained:
        """Of a measured round of a model."""
        plan = _plan(shape, profile, measured.preset, measured.context, measured.batch, measured.tokens)
        predicted = predict(plan, shape, profile)
        draft_s = measured.draft_s - 1e-3 * predicted.draft_step_ms if plan.speculation.gamma else None
        target_s = measured.target_s - 1e-3 * predicted.target_step_ms
        sizes = shape.layers, measured.batch, plan.speculation.gamma + 1
        return cls(*sizes, draft_s, target_s, measured.rest_s)


def measured_rounds(profile: Profile, shapes: Sequence[ModelShape], device: torch.device) -> list[RoundSample]:
    """Rounds of models of `shapes` on this machine."""
    return [one for index, shape in enumerate(shapes) for one in _rounds(index, shape, profile, device)]


def with_fitted_gaps(profile: Profile, shapes: Sequence[ModelShape], rounds: Sequence[RoundSample]) -> Profile:
    """`profile` with the gaps of whole rounds on models of `shapes`, which must differ in layers."""
    kernels = {kind: rates for kind, rates in profile.classes.items() if kind != "gap"}
    profile = replace(profile, classes=kernels, draft_gap_s=0.0, target_gap_s=0.0, round_s=0.0)
    found = [Unexplained.of(one, shapes[one.model], profile) for one in rounds]
    fitted = fit_gaps(found)
    round_s = float(np.median([item.round_s for item in found]))
    classes = {**profile.classes, "gap": fitted.layer}
    return replace(profile, classes=classes, draft_gap_s=fitted.draft_s, target_gap_s=fitted.target_s, round_s=round_s)


@dataclass(frozen=True)
class Gaps:
    """What a draft's pass and the target's take beyond their layers, and each layer beyond its kernels."""

    draft_s: float
    target_s: float
    layer: Rates


def fit_gaps(found: Sequence[Unexplained]) -> Gaps:
    """Least squares; a layer's gap grows in steps of rows, and nothing is negative."""
    rows = [(item, 0.0, item.batch * item.queries, item.target_s) for item in found]
    rows += [(item, 1.0, item.batch, item.draft_s) for item in found if item.draft_s is not None]
    table = [
        (drafting, 1 - drafting, item.layers, *(item.layers * (count > above) for above in GAP_STEPS))
        for item, drafting, count, _ in rows
    ]
    (draft_s, target_s, first, *more), _ = nnls(np.array(table, float), np.array([seconds for *_, seconds in rows]))
    steps = [RowStep(above, float(extra)) for above, extra in zip(GAP_STEPS, more, strict=True) if extra]
    layer = Rates(1.0, 1.0, float(first), 0.0, steps=tuple(steps))
    return Gaps(float(draft_s), float(target_s), layer)


def _rounds(index: int, shape: ModelShape, profile: Profile, device: torch.device) -> Iterator[RoundSample]:
    model = RandomModel.build(shape, device, Machine.of(profile))
    for context, batch in WORKLOADS:
        for name in PRESETS:
            times = measured_round(model, _plan(shape, profile, name, context, batch, NEW_TOKENS))
            rest_s = times.keep_s + times.idle_s
            yield RoundSample(index, name, context, batch, times.grown, times.draft_s, times.verify_s, rest_s)


def _plan(shape: ModelShape, profile: Profile, name: str, context: int, batch: int, new_tokens: int) -> Plan:
    return preset(name, Workload(shape.name, profile.hardware.name, context, new_tokens, batch))
