"""Time per token where layers leave for the host: one by one, or all at once (SpeContext, section 6.1).

Predicted for this package's own plans; measured by `python -m ridgeplan.validate.decode_bench.offload --only cliff`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ridgeplan.dashboards.figures.paper_figure import FigureError, PaperFigure, Row, Slider, gpu_slider
from ridgeplan.dashboards.figures.style import COLORS, styled, tokens_axis
from ridgeplan.planner import resolve
from ridgeplan.planner.plan import KVCache, KVFormat, Placement, Plan, Workload
from ridgeplan.planner.sweeps import placement_times
from ridgeplan.roofline.catalog.checks import Checked, build, number, text, whole
from ridgeplan.roofline.catalog.documents import parse_json, read_document
from ridgeplan.roofline.catalog.mistakes import brief

MODEL, BUDGET, NEW_TOKENS = "meta-llama/Llama-3.1-8B", 2048, 64  # as the benchmark has them
LENGTHS = tuple(round(float(one)) for one in np.geomspace(8192, 131_072, 65))
GPU = gpu_slider("h200")
BATCH = Slider("batch", "Batch", (1, 2, 4, 8, 16), 4)
MEMORY = Slider("memory_gb", "Memory (GB)", (24, 32, 40, 80), 24)
LINES = (("adaptive_ms", "as many layers on the host as must be", COLORS[0]),
         ("static_ms", "all layers once one must", COLORS[1]))  # fmt: skip


@dataclass(frozen=True)
class MeasuredStep(Checked):
    """One row of the benchmark, with its name and how long it took. Raises FigureError for wrong values."""

    error = FigureError

    context: int = whole(1, 1 << 24)
    host_layers: int = whole(0, 100_000)
    predicted_adaptive_ms: float = number(0, 1e9)
    predicted_static_ms: float = number(0, 1e9)
    adaptive_ms: float = number(0, 1e9)
    static_ms: float = number(0, 1e9)
    row: str = text("")
    took_s: float = number(0, 1e9, default=0.0)


def placement_rows(gpu: str, batch: int, memory_gb: int) -> list[Row]:
    """Predicted milliseconds per token over the context, for INT8 KV within so much memory."""
    shape, profile = resolve(MODEL, gpu)
    workload = Workload(shape.name, profile.hardware.name, LENGTHS[0], NEW_TOKENS, batch)
    placement = Placement(True, BUDGET, memory_bytes=memory_gb * 10**9)
    plan = Plan(workload, kv=KVCache(KVFormat.INT8), placement=placement)
    times = placement_times(plan, shape, profile, LENGTHS)
    common = {"gpu": gpu, "batch": batch, "memory_gb": memory_gb, "source": "predicted"}
    columns = zip(times.contexts, times.host_layers, times.adaptive_ms, times.static_ms, strict=True)
    return [
        {"tokens": tokens, **common, "layers_on_host": layers, "adaptive_ms": adaptive, "static_ms": static}
        for tokens, layers, adaptive, static in columns
    ]


def measured_rows(path: Path) -> list[Row]:
    """The section "cliff" of the benchmark's results. Raises FigureError for a file that is none."""
    try:
        results = parse_json(read_document(path))
    except (OSError, ValueError) as error:
        raise FigureError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    cliff = results.get("cliff") if isinstance(results, dict) else None
    if not (isinstance(cliff, list) and cliff):
        raise FigureError(f"{str(path)!r} has the section 'cliff' as {brief(cliff)}; allowed: a list of rows")
    steps = [build(MeasuredStep, row, f"{path.name}: ") for row in cliff]
    return [
        {"tokens": one.context, "source": "measured", "layers_on_host": one.host_layers,
         "adaptive_ms": one.adaptive_ms, "static_ms": one.static_ms}
        for one in steps
    ]  # fmt: skip


def draw_placement(rows: Sequence[Row]) -> go.Figure:
    """Predicted times as lines and measured ones as points, above the staircase of predicted layers on the host."""
    predicted, measured = ([row for row in rows if row["source"] == one] for one in ("predicted", "measured"))
    tokens = [row["tokens"] for row in predicted]
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06)
    for column, name, color in LINES:
        times = [row[column] for row in predicted]
        figure.add_trace(go.Scatter(name=name, x=tokens, y=times, mode="lines", line={"color": color}), 1, 1)
        if measured:
            points = go.Scatter(name=f"{name}, measured", x=[row["tokens"] for row in measured], mode="markers",
                                y=[row[column] for row in measured], marker={"color": color})  # fmt: skip
            figure.add_trace(points, 1, 1)
    stairs = go.Scatter(name="layers on the host", x=tokens, y=[row["layers_on_host"] for row in predicted],
                        mode="lines", line={"color": COLORS[2], "shape": "hv"})  # fmt: skip
    figure.add_trace(stairs, 2, 1)
    first = predicted[0]
    size = f"batch {first['batch']}, {first['memory_gb']} GB of {first['gpu']}"
    styled(figure, f"{MODEL.split('/')[1]}, INT8 KV, {size}", height=560)
    figure.update_yaxes(title_text="ms per token", type="log", row=1, col=1)
    figure.update_yaxes(title_text="layers on the host", row=2, col=1)
    figure.update_xaxes(title_text="tokens of a prompt", row=2, col=1)
    return tokens_axis(figure, tokens)


PLACEMENT = PaperFigure("specontext-placement", "specontext", "section 6.1",
                        "time per token where layers leave for the host, by this package's plans",
                        placement_rows, draw_placement, (GPU, BATCH, MEMORY))  # fmt: skip
FIGURES = (PLACEMENT,)
