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
from ridgeplan.validate.random_rounds import RandomModel, RoundTimes, measured_round

WORKLOADS = ((1800, 1), (7000, 3), (1800, 11))  # context, batch
PRESETS = ("autoregressive", "quantspec")
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
    def of(cls, model: RandomModel, plan: Plan, times: RoundTimes, profile: Profile) -> Unexplained:
        """Of a measured round."""
        ran = replace(plan, workload=replace(plan.workload, new_tokens=times.grown))
        predicted = predict(ran, model.shape, profile)
        target_s = 1e-3 * predicted.target_step_ms
        draft_s = times.draft_s - 1e-3 * predicted.draft_step_ms if times.gamma else None
        rest_s = times.keep_s + times.idle_s
        sizes = model.shape.layers, plan.workload.batch, times.gamma + 1
        return cls(*sizes, draft_s, times.verify_s - target_s, rest_s)


def with_gaps(profile: Profile, shapes: Sequence[ModelShape], device: torch.device) -> Profile:
    """`profile` with the gaps of whole rounds on models of `shapes`, which must differ in layers; as it is without."""
    if not shapes:
        return profile
    found = [item for shape in shapes for item in _unexplained(shape, profile, device)]
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


def _unexplained(shape: ModelShape, profile: Profile, device: torch.device) -> Iterator[Unexplained]:
    model = RandomModel.build(shape, device, Machine.of(profile))
    for context, batch in WORKLOADS:
        for name in PRESETS:
            plan = preset(name, Workload(shape.name, profile.hardware.name, context, 256, batch))
            yield Unexplained.of(model, plan, measured_round(model, plan), profile)
