"""Sweeps: the recommended plan at every point of a grid, and figures of one plan as compiled functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.quantities import count, time_text, tokens, values
from ridgeplan.planner.queries.maps import PlanMap, plan_map
from ridgeplan.planner.question import Question, SearchOptions, ask
from ridgeplan.planner.render.tables import Lines, Table
from ridgeplan.planner.resolution import longest_context
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import offload_thresholds
from ridgeplan.roofline.plan.plan import Plan, require
from ridgeplan.roofline.plan.presets import divided_name
from ridgeplan.roofline.strategy import Strategy

if TYPE_CHECKING:
    from ridgeplan.roofline.symbolic import Sweep


def sweep(plan: Plan, shape: ModelShape, profile: Profile, figure: str, varying: Sequence[str]) -> Sweep:
    """`figure` (tpot_s, ttft_s, peak_bytes or tokens_per_round) of a plan as a function of the terms `varying`.

    These are `TERM_NAMES` of a `Strategy`, such as context, batch, gamma or draft_ratio; all others stay the plan's, so
    another gamma or context does not change the acceptance. Raises ValueError for others.
    """
    from ridgeplan.roofline.symbolic import compile_sweep  # imports sympy, which nothing else here needs

    machine = Machine.of(profile)
    strategy, rates = _strategy(plan, shape, profile), rates_of(plan, shape, machine)
    return compile_sweep(figure, shape, machine, strategy, rates, varying)


def thresholds(plan: Plan, shape: ModelShape, profile: Profile) -> tuple[int, ...]:
    """Sequence lengths S_0..S_L of Algorithm 1 (SpeContext): from S_i on, more than i layers are offloaded."""
    reserved = plan.speculation.gamma + 1
    return offload_thresholds(shape, Machine.of(profile), _strategy(plan, shape, profile), reserved)


@dataclass(frozen=True)
class PlacementTimes:
    """Milliseconds per token over the context, with adaptive and with static offloading.

    adaptive_ms: as few layers as possible are on the host, `host_layers` of them. static_ms: all layers move to the
    host as soon as one must, which makes a slightly longer context much slower (SpeContext, section 6.1).
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
    adaptive, static = (
        evaluate(shape, machine, strategy.with_terms(offload_all_at_once=every), rates) for every in (0, 1)
    )
    times = (tuple((1e3 * np.broadcast_to(estimate.tpot_s, len(contexts))).tolist()) for estimate in (adaptive, static))
    layers = np.broadcast_to(np.asarray(adaptive.offloaded_layers, dtype=int), len(contexts))
    return PlacementTimes(tuple(contexts), tuple(layers.tolist()), *times)


def _strategy(plan: Plan, shape: ModelShape, profile: Profile) -> Strategy:
    acceptance = AcceptanceModel.of_profile(shape, plan.workload.context, profile).of(plan).best
    return strategy_of(plan, shape, Machine.of(profile), acceptance)


# Axes: SIZES share one evaluation and have parsers; TURNS need an evaluation for each value.
SIZES = {"ctx": tokens, "batch": count}
TURNS = ("new_tokens", "memory_limit", "gpu", "model", "preset", "quality", "backend", "kv_format")
SHOWN_TURNS = tuple(name for name in TURNS if name not in ("model", "gpu"))  # as columns of their own
AXES = (*SIZES, *TURNS)
MAX_POINTS = 100_000


# Of a row without an answer.
UNANSWERED: Mapping[str, Any] = {
    "plan": "", "gamma": None, "ratio": None, "fits": False, "tpot_ms": None, "ttft_request_ms": None,
    "ttft_ms": None, "tokens_per_s": None, "peak_memory_bytes": None, "speedup": None, "plain_fits": False,
}  # fmt: skip


@dataclass(frozen=True)
class SweepPoint:
    """The recommended plans of one question at all contexts and batches. columns: its values on the other axes.

    plans: at the contexts up to `longest`, beyond which the model cannot go; None if all are longer.
    """

    columns: Mapping[str, Any]
    question: Question
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    longest: int
    plans: PlanMap | None

    @property
    def beyond(self) -> str:
        """Why the longer contexts have no answer; "" where there are none."""
        stretch = "" if self.question.options.yarn else "; YaRN stretches it"
        return f"beyond the model's limit of {self.longest}{stretch}" if max(self.contexts) > self.longest else ""

    def all_notes(self) -> Iterator[str]:
        """Caveats of the question, and of contexts without an answer."""
        yield from self.question.notes()
        if self.beyond:
            yield f"{self.question.shape.name}: some contexts are {self.beyond}"

    def rows(self) -> Iterator[dict[str, Any]]:
        """A flat row per context and batch."""
        rows = {} if self.plans is None else {context: row for row, context in enumerate(self.plans.contexts)}
        for context in self.contexts:
            for column, batch in enumerate(self.batches):
                yield {
                    **self.columns, "model": self.question.shape.name, "gpu": self.question.profile.hardware.name,
                    "context": context, "batch": batch, **self._figures(rows.get(context), column),
                }  # fmt: skip

    def _figures(self, row: int | None, column: int) -> dict[str, Any]:
        plans, batch = self.plans, self.batches[column]
        if plans is None or row is None:
            return {**UNANSWERED, "why_not": self.beyond}
        at = row, column
        tpot_s, fits = float(plans.tpot_s[at]), bool(plans.fits[at])
        return {
            "plan": divided_name(plans.names[at], plans.plan(*at)), "gamma": int(plans.gamma[at]),
            "ratio": float(plans.ratio[at]), "fits": fits,
            "tpot_ms": 1e3 * tpot_s, "ttft_request_ms": 1e3 * float(plans.request_ttft_s[at]),
            "ttft_ms": 1e3 * float(plans.ttft_s[at]), "tokens_per_s": batch / tpot_s,
            "peak_memory_bytes": float(plans.peak_bytes[at]), "speedup": float(plans.plain_tpot_s[at]) / tpot_s,
            "plain_fits": bool(plans.plain_fits[at]), "why_not": "" if fits else "does not fit",
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class GridSweep(Table):
    """All points of a sweep. ttft_ms is that of the batch's last request, tokens/s the whole batch's."""

    points: tuple[SweepPoint, ...]

    chart = Lines(("context", "batch"), "tpot_ms", "ms per token", ("model", "gpu", *SHOWN_TURNS))

    def summary(self) -> str:
        """How many questions were answered, and the span of what fits, in one line."""
        rows = self.table()
        times = [row["tpot_ms"] for row in rows if row["fits"]]
        span = f", {time_text(min(times))} to {time_text(max(times))} per token" if times else ""
        return f"{len(rows)} questions, {len(times)} fit{span}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of the models and machines that were asked for, and of contexts that have no answer."""
        notes = (note for point in self.points for note in point.all_notes())
        return tuple(dict.fromkeys(notes))

    def table(self) -> list[dict[str, Any]]:
        """A flat row per question, for CSV and data frames."""
        return [row for point in self.points for row in point.rows()]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"rows": self.table(), "notes": list(self.notes)}


def grid_sweep(
    model: str,
    gpu: str,
    over: Mapping[str, Sequence[Any]],
    *,
    context: int | str = 8192,
    preset: str | None = None,
    options: SearchOptions | None = None,
    **changes: Any,
) -> GridSweep:
    """The recommended plan at every point; `over` names axes of `AXES` with their values.

    What does not vary is as given; options are those of `recommend`. Contexts beyond a model's limit have rows that say
    so, and no figures. Plans are chosen as by `recommend`. Raises PlanError, and as `recommend` does.
    """
    unknown = [name for name in over if name not in AXES]
    require(not unknown, f"unknown axis {', '.join(unknown)}; allowed: {', '.join(AXES)}")
    options = SearchOptions.of(options, changes)
    contexts, batches = tuple(over.get("ctx", (tokens(context),))), tuple(over.get("batch", (options.batch,)))
    turns = {name: values for name, values in over.items() if name not in SIZES}
    count = math.prod(map(len, turns.values())) * len(contexts) * len(batches)
    require(count <= MAX_POINTS, f"the grid has {count} points; allowed: up to {MAX_POINTS}")
    fixed = {"model": model, "gpu": gpu, "preset": preset}
    points = tuple(
        _point(dict(zip(turns, values, strict=True)), fixed, options, contexts, batches)
        for values in product(*turns.values())
    )
    require(any(point.plans for point in points), f"every context is {points[0].beyond}")
    return GridSweep(points)


def parse_axes(text: str) -> dict[str, tuple[Any, ...]]:
    """Axes with their values: "ctx=4k..1M,batch=1,4,16,gpu=h100,h200". Raises PlanError.

    Commas stand between values and between axes; a piece without "=" belongs to the axis before it.
    """
    pieces: dict[str, list[str]] = {}
    name = ""
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = piece.partition("=")
        if equals:
            name = key.strip().replace("-", "_")
            require(name in AXES and name not in pieces, f"axis {key!r}; allowed: each of {', '.join(AXES)} once")
        require(
            bool(name) and bool(value if equals else key), f"{text!r} is not a grid; allowed: ctx=4k..1M,batch=1..64"
        )
        pieces.setdefault(name, []).append(value.strip() if equals else key)
    require(bool(pieces), "no axis; allowed: such as ctx=4k..1M,batch=1..64")
    parsers = SIZES | {"new_tokens": tokens}
    return {
        name: values(",".join(texts), parsers[name]) if name in parsers else tuple(dict.fromkeys(texts))
        for name, texts in pieces.items()
    }


def _point(
    turn: dict[str, Any], fixed: dict[str, Any], options: SearchOptions, contexts: tuple[int, ...],
    batches: tuple[int, ...],
) -> SweepPoint:  # fmt: skip
    values = fixed | turn
    model, gpu, preset = (values.pop(name) for name in fixed)
    question = ask(model, gpu, 1, options, batch=1, **values)
    longest = longest_context(question.shape, question.options.new_tokens, yarn=question.options.yarn)
    within = [context for context in contexts if context <= longest]
    plans = plan_map(question, within, batches, preset) if within else None
    columns = {name: value for name, value in turn.items() if name in SHOWN_TURNS}
    return SweepPoint(columns, question, contexts, batches, longest, plans)
