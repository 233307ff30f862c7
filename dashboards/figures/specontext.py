"""SpeContext's memory model (Eq 6 to 8), the cliff that it avoids (section 6.1), and its engines (Table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ridgeplan.dashboards.figures.paper_figure import PaperFigure, Row, Slider, gpu_slider
from ridgeplan.dashboards.figures.published_table import dumbbells, own_row, table_rows
from ridgeplan.dashboards.figures.style import COLORS, LIMIT_COLOR, styled, tokens_axis
from ridgeplan.planner.published.case import Case
from ridgeplan.planner.published.memory import fits
from ridgeplan.planner.published.metrics import longest_on_gpu, offloaded_tpot_s, tokens_per_s
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.device import GIB
from ridgeplan.roofline.memory import weight_memory
from ridgeplan.roofline.papers.specontext_memory import SpeContextMemory, layers_to_offload

MODEL, RETRIEVAL_HEAD_BYTES = "meta-llama/Llama-3.1-8B", 60e6  # section 7.4
GPU = gpu_slider("a800-80gb")
REQUESTS = Slider("requests", "Requests", (1, 2, 4, 8, 16, 32, 64), 16)
BUDGET = Slider("budget", "Budget (tokens)", (512, 1024, 2048, 4096), 2048)  # 2048: section 7.3
LENGTHS = tuple(round(float(one)) for one in np.geomspace(1024, 262144, 97))
FEWER_LENGTHS = LENGTHS[::3]
WHOLE, ADAPTIVE = "whole cache on the GPU or on the host", "layers leave one by one (SpeContext)"


def memory_rows(gpu: str, requests: int, budget: int) -> list[Row]:
    """Eq 6 and Eq 7 over the sequence length, with the layers that Algorithm 2 puts on the host."""
    shape, hardware = load_shape(MODEL), load_hardware(gpu)
    weights = weight_memory(shape, hardware.element_bytes, hardware.element_bytes)
    model = SpeContextMemory(
        float(weights), RETRIEVAL_HEAD_BYTES, shape.layers, shape.kv_heads, shape.head_dim, requests, budget
    )
    thresholds = model.thresholds(hardware.memory_bytes)
    return [
        {
            "tokens": tokens, "gpu": gpu, "requests": requests, "budget": budget, "layers_on_host": layers,
            "whole_gib": model.all_bytes(tokens) / GIB, "adaptive_gib": model.part_bytes(tokens, layers) / GIB,
            "capacity_gib": hardware.memory_bytes / GIB,
        }
        for tokens in LENGTHS
        for layers in [layers_to_offload(thresholds, tokens)]
    ]  # fmt: skip


def draw_memory(rows: Sequence[Row]) -> go.Figure:
    """Memory of both forms against the capacity, and below it the staircase of layers on the host."""
    tokens = [row["tokens"] for row in rows]
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06)
    shown = (("whole_gib", "whole cache on the GPU (Eq 6)", COLORS[1], "solid"),
             ("adaptive_gib", "layers leave one by one (Eq 7)", COLORS[0], "solid"),
             ("capacity_gib", "memory of the GPU", LIMIT_COLOR, "dash"))  # fmt: skip
    for column, name, color, dash in shown:
        line = go.Scatter(name=name, x=tokens, y=[row[column] for row in rows], mode="lines",
                          line={"color": color, "dash": dash})  # fmt: skip
        figure.add_trace(line, 1, 1)
    stairs = go.Scatter(name="layers on the host", x=tokens, y=[row["layers_on_host"] for row in rows], mode="lines",
                        line={"color": COLORS[2], "shape": "hv"})  # fmt: skip
    figure.add_trace(stairs, 2, 1)
    first = rows[0]
    title = f"Memory of {MODEL.split('/')[1]}, {first['requests']} requests, {first['gpu']}"
    styled(figure, title, height=560)
    figure.update_yaxes(title_text="GiB", range=[0, 1.6 * first["capacity_gib"]], row=1, col=1)
    figure.update_yaxes(title_text="layers on the host", row=2, col=1)
    figure.update_xaxes(title_text="tokens of a sequence", row=2, col=1)
    return tokens_axis(figure, tokens)


def throughput_rows(gpu: str, requests: int) -> list[Row]:
    """Tokens per second over the length: full attention that offloads all or nothing, and SpeContext."""
    own = own_row(WHOLE, model=MODEL, gpu=gpu, batch=requests, engine="flashinfer")
    selecting = replace(own, preset="specontext", engine="specontext", offload=True)
    longest = longest_on_gpu(Case.of(replace(own, context=1)))
    found: list[Row] = []
    for tokens in sorted({*FEWER_LENGTHS, longest, longest + 1}):
        plain, adaptive = (Case.of(replace(row, context=tokens)) for row in (own, selecting))
        seconds = offloaded_tpot_s(plain) if tokens > longest else float(plain.tpot_s)
        common = {"tokens": tokens, "gpu": gpu, "requests": requests, "longest_on_gpu": longest}
        found.append({**common, "method": WHOLE, "tokens_per_s": requests / seconds})
        speed = tokens_per_s(adaptive) if fits(adaptive) else None
        found.append({**common, "method": ADAPTIVE, "tokens_per_s": speed})
    return found


def draw_throughput(rows: Sequence[Row]) -> go.Figure:
    """Both lines, and the length at which the cache no longer fits."""
    figure = go.Figure()
    for method, color in ((WHOLE, COLORS[1]), (ADAPTIVE, COLORS[0])):
        own = [row for row in rows if row["method"] == method]
        figure.add_scatter(name=method, x=[row["tokens"] for row in own], y=[row["tokens_per_s"] for row in own],
                           mode="lines", line={"color": color})  # fmt: skip
    first = rows[0]
    figure.add_vline(first["longest_on_gpu"], line_dash="dash", line_color=LIMIT_COLOR,
                     annotation_text=f"{first['longest_on_gpu']} tokens fit")  # fmt: skip
    figure.update_yaxes(type="log")
    title = f"Throughput of {MODEL.split('/')[1]}, {first['requests']} requests, {first['gpu']}"
    return tokens_axis(styled(figure, title, "tokens of a sequence", "tokens/s of the batch"), LENGTHS)


def engine_rows(gpu: str) -> list[Row]:
    """Table 3: tokens per second of whole requests."""
    return table_rows("specontext", "Table 3", "request_tokens_per_s", gpu=gpu)


def draw_engines(rows: Sequence[Row]) -> go.Figure:
    """Rings and dots of Table 3."""
    figure = dumbbells(rows, f"Throughput of whole requests, {rows[0]['gpu']}", "tokens/s")
    return figure.update_xaxes(type="log")


FIGURES = (
    PaperFigure("specontext-memory", "specontext", "Eq 6-8", "memory over the length, and layers on the host",
                memory_rows, draw_memory, (GPU, REQUESTS, BUDGET)),
    PaperFigure("specontext-cliff", "specontext", "section 6.1", "throughput where the cache no longer fits",
                throughput_rows, draw_throughput, (GPU, REQUESTS)),
    PaperFigure("specontext-table3", "specontext", "Table 3", "throughput of whole requests by engine",
                engine_rows, draw_engines, (GPU,)),
)  # fmt: skip
