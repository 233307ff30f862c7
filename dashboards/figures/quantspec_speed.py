"""QuantSpec's results: speed-up and memory (Table 3), its parts (Fig 4), attention (Table 4) and gamma (Table 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import plotly.graph_objects as go

from ridgeplan.dashboards.figures.paper_figure import PaperFigure, Row, Slider, gpu_slider
from ridgeplan.dashboards.figures.published_table import dumbbells, lines, table_of, table_rows
from ridgeplan.dashboards.figures.style import tokens_axis
from ridgeplan.planner.published.case import Case
from ridgeplan.planner.published.metrics import speedup

GPU = gpu_slider("a6000")
CONTEXTS = tuple(1 << power for power in range(12, 18))
TWO_GPUS_FROM = 65536  # tokens, as in Table 3
DATASETS = (
    "PG19, Llama-2", "Multi-LexSum, Llama-2", "InfiniteBench Sum, LWM", "Multi-LexSum, LWM",
)  # fmt: skip


def speedup_rows(gpu: str) -> list[Row]:
    """Table 3's speed-ups over plain decoding."""
    return table_rows("quantspec", "Table 3", "speedup", gpu=gpu)


def memory_rows(gpu: str) -> list[Row]:
    """Table 3's peak memory."""
    return table_rows("quantspec", "Table 3", "peak_gib", gpu=gpu)


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
        for context in CONTEXTS
        for gpus in [1 + (context >= TWO_GPUS_FROM)]
    ]  # fmt: skip


def attention_rows() -> list[Row]:
    """Table 4: one layer's attention."""
    return [
        row
        for metric in ("attention_ms", "draft_attention_ms")
        for row in table_rows("quantspec", "Table 4", metric)
    ]  # fmt: skip


def gamma_rows(dataset: str, gpu: str) -> list[Row]:
    """Table 6: tokens per second over gamma, of one dataset and model."""
    return table_rows("quantspec", "Table 6", "tokens_per_s", case=f"{dataset}, gamma", gpu=gpu)


def draw_speedup(rows: Sequence[Row]) -> go.Figure:
    """Rings and dots of Table 3's speed-ups."""
    return dumbbells(rows, f"Speed-up over plain decoding, {rows[0]['gpu']}", "speed-up")


def draw_memory(rows: Sequence[Row]) -> go.Figure:
    """Rings and dots of Table 3's peaks."""
    return dumbbells(rows, f"Peak memory of all GPUs, {rows[0]['gpu']}", "GiB")


def draw_parts(rows: Sequence[Row]) -> go.Figure:
    """A line for each of the three."""
    title = f"Speed-up of 4-bit weights, 4-bit KV and both, {rows[0]['gpu']}, gamma {rows[0]['gamma']}"
    figure = lines(rows, "context", title, "tokens of context", "speed-up over plain decoding")
    return tokens_axis(figure, CONTEXTS)


def draw_attention(rows: Sequence[Row]) -> go.Figure:
    """Rings and dots of Table 4."""
    return dumbbells(rows, "One layer's decode attention, RTX A6000", "ms")


def draw_gamma(rows: Sequence[Row]) -> go.Figure:
    """A line for each method over gamma."""
    title = f"Tokens per second at 8k, {rows[0]['gpu']}, by gamma"
    return lines(rows, "gamma", title, "gamma", "tokens/s")


FIGURES = (
    PaperFigure("quantspec-table3-speedup", "quantspec", "Table 3", "speed-up over plain decoding",
                speedup_rows, draw_speedup, (GPU,)),
    PaperFigure("quantspec-table3-memory", "quantspec", "Table 3", "peak memory", memory_rows, draw_memory, (GPU,)),
    PaperFigure("quantspec-fig4", "quantspec", "Fig 4", "speed-up of 4-bit weights, 4-bit KV and both",
                parts_rows, draw_parts, (GPU, Slider("gamma", "Gamma", (1, 2, 3, 4, 5, 6, 8), 4))),
    PaperFigure("quantspec-table4", "quantspec", "Table 4", "one layer's decode attention",
                attention_rows, draw_attention),
    PaperFigure("quantspec-table6", "quantspec", "Table 6", "tokens per second by gamma",
                gamma_rows, draw_gamma, (Slider("dataset", "Dataset", DATASETS, DATASETS[0]), GPU)),
)  # fmt: skip
