"""DapQ's efficiency tables as figures: throughput (Table 3), time to the first token (Table 4), memory (Table 7)."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ridgeplan.dashboards.figures.paper_figure import PaperFigure, Row, Slider, gpu_slider, tokens_axis
from ridgeplan.dashboards.figures.published_table import lines, table_rows

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "meta-llama/Meta-Llama-3-8B")
SLIDERS = (
    Slider("model", "Model", MODELS, MODELS[0]),
    gpu_slider("h20"),
    Slider("budget", "Budget (tokens)", (128, 256, 512, 1024, 2048), 256),
)


def throughput_rows(model: str, gpu: str, budget: int) -> list[Row]:
    """Table 3: tokens per second of whole requests."""
    return table_rows("dapq", "Table 3", "request_tokens_per_s", model=model, gpu=gpu, budget=budget)


def first_token_rows(model: str, gpu: str, budget: int) -> list[Row]:
    """Table 4: seconds to the first token."""
    return table_rows("dapq", "Table 4", "ttft_s", model=model, gpu=gpu, budget=budget)


def memory_rows(model: str, gpu: str, budget: int) -> list[Row]:
    """Table 7: peak memory."""
    return table_rows("dapq", "Table 7", "peak_gib", model=model, gpu=gpu, budget=budget)


def draw_throughput(rows: Sequence[Row]) -> go.Figure:
    """A line for each policy over the batch; it ends where memory does."""
    return lines(rows, "batch", f"Throughput of whole requests, {rows[0]['gpu']}", "batch", "tokens/s")


def draw_first_token(rows: Sequence[Row]) -> go.Figure:
    """A line for each policy over the context (log-log)."""
    figure = lines(rows, "context", f"Time to the first token, {rows[0]['gpu']}", "tokens of context", "seconds")
    return tokens_axis(figure.update_yaxes(type="log"), [row["context"] for row in rows])


def draw_memory(rows: Sequence[Row]) -> go.Figure:
    """A line for each policy over the batch; it ends where memory does."""
    return lines(rows, "batch", f"Peak memory, {rows[0]['gpu']}", "batch", "GiB")


FIGURES = (
    PaperFigure("dapq-table3", "dapq", "Table 3", "throughput of whole requests by batch",
                throughput_rows, draw_throughput, SLIDERS),
    PaperFigure("dapq-table4", "dapq", "Table 4", "time to the first token by context",
                first_token_rows, draw_first_token, SLIDERS),
    PaperFigure("dapq-table7", "dapq", "Table 7", "peak memory by batch", memory_rows, draw_memory, SLIDERS),
)  # fmt: skip
