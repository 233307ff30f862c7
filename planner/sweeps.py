"""A plan's figures as compiled functions of its hyperparameters, and the lengths at which layers are offloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.plan import Plan
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.placement import offload_thresholds
from ridgeplan.roofline.strategy import Strategy

if TYPE_CHECKING:
    from ridgeplan.roofline.symbolic.sweep import Sweep


def sweep(plan: Plan, shape: ModelShape, profile: Profile, figure: str, varying: Sequence[str]) -> Sweep:
    """`figure` (tpot_s, ttft_s, peak_bytes or tokens_per_round) of a plan as a function of the terms `varying`.

    These are fields of a `Strategy`, such as context, batch, gamma or acceptance; all others stay the plan's, so with
    another gamma or context acceptance does not change by itself. Raises ValueError for others.
    """
    from ridgeplan.roofline.symbolic.sweep import compile_sweep  # imports sympy, which nothing else here needs

    machine = Machine.of(profile)
    strategy, rates = _strategy(plan, shape, profile), rates_of(plan, shape, machine)
    return compile_sweep(figure, shape, machine, strategy, rates, varying)


def thresholds(plan: Plan, shape: ModelShape, profile: Profile) -> tuple[int, ...]:
    """Sequence lengths S_0..S_L of Algorithm 1 (SpeContext): from S_i on, more than i layers are offloaded."""
    reserved = plan.speculation.gamma + 1
    return offload_thresholds(shape, Machine.of(profile), _strategy(plan, shape, profile), reserved)


@dataclass(frozen=True)
class PlacementTimes:
    """Milliseconds per token over the context: with as many layers on the host as must be, and with all once one must.

    The latter lose most of their speed to a slightly longer context (SpeContext, section 6.1). host_layers: the
    former's.
    """

    contexts: tuple[int, ...]
    host_layers: tuple[int, ...]
    adaptive_ms: tuple[float, ...]
    static_ms: tuple[float, ...]


def placement_times(plan: Plan, shape: ModelShape, profile: Profile, contexts: Sequence[int]) -> PlacementTimes:
    """Predicted times of a plan that may offload, at prompts of these lengths."""
    machine = Machine.of(profile)
    strategy = replace(_strategy(plan, shape, profile), context=np.array(contexts, dtype=float))
    rates = rates_of(plan, shape, machine)
    adaptive, static = (evaluate(shape, machine, replace(strategy, offload_all=every), rates) for every in (0, 1))
    times = (tuple((1e3 * np.broadcast_to(one.tpot_s, len(contexts))).tolist()) for one in (adaptive, static))
    layers = np.broadcast_to(np.asarray(adaptive.offloaded_layers, dtype=int), len(contexts))
    return PlacementTimes(tuple(contexts), tuple(layers.tolist()), *times)


def _strategy(plan: Plan, shape: ModelShape, profile: Profile) -> Strategy:
    acceptance = AcceptanceModel.of_profile(shape, plan.workload.context, profile).of(plan).best
    return strategy_of(plan, shape, Machine.of(profile), acceptance)
