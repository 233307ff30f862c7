"""Tables of layers on the host, from validate/results/offload_h200.json, beside what the shipped profile predicts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from readme_tables import result, table

from ridgeplan.planner.prediction import predict
from ridgeplan.planner.resolution import resolve

# The benchmark whose results these tables show is a program outside the package; it defines the plans of the rows.
sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from offload_bench import cliff_plans, limited_plans, selecting_plans

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


def specontext_placements() -> str:
    """A step of SpeContext over the length: layers leave one by one, those of the end are away, or all of them."""
    names = {"adaptive": "one by one", "static": "those of the end", "all": "all", "full_attention": "full attention"}
    rows = []
    for row in result(SPECONTEXT)["placements"]:
        cells = [
            cell
            for name in names
            for cell in (str(row[f"{name}_layers"]), f"{row[f'{name}_ms']:.1f}", f"{row[f'predicted_{name}_ms']:.1f}")
        ]
        rows.append((str(row["context"]), *cells))
    columns = [column for name in names.values() for column in (f"{name}: layers away", "ms", "predicted")]
    return table(("tokens", *columns), rows)


def specontext_generation() -> str:
    """A generation whose layers leave on the way, and the same without a limit."""
    rows = []
    for row in result(SPECONTEXT)["generation"]:
        moved = ", ".join(map(str, row["moved_at"])) or "none"
        equal = {None: "", True: "yes", False: "no"}[row["tokens_equal"]]
        times = _beside(f"{row['overlap']:.0%}", row["tpot_ms"], row["predicted_tpot_ms"])
        memory = f"{row['peak_memory_bytes'] / 1e9:.1f}", f"{row['predicted_peak_bytes'] / 1e9:.1f}"
        rows.append((row["row"], moved, *times, *memory, equal))
    columns = (
        "generation", "layers left at", "overlap", "ms per token", "predicted", "error", "peak, GB", "predicted",
        "tokens equal",
    )  # fmt: skip
    return table(columns, rows)


def specontext_table3() -> str:
    """SpeContext's Table 3 on this machine: decoding speed against full attention."""
    rows = []
    for row in result(SPECONTEXT)["table3"]:
        for name in ("specontext", "full attention"):
            speed = row[name]
            measured, predicted = speed["tokens_per_s"], speed["predicted_tokens_per_s"]
            layers = ", ".join(str(step["layers_on_host"]) for step in speed["steps"])
            error = f"{predicted / measured - 1:+.0%}"
            faster = f"{row['speedup']:.2f}x" if name == "specontext" else ""
            cells = str(speed["batch"]), layers, f"{measured:,.0f}", f"{predicted:,.0f}", error, faster
            rows.append((row["row"], name, *cells))
    columns = ("[in, out]", "target", "batch", "layers on the host", "tokens/s", "predicted", "error", "speedup")
    return table(columns, rows)


def _beside(*cells: Any) -> tuple[str, ...]:
    """Cells, of which the last two are what was measured and predicted in ms, and the error."""
    *others, measured_ms, predicted_ms = cells
    return *others, f"{measured_ms:.1f}", f"{predicted_ms:.1f}", f"{predicted_ms / measured_ms - 1:+.0%}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
