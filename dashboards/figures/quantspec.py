"""QuantSpec's figures: intensity and roofline (Fig 2 and 5), speed-up, memory, parts, attention, gamma."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ridgeplan.dashboards.charts.style import RED, SERIES, titled
from ridgeplan.dashboards.figures.paper_figure import PaperFigure, Row, Slider, gpu_slider
from ridgeplan.dashboards.figures.published_table import dumbbells, lines, table_of, table_rows
from ridgeplan.dashboards.rows import grouped
from ridgeplan.planner.quantities import tokens_text
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.validate.papers.case import Case
from ridgeplan.validate.papers.metrics import speedup
from ridgeplan.validate.papers.quantspec_ridge_plane import Plane, decode_plane, prefill_plane

PLANE_CONTEXTS = tuple(1 << power for power in range(10, 19))
PLANE_BATCHES = tuple(1 << power for power in range(8))
PARTS = ("linear", "attention", "aggregate")
PHASES: dict[str, Callable[..., Plane]] = {"decode": decode_plane, "prefill": prefill_plane}
MODELS = ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-70B")
MODEL = Slider("model", "Model", MODELS, MODELS[0])
GPU = gpu_slider("a6000")


def plane_rows(phase: str, model: str, gpu: str, batches: Sequence[int] = PLANE_BATCHES) -> list[Row]:
    """FLOP per byte of each part, attention's share of the time, and the ridge point, for each context and batch."""
    plane = PHASES[phase](load_shape(model), load_hardware(gpu), PLANE_CONTEXTS, batches)
    columns = {**{part: getattr(plane, part) for part in PARTS}, "attention_share": plane.attention_share}
    return [
        {
            "phase": phase, "context": context, "batch": size,
            **{name: float(values[row, column]) for name, values in columns.items()},
            "ridge_point": plane.ridge_point,
        }
        for row, context in enumerate(PLANE_CONTEXTS)
        for column, size in enumerate(batches)
    ]  # fmt: skip


def draw_planes(rows: Sequence[Row]) -> go.Figure:
    """Three surfaces over context and batch, coloured by attention's share of the time, cut by the ridge plane."""
    contexts, batches = (sorted({row[name] for row in rows}) for name in ("context", "batch"))
    shape = len(contexts), len(batches)
    share = np.reshape([row["attention_share"] for row in rows], shape)
    figure = make_subplots(1, 3, specs=[[{"type": "scene"}] * 3], subplot_titles=PARTS, horizontal_spacing=0.02)
    for column, part in enumerate(PARTS, start=1):
        heights = np.reshape([row[part] for row in rows], shape)
        figure.add_trace(
            go.Surface(
                x=batches, y=contexts, z=heights, surfacecolor=share, coloraxis="coloraxis", name=part,
                hovertemplate="batch %{x}, context %{y}<br>%{z:.3g} FLOP/byte<extra></extra>",
            ),
            1, column,
        )  # fmt: skip
        ridge = np.full(shape, rows[0]["ridge_point"])
        plane = go.Surface(x=batches, y=contexts, z=ridge, opacity=0.35, showscale=False, name="ridge plane",
                           colorscale=[[0, RED], [1, RED]])  # fmt: skip
        figure.add_trace(plane, 1, column)
    figure.update_scenes(
        xaxis={"type": "log", "title": "batch"}, yaxis={"type": "log", "title": "context"},
        zaxis={"type": "log", "title": "FLOP/byte"}, camera_eye={"x": 1.9, "y": 1.9, "z": 0.9},
    )  # fmt: skip
    bar = {"title": "attention's<br>share of time", "tickformat": ".0%"}
    figure.update_layout(coloraxis={"colorscale": "Viridis", "cmin": 0, "cmax": 1, "colorbar": bar})
    title = f"Arithmetic intensity of {rows[0]['phase']}, and the ridge plane at {rows[0]['ridge_point']:.0f} FLOP/byte"
    return titled(figure, title, height=520)


def roofline_rows(phase: str, model: str, gpu: str, batch: int) -> list[Row]:
    """FLOP/s that the roofline allows each part at one batch, over contexts, with the roof's two figures."""
    hardware = load_hardware(gpu)
    peak, bandwidth = hardware.compute_flops, hardware.bandwidth_bytes_per_s
    return [
        {
            "part": part, "phase": phase, "context": row["context"], "batch": batch, "intensity": row[part],
            "flops_per_s": min(peak, row[part] * bandwidth), "peak_flops": peak, "bandwidth_bytes_per_s": bandwidth,
        }
        for part in PARTS
        for row in plane_rows(phase, model, gpu, (batch,))
    ]  # fmt: skip


def draw_roofline(rows: Sequence[Row]) -> go.Figure:
    """The parts under the machine's roof, a dot for each context (log-log)."""
    peak, bandwidth = rows[0]["peak_flops"], rows[0]["bandwidth_bytes_per_s"]
    intensities = np.geomspace(0.5, max(10 * peak / bandwidth, *(2 * row["intensity"] for row in rows)), 100)
    figure = go.Figure()
    figure.add_scatter(name=f"roof, ridge at {peak / bandwidth:.0f} FLOP/byte", x=intensities,
                       y=np.minimum(peak, bandwidth * intensities), mode="lines", line_color=RED)  # fmt: skip
    for (part, part_rows), color in zip(grouped(rows, "part").items(), SERIES, strict=False):
        figure.add_scatter(
            name=part, x=[row["intensity"] for row in part_rows], y=[row["flops_per_s"] for row in part_rows],
            mode="lines+markers", line={"color": color}, marker={"size": 9},
            text=[tokens_text(row["context"]) for row in part_rows],
            hovertemplate="%{text} tokens<br>%{x:.3g} FLOP/byte, %{y:.3s}FLOP/s",
        )  # fmt: skip
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log", exponentformat="SI")
    title = f"Roofline of {rows[0]['phase']} at batch {rows[0]['batch']}, 1k to 256k tokens"
    return titled(figure, title, "FLOP/byte", "FLOP/s")


SPEED_CONTEXTS = tuple(1 << power for power in range(12, 18))
TWO_GPUS_FROM = 65536  # tokens, as in Table 3
DATASETS = ("PG19, Llama-2", "Multi-LexSum, Llama-2", "InfiniteBench Sum, LWM", "Multi-LexSum, LWM")


def parts_rows(gpu: str, gamma: int) -> list[Row]:
    """Fig 4: the speed-up of 4-bit weights, of 4-bit KV and of both, over the context.

    The figure's numbers are lost, so there is nothing printed beside them.
    """
    methods = {row.method: row for row in table_of("quantspec", "Fig 4").rows}.values()
    return [
        {
            "method": row.method, "context": context, "gpu": gpu, "gpus": gpus, "gamma": gamma, "published": None,
            "predicted": speedup(Case.of(replace(row, context=context, gpu=gpu, gpus=gpus, gamma=gamma))),
        }
        for row in methods
        for context in SPEED_CONTEXTS
        for gpus in [1 + (context >= TWO_GPUS_FROM)]
    ]  # fmt: skip


def attention_rows() -> list[Row]:
    """Table 4: one layer's attention."""
    metrics = ("attention_ms", "draft_attention_ms")
    return [row for metric in metrics for row in table_rows("quantspec", "Table 4", metric)]


def gamma_rows(dataset: str, gpu: str) -> list[Row]:
    """Table 6: tokens per second over gamma, of one dataset and model."""
    return table_rows("quantspec", "Table 6", "tokens_per_s", case=f"{dataset}, gamma", gpu=gpu)


FIGURES = (
    PaperFigure(
        "quantspec-fig2", "quantspec", "Fig 2", "arithmetic intensity of decoding, and the ridge plane",
        partial(plane_rows, "decode"), draw_planes, (MODEL, GPU),
    ),
    PaperFigure(
        "quantspec-fig5", "quantspec", "Fig 5", "arithmetic intensity of prefill, and the ridge plane",
        partial(plane_rows, "prefill"), draw_planes, (MODEL, GPU),
    ),
    PaperFigure(
        "quantspec-roofline", "quantspec", "section 3.1", "linear layers and attention under the roofline",
        roofline_rows, draw_roofline,
        (Slider("phase", "Phase", tuple(PHASES), "decode"), MODEL, GPU, Slider("batch", "Batch", PLANE_BATCHES, 16)),
    ),
    PaperFigure(
        "quantspec-table3-speedup", "quantspec", "Table 3", "speed-up over plain decoding",
        partial(table_rows, "quantspec", "Table 3", "speedup"),
        partial(dumbbells, title="Speed-up over plain decoding, {gpu}", x="speed-up"), (GPU,),
    ),
    PaperFigure(
        "quantspec-table3-memory", "quantspec", "Table 3", "peak memory",
        partial(table_rows, "quantspec", "Table 3", "peak_gib"),
        partial(dumbbells, title="Peak memory of all GPUs, {gpu}", x="GiB"), (GPU,),
    ),
    PaperFigure(
        "quantspec-fig4", "quantspec", "Fig 4", "speed-up of 4-bit weights, 4-bit KV and both", parts_rows,
        partial(lines, over="context", title="Speed-up of 4-bit weights, 4-bit KV and both, {gpu}, gamma {gamma}",
                x="tokens of context", y="speed-up over plain decoding"),
        (GPU, Slider("gamma", "Gamma", (1, 2, 3, 4, 5, 6, 8), 4)),
    ),
    PaperFigure(
        "quantspec-table4", "quantspec", "Table 4", "one layer's decode attention", attention_rows,
        partial(dumbbells, title="One layer's decode attention, RTX A6000", x="ms"),
    ),
    PaperFigure(
        "quantspec-table6", "quantspec", "Table 6", "tokens per second by gamma", gamma_rows,
        partial(lines, over="gamma", title="Tokens per second at 8k, {gpu}, by gamma", x="gamma", y="tokens/s"),
        (Slider("dataset", "Dataset", DATASETS, DATASETS[0]), GPU),
    ),
)  # fmt: skip
