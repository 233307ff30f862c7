"""`ridgeplan explain`: where a plan's time and memory go, or what a word of the answers means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ridgeplan import planner
from ridgeplan.dashboards.cli.lazy_group import examples
from ridgeplan.dashboards.cli.options import SavedPlanFile, as_json, memory_utilization, options
from ridgeplan.dashboards.cli.output import print_json, wrapped
from ridgeplan.dashboards.cli.planning.options import memory_limit
from ridgeplan.planner import Plan, Prediction
from ridgeplan.planner.capacity import usable_bytes
from ridgeplan.planner.display.beside import beside_text, on_host_text
from ridgeplan.planner.display.weights_or_kv import weights_or_kv
from ridgeplan.planner.interface.glossary import SOURCE_WORDS
from ridgeplan.planner.interface.glossary import explain as meaning_of
from ridgeplan.planner.interface.quantities import size_text, time_text, tokens_text
from ridgeplan.planner.measured_quality import saved_rows
from ridgeplan.planner.prediction import predict_all
from ridgeplan.planner.presets import describe, preset_name
from ridgeplan.planner.quality import stated_losses
from ridgeplan.planner.support import Backend, as_loaded, unsupported
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.latency import Machine

LONGEST_OPERATIONS = 5


@click.command(
    epilog=examples("ridgeplan explain plan.json", "ridgeplan explain acceptance", "ridgeplan explain quantspec")
)
@click.argument("subject", metavar="PLAN.json|TERM", nargs=-1, required=True)
@options(memory_utilization, memory_limit, as_json)
def explain(subject: tuple[str, ...], memory_utilization: float, memory_limit: float | None, as_json: bool) -> None:
    """Where the time and the memory of the plan in a file go; or what a term, a preset or a source's word means."""
    word = " ".join(subject)
    if Path(word).suffix != ".json":
        told = meaning_of(word)
        print_json({"term": word, "meaning": told}) if as_json else click.echo(wrapped(told))
        return
    saved = SavedPlanFile().convert(word, None, None)
    shape, profile = saved.resolve()
    plan, held = saved.on(shape, profile), as_loaded(shape)
    usable = usable_bytes(profile.hardware.memory_bytes, memory_utilization, memory_limit)
    machine = replace(Machine.of(profile), memory_bytes=usable)
    plain, predicted = predict_all([planner.preset("autoregressive", plan.workload), plan], held, profile, machine)
    compared = predicted.against(plain)
    if as_json:
        print_json({"plan": plan.to_dict(), "predicted": compared.to_dict(), "baseline": plain.to_dict()})
        return
    missing = unsupported(plan, Backend.RIDGEPLAN, held, profile)
    click.echo("\n".join(map(wrapped, _lines(plan, compared, plain, held, usable, missing))))


def _lines(
    plan: Plan, predicted: Prediction, plain: Prediction, shape: ModelShape, usable_bytes: float, missing: str | None
) -> Iterator[str]:
    workload = plan.workload
    yield (
        f"{preset_name(plan)} for {workload.model} on {workload.hardware}, {tokens_text(workload.context)} tokens, "
        f"batch {workload.batch}, {tokens_text(workload.new_tokens)} new"
    )
    known, meaning = preset_name(plan), describe(plan)
    yield "  " + (f"it is {meaning}; " if known != meaning else "") + (missing or "it runs here")
    yield from _time(plan, predicted, plain)
    yield from (f"  {line}" for line in weights_or_kv(plain, shape, workload))
    yield from _memory(predicted, usable_bytes)
    for loss in stated_losses(plan, saved_rows()):
        yield f"  gives up: {loss}"
    yield f"  figures are {predicted.source}: {SOURCE_WORDS[predicted.source]}"


def _time(plan: Plan, predicted: Prediction, plain: Prediction) -> Iterator[str]:
    """The arithmetic of a round, its parts, and the operations that take most of it."""
    best, low, high = predicted.best, predicted.low, predicted.high
    yield (
        f"Time: {time_text(best.tpot_ms)} per token of a request ({time_text(low.tpot_ms)} to "
        f"{time_text(high.tpot_ms)}), {predicted.speedup:.2f}x plain decoding's {time_text(plain.best.tpot_ms)}"
    )
    yield f"  a round takes {time_text(predicted.round_ms)} and yields {predicted.tokens_per_round:.2f} tokens:"
    for part, seconds in predicted.round_s.items():
        if seconds:
            drafts = f" ({predicted.gamma} x {time_text(predicted.draft_step_ms)})" if part == "draft" else ""
            yield f"    {part:<14}{time_text(1e3 * seconds):>10} {1e5 * seconds / predicted.round_ms:3.0f}%{drafts}"
    if plan.speculation.active:
        known = predicted.acceptance
        yield f"  acceptance {known.best:.3f} ({known.low:.3f} to {known.high:.3f}), {known.source}: {known.where}"
    target = sorted((op for op in predicted.breakdown if op.part == "target"), key=lambda op: -op.seconds)
    longest = ", ".join(f"{op.op} {time_text(1e3 * op.seconds)}" for op in target[:LONGEST_OPERATIONS])
    beside = beside_text(plan, predicted)
    yield f"  the target's pass: {longest}" + (f"; beside its operations {beside}" if beside else "")
    yield f"  first token{'s of the batch' if plan.workload.batch > 1 else ''} after {time_text(best.ttft_ms)}"


def _memory(predicted: Prediction, usable_bytes: float) -> Iterator[str]:
    peak = predicted.best.peak_memory_bytes
    fits = "" if peak <= usable_bytes else ": it does not fit"
    yield f"Memory: {size_text(peak)} of {size_text(usable_bytes)} that may be used{fits}"
    held: dict[str, Any] = predicted.memory_bytes
    parts = (f"{name.replace('_', ' ')} {size_text(value)}" for name, value in held.items() if value)
    yield f"  {', '.join(parts)}"
    if predicted.offloaded_layers:
        yield f"  {on_host_text(predicted)}"
