"""SpeContext's figures: its memory model (Eq 6 to 8), its engines (Table 3), and the cliff of offloading.

Predicted for this package's own plans; docs/benchmarks/offload.md has measurements of the cliff.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ridgeplan.dashboards.charts.style import RED, SERIES, titled, token_axis
from ridgeplan.dashboards.figures.paper_figure import PaperFigure, Row, Slider, gpu_slider
from ridgeplan.dashboards.figures.published_table import dumbbells, extra_row, table_rows
from ridgeplan.dashboards.rows import grouped
from ridgeplan.planner import resolve
from ridgeplan.planner.queries.sweep import placement_times
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import GIB
from ridgeplan.roofline.memory import weight_memory
from ridgeplan.roofline.plan.plan import KVCache, KVFormat, Placement, Plan, Workload
from ridgeplan.validate.papers.case import Case, fits
from ridgeplan.validate.papers.metrics import longest_on_gpu, offloaded_tpot_s, tokens_per_s
from ridgeplan.validate.papers.specontext_memory import SpeContextMemory, layers_to_offload

MODEL, RETRIEVAL_HEAD_BYTES = "meta-llama/Llama-3.1-8B", 60e6  # section 7.4
GPU = gpu_slider("a800-80gb")
REQUESTS = Slider("requests", "Requests", (1, 2, 4, 8, 16, 32, 64), 16)
BUDGET = Slider("budget", "Budget (tokens)", (512, 1024, 2048, 4096), 2048)  # 2048: section 7.3
LENGTHS = tuple(round(float(length)) for length in np.geomspace(1024, 262144, 97))
FEWER_LENGTHS = LENGTHS[::3]
WHOLE, ADAPTIVE = "whole cache on the GPU or on the host", "layers leave one by one (SpeContext)"


MEMORY_LINES = (("whole_gib", "whole cache on the GPU (Eq 6)", SERIES[1]),
                ("adaptive_gib", "layers leave one by one (Eq 7)", SERIES[0]),
                ("capacity_gib", "memory of the GPU", RED))  # fmt: skip


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
    figure, first = _above_staircase(rows, MEMORY_LINES, "sequence"), rows[0]
    figure.update_yaxes(title_text="GiB", range=[0, 1.6 * first["capacity_gib"]], row=1, col=1)
    return figure.update_layout(title=f"Memory of {MODEL.split('/')[1]}, {first['requests']} requests, {first['gpu']}")


def _above_staircase(rows: Sequence[Row], lines: Iterable[tuple[str, str, str]], of: str) -> go.Figure:
    """Columns of the rows over the tokens of a sequence or a prompt, above the staircase of layers on the host.

    lines: column, name and colour of each.
    """
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06)
    tokens = [row["tokens"] for row in rows]
    for column, name, color in lines:
        figure.add_scatter(name=name, x=tokens, y=[row[column] for row in rows], mode="lines", line_color=color,
                           line_dash="dash" if color == RED else "solid", row=1, col=1)  # fmt: skip
    stairs = go.Scatter(name="layers on the host", x=tokens, y=[row["layers_on_host"] for row in rows], mode="lines",
                        line={"color": SERIES[2], "shape": "hv"})  # fmt: skip
    figure.add_trace(stairs, 2, 1)
    titled(figure, "", height=560)
    figure.update_yaxes(title_text="layers on the host", row=2, col=1)
    token_axis(figure, tokens, "")
    return figure.update_xaxes(title_text=f"tokens of a {of}", row=2, col=1)


def throughput_rows(gpu: str, requests: int) -> list[Row]:
    """Tokens per second over the length: full attention that offloads all or nothing, and SpeContext."""
    base = extra_row(WHOLE, model=MODEL, gpu=gpu, batch=requests, engine="flashinfer")
    selecting = replace(base, preset="specontext", engine="specontext", offload=True)
    longest = longest_on_gpu(Case.of(replace(base, context=1)))
    rows: list[Row] = []
    for tokens in sorted({*FEWER_LENGTHS, longest, longest + 1}):
        plain, adaptive = (Case.of(replace(row, context=tokens)) for row in (base, selecting))
        seconds = offloaded_tpot_s(plain) if tokens > longest else float(plain.tpot_s)
        common = {"tokens": tokens, "gpu": gpu, "requests": requests, "longest_on_gpu": longest}
        rows.append({**common, "method": WHOLE, "tokens_per_s": requests / seconds})
        speed = tokens_per_s(adaptive) if fits(adaptive) else None
        rows.append({**common, "method": ADAPTIVE, "tokens_per_s": speed})
    return rows


def draw_throughput(rows: Sequence[Row]) -> go.Figure:
    """Both lines, and the length at which the cache no longer fits."""
    figure = go.Figure()
    colors = {WHOLE: SERIES[1], ADAPTIVE: SERIES[0]}
    for method, method_rows in grouped(rows, "method").items():
        figure.add_scatter(name=method, x=[row["tokens"] for row in method_rows],
                           y=[row["tokens_per_s"] for row in method_rows], mode="lines",
                           line={"color": colors[method]})  # fmt: skip
    first = rows[0]
    figure.add_vline(first["longest_on_gpu"], line_dash="dash", line_color=RED,
                     annotation_text=f"{first['longest_on_gpu']} tokens fit")  # fmt: skip
    figure.update_yaxes(type="log")
    title = f"Throughput of {MODEL.split('/')[1]}, {first['requests']} requests, {first['gpu']}"
    return token_axis(titled(figure, title, y="tokens/s of the batch"), LENGTHS, "tokens of a sequence")


PLACEMENT_MODEL, PLACEMENT_BUDGET, NEW_TOKENS = "meta-llama/Llama-3.1-8B", 2048, 64  # as the benchmark has them
PLACEMENT_LENGTHS = tuple(round(float(length)) for length in np.geomspace(8192, 131_072, 65))
PLACEMENT_GPU = gpu_slider("h200")
BATCH = Slider("batch", "Batch", (1, 2, 4, 8, 16), 4)
MEMORY = Slider("memory_gb", "Memory (GB)", (24, 32, 40, 80), 24)
LINES = (("adaptive_ms", "as many layers on the host as must be", SERIES[0]),
         ("static_ms", "all layers once one must", SERIES[1]))  # fmt: skip


def placement_rows(gpu: str, batch: int, memory_gb: int) -> list[Row]:
    """Predicted milliseconds per token over the context, for INT8 KV within so much memory."""
    shape, profile = resolve(PLACEMENT_MODEL, gpu)
    workload = Workload(shape.name, profile.hardware.name, PLACEMENT_LENGTHS[0], NEW_TOKENS, batch)
    placement = Placement(True, PLACEMENT_BUDGET, memory_bytes=memory_gb * 10**9)
    plan = Plan(workload, kv=KVCache(KVFormat.INT8), placement=placement)
    times = placement_times(plan, shape, profile, PLACEMENT_LENGTHS)
    common = {"gpu": gpu, "batch": batch, "memory_gb": memory_gb}
    columns = zip(times.contexts, times.host_layers, times.adaptive_ms, times.static_ms, strict=True)
    return [
        {"tokens": tokens, **common, "layers_on_host": layers, "adaptive_ms": adaptive, "static_ms": static}
        for tokens, layers, adaptive, static in columns
    ]


def draw_placement(rows: Sequence[Row]) -> go.Figure:
    """Both times as lines, above the staircase of layers on the host."""
    figure, first = _above_staircase(rows, LINES, "prompt"), rows[0]
    size = f"batch {first['batch']}, {first['memory_gb']} GB of {first['gpu']}"
    figure.update_yaxes(title_text="ms per token", type="log", row=1, col=1)
    return figure.update_layout(title=f"{PLACEMENT_MODEL.split('/')[1]}, INT8 KV, {size}")


FIGURES = (
    PaperFigure("specontext-memory", "specontext", "Eq 6-8", "memory over the length, and layers on the host",
                memory_rows, draw_memory, (GPU, REQUESTS, BUDGET)),
    PaperFigure("specontext-cliff", "specontext", "section 6.1", "throughput where the cache no longer fits",
                throughput_rows, draw_throughput, (GPU, REQUESTS)),
    PaperFigure("specontext-table3", "specontext", "Table 3", "throughput of whole requests by engine",
                partial(table_rows, "specontext", "Table 3", "request_tokens_per_s"),
                partial(dumbbells, title="Throughput of whole requests, {gpu}", x="tokens/s", type="log"), (GPU,)),
    PaperFigure("specontext-placement", "specontext", "section 6.1",
                "time per token where layers leave for the host, by this package's plans",
                placement_rows, draw_placement, (PLACEMENT_GPU, BATCH, MEMORY)),
)  # fmt: skip
