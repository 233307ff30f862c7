"""DapQ's efficiency tables as figures: throughput (Table 3), time to the first token (Table 4), memory (Table 7)."""

from __future__ import annotations

from functools import partial

from ridgeplan.dashboards.figures.paper_figure import PaperFigure, Slider, gpu_slider
from ridgeplan.dashboards.figures.published_table import lines, table_rows

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "meta-llama/Meta-Llama-3-8B")
SLIDERS = (
    Slider("model", "Model", MODELS, MODELS[0]),
    gpu_slider("h20"),
    Slider("budget", "Budget (tokens)", (128, 256, 512, 1024, 2048), 256),
)


FIGURES = (
    PaperFigure(
        "dapq-table3", "dapq", "Table 3", "throughput of whole requests by batch",
        partial(table_rows, "dapq", "Table 3", "request_tokens_per_s"),
        partial(lines, over="batch", title="Throughput of whole requests, {gpu}", x="batch", y="tokens/s"), SLIDERS,
    ),
    PaperFigure(
        "dapq-table4", "dapq", "Table 4", "time to the first token by context",
        partial(table_rows, "dapq", "Table 4", "ttft_s"),
        partial(lines, over="context", title="Time to the first token, {gpu}", x="tokens of context", y="seconds",
                type="log"), SLIDERS,
    ),
    PaperFigure(
        "dapq-table7", "dapq", "Table 7", "peak memory by batch", partial(table_rows, "dapq", "Table 7", "peak_gib"),
        partial(lines, over="batch", title="Peak memory, {gpu}", x="batch", y="GiB"), SLIDERS,
    ),
)  # fmt: skip
