"""Tables of layers on the host, beside what the shipped profile predicts.

From offload_h200.json and specontext_h200.json of validate/results; the latter may lack sections.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from readme_tables import result, table

from ridgeplan.planner.prediction import predict
from ridgeplan.planner.resolution import resolve

# The benchmark whose results these tables show is a program outside the package; it defines the plans of the rows.
sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from offload_bench import cliff_plans, limited_plans, selecting_plans
from specontext_bench import Setting, Sizes, SpeContextBench

MODEL, GPU, RESULT, SPECONTEXT = "Llama-3.1-8B", "h200", "offload_h200", "specontext_h200"
OVERLAPS = ("0.9", "0.8", "0")


def streamed_rounds() -> str:
    """Rounds of targets that read everything, slowest first, per token at the predicted acceptance."""
    shape, profile = resolve(MODEL, GPU)
    plans, rows = limited_plans(shape.name), []
    for row in sorted(result(RESULT)["rounds"], key=lambda row: -row["tpot_ms_at_predicted_acceptance"]):
        prediction = predict(plans[row["row"]], shape, profile)
        measured_ms = row["round_ms"] / prediction.tokens_per_round
        rows.append(_beside(row["row"], str(row["host_layers"]), measured_ms, prediction.best.tpot_ms))
    return table(("plan", "layers on the host", "ms a token", "predicted", "error"), rows)


def elastic_steps() -> str:
    """Steps of targets that read a selection, at every share of it that the step before had chosen too."""
    shape, profile = resolve(MODEL, GPU)
    plans, rows = selecting_plans(shape.name), []
    for row in result(RESULT)["elastic"]:
        for overlap in OVERLAPS:
            step = row.get(f"overlap {overlap}")
            if step is None:
                continue
            prediction = predict(plans[row["row"]], shape, profile, float(overlap))
            name = row["row"].removesuffix(", not elastic")
            loads = f"{step['loads_alone_ms']:.1f}", f"{step['link_gb_s']:.0f}", _share(step["hidden_share"])
            times = _beside(f"{float(overlap):.0%}", *loads, step["tpot_ms"], prediction.best.tpot_ms)
            rows.append((name, str(row["host_layers"]), *times))
    columns = (
        "choice by", "layers on the host", "overlap", "loads alone, ms", "link, GB/s", "hidden", "a step, ms",
        "predicted", "error",
    )  # fmt: skip
    return table(columns, sorted(rows, key=lambda row: row[0], reverse=True))


def cliff_predicted() -> str:
    """Time per token where layers leave for the host."""
    shape, profile = resolve(MODEL, GPU)
    rows = []
    for row in result(RESULT)["cliff"]:
        plans = cliff_plans(shape, profile, row["context"])
        times = zip((row["adaptive_ms"], row["static_ms"]), plans, strict=True)
        cells = (
            f"{ms:.1f}" for measured, plan in times for ms in (measured, predict(plan, shape, profile).best.tpot_ms)
        )
        rows.append((str(row["context"]), str(row["host_layers"]), *cells))
    columns = ("context", "layers on the host", "as many as must: ms", "predicted", "all: ms", "predicted")
    return table(columns, rows)


@cache
def _specontext() -> SpeContextBench:
    """The plans of specontext_bench.py, and predictions of its steps by the shipped profile."""
    settings = (Setting(*resolve(model, GPU), torch.device("cpu"), True) for model in ("Llama-3.2-1B", MODEL))
    return SpeContextBench(*settings, Sizes())


def _of_section(section: str, table_of: Callable[[list[dict[str, Any]]], str]) -> str:
    """A table of a section's rows, or which command measures them.

    Rows of generations whose windows mix steps with different layers on the host are of an earlier runtime.
    """
    rows = [
        row
        for row in result(SPECONTEXT).get(section, ())
        if all("steps" in window for window in row.get("windows", ()))
    ]
    if not rows:
        command = f"python scripts/specontext_bench.py validate/results/{SPECONTEXT}.json --only {section}"
        return f"Not measured yet; `{command}` does on an H200."
    return table_of(rows)


def specontext_placements() -> str:
    """A step of SpeContext over the length: layers leave one by one, those of the end are away, or all of them."""
    return _of_section("placements", _placements)


def _placements(measured: list[dict[str, Any]]) -> str:
    names = {"adaptive": "one by one", "static": "those of the end", "all": "all", "full_attention": "full attention"}
    bench, rows = _specontext(), []
    full = bench.full_attention
    for row in measured:
        cells = []
        for name in names:
            layers, plan = row[f"{name}_layers"], full if name == "full_attention" else bench.plan
            predicted_ms = bench.small.predicted_step_ms(plan, row["context"], layers)
            cells += [str(layers), f"{row[f'{name}_ms']:.1f}", f"{predicted_ms:.1f}"]
        rows.append((str(row["context"]), *cells))
    columns = [column for name in names.values() for column in (f"{name}: layers on the host", "ms", "predicted")]
    return table(("tokens", *columns), rows)


def specontext_steps(section: str) -> str:
    """Median steps of a generation whose layers leave on the way, and of the same without a limit."""
    return _of_section(section, lambda rows: _steps(rows, section))


def _steps(measured: list[dict[str, Any]], section: str) -> str:
    bench, rows = _specontext(), []
    setting = bench.setting(section)
    for row in measured:
        plan = bench.plans(section)[row["row"]]
        for window in row["windows"]:
            length = plan.workload.context + window["first"] + window["steps"] // 2
            layers, overlap = window["layers_on_host"], window["overlap"]
            predicted_ms = setting.predicted_step_ms(plan, length, layers, overlap or 0.0)
            rows.append(_beside(row["row"], str(length), str(layers), _share(overlap), window["step_ms"], predicted_ms))
    return table(("generation", "tokens", "layers on the host", "overlap", "a step, ms", "predicted", "error"), rows)


def specontext_generation(section: str) -> str:
    """The whole of these generations: where layers left, time per token with that, and peak memory."""
    return _of_section(section, lambda rows: _generation(rows, section))


def _generation(measured: list[dict[str, Any]], section: str) -> str:
    bench, rows = _specontext(), []
    setting = bench.setting(section)
    for row in measured:
        plan = bench.plans(section)[row["row"]]
        plan = replace(plan, placement=replace(plan.placement, memory_bytes=row["limit"]))
        prediction = predict(plan, setting.shape, setting.profile, row["overlap"] or None)
        moved = ", ".join(map(str, row["moved_at"])) or "none"
        layers = str(row["layers_on_host"])
        equal = {None: "", True: "yes", False: "no"}[row["tokens_equal"]]
        times = _beside(f"{row['overlap']:.0%}", _ms_per_token(row), prediction.best.tpot_ms)
        memory = (f"{held / 1e9:.1f}" for held in (row["peak_memory_bytes"], prediction.best.peak_memory_bytes))
        rows.append((row["row"], moved, layers, *times, *memory, equal))
    columns = (
        "generation", "layers left at", "on the host at the end", "overlap", "ms per token", "predicted", "error",
        "peak, GB", "predicted", "tokens equal",
    )  # fmt: skip
    return table(columns, rows)


def _ms_per_token(row: dict[str, Any]) -> float:
    """Of a whole generation: its steps as its reader saw them, and the time in which layers left."""
    windows = row["windows"]
    steps = sum(window["steps"] for window in windows)
    return (sum(window["mean_step_ms"] * window["steps"] for window in windows) + 1e3 * row["offload_s"]) / steps


def specontext_table3() -> str:
    """SpeContext's Table 3 on this machine: decoding speed against full attention."""
    return _of_section("table3", _table3)


def _table3(measured: list[dict[str, Any]]) -> str:
    bench, rows = _specontext(), []
    for row in measured:
        for name, plan in bench.compared(row["row"]).items():
            speed = row[name]
            predicted_ms = mean(
                bench.large.predicted_step_ms(plan, step["length"], step["layers_on_host"]) for step in speed["steps"]
            )
            tokens_per_s, predicted = speed["tokens_per_s"], 1e3 * speed["batch"] / predicted_ms
            layers = ", ".join(str(step["layers_on_host"]) for step in speed["steps"])
            faster = f"{row['speedup']:.2f}x" if name == "specontext" else ""
            speeds = f"{tokens_per_s:,.0f}", f"{predicted:,.0f}", f"{predicted / tokens_per_s - 1:+.0%}"
            rows.append((row["row"], name, str(speed["batch"]), layers, *speeds, faster))
    columns = ("[in, out]", "target", "batch", "layers on the host", "tokens/s", "predicted", "error", "speedup")
    return table(columns, rows)


def specontext_cliff() -> str:
    """Steps of SpeContext's selection where layers leave, beside placements decided before the generation."""
    return _of_section("placements", _cliff)


def _cliff(measured: list[dict[str, Any]]) -> str:
    rows = []
    for row in measured:
        times = (f"{row[f'{name}_ms']:.1f}" for name in ("adaptive", "static", "all", "full_attention"))
        rows.append((f"{row['context'] / 1024:.0f}k", str(row["adaptive_layers"]), *times))
    columns = (
        "tokens", "layers that must leave", "ms per token", "if those of the end were away from the start",
        "if all were", "full attention, which streams them",
    )  # fmt: skip
    return table(columns, rows)


def _beside(*cells: Any) -> tuple[str, ...]:
    """Cells, of which the last two are what was measured and predicted in ms, and the error."""
    *others, measured_ms, predicted_ms = cells
    return *others, f"{measured_ms:.1f}", f"{predicted_ms:.1f}", f"{predicted_ms / measured_ms - 1:+.0%}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
