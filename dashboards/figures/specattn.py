"""SpecAttn's figures: logits (Fig 6), a round by its parts (Fig 3), selection (Fig 10b), tuning (Fig 12, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import plotly.graph_objects as go

from ridgeplan.dashboards.charts.style import SERIES, titled
from ridgeplan.dashboards.figures.paper_figure import PaperFigure, Row, Slider, gpu_slider
from ridgeplan.dashboards.figures.published_table import dumbbells, extra_row, lines, table_of, table_rows
from ridgeplan.dashboards.rows import grouped
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.validate.papers.case import Case
from ridgeplan.validate.papers.metrics import logits_overhead, selection_s, tokens_per_s, tpot_s_of_gammas, unselected

GPU = gpu_slider("h100-nvl")
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "openai/gpt-oss-20b", "meta-llama/Llama-3.1-8B")
MODEL = Slider("model", "Model", MODELS, MODELS[0])
CONTEXT = Slider("context", "Context", (8192, 16384, 32768, 65536, 110592, 131072), 110592)
BATCH = Slider("batch", "Batch", (1, 2, 4, 8, 16, 32), 4)
GAMMA = Slider("gamma", "Gamma", (1, 2, 3, 4, 5, 6, 7, 9, 11), 5)
RATIO = Slider("ratio", "Sparse ratio", (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2), 0.07)
METHODS = {
    "MagicDec-Stream": "magicdec-streaming", "MagicDec-Quest": "magicdec-quest", "SpecExtend": "specextend",
    "SpecAttn": "specattn",
}  # fmt: skip
PARTS = ("drafting", "verification", "selection")


def logits_rows() -> list[Row]:
    """Fig 6: what collecting logits adds to attention, over the number of queries whose logits are kept."""
    table = table_of("specattn", "Fig 6")
    printed = {(row.model, row.queries): row.cells["logits_overhead"] for row in table.rows}
    base = extra_row("logits", gpu="h100-nvl", engine="vllm", context=110592)
    return [
        {
            "method": model, "queries": queries, "published": printed.get((model, queries)),
            "predicted": logits_overhead(Case.of(replace(base, model=model, queries=queries))),
        }
        for model in dict.fromkeys(model for model, _ in printed)
        for queries in range(1, 17)
    ]  # fmt: skip


def round_rows(model: str, gpu: str, context: int, batch: int, gamma: int, ratio: float) -> list[Row]:
    """Fig 3: milliseconds of a round by part, for each way of choosing tokens, with the tokens that it yields."""
    rows: list[Row] = []
    for method, preset in METHODS.items():
        case = _drafting(method, preset, model=model, gpu=gpu, context=context, batch=batch, gamma=gamma, ratio=ratio)
        bare = unselected(case).estimate.round
        drafting_s = float(bare.passes * bare.draft_s)
        seconds = (drafting_s, float(bare.total_s) - drafting_s, selection_s(case))
        rows += [
            {
                "method": method, "part": part, "milliseconds": 1e3 * value,
                "tokens_per_round": float(case.estimate.tokens_per_round), "tokens_per_s": tokens_per_s(case),
                "model": model, "gpu": gpu, "context": context, "batch": batch, "gamma": gamma, "ratio": ratio,
            }
            for part, value in zip(PARTS, seconds, strict=True)
        ]  # fmt: skip
    return rows


def _drafting(method: str, preset: str, *, gamma: int, **workload: object) -> Case:
    """A method's round on vLLM. Rows of logits: 2 of SpecAttn, all of SpecExtend (section 5.2)."""
    queries = {"specattn": 2, "specextend": gamma + 1}.get(preset, 1)
    fields = {"preset": preset, "engine": "vllm", "gamma": gamma, "queries": queries, "new_tokens": 1024}
    return Case.of(extra_row(method, **fields, **workload))


def draw_round(rows: Sequence[Row]) -> go.Figure:
    """A stack for each method, with what it yields beside it."""
    figure = go.Figure()
    for (part, part_rows), color in zip(grouped(rows, "part").items(), SERIES, strict=False):
        figure.add_bar(
            name=part, y=[row["method"] for row in part_rows], x=[row["milliseconds"] for row in part_rows],
            orientation="h", marker_color=color, hovertemplate="%{y}, " + part + ": %{x:.3g} ms<extra></extra>",
        )  # fmt: skip
    for method, method_rows in grouped(rows, "method").items():
        yields = f" {method_rows[0]['tokens_per_round']:.2f} tokens, {method_rows[0]['tokens_per_s']:.0f} tokens/s"
        figure.add_annotation(x=sum(row["milliseconds"] for row in method_rows), y=method, text=yields, showarrow=False,
                              xanchor="left")  # fmt: skip
    longest = sum(row["milliseconds"] for row in rows) / len(METHODS)
    figure.update_xaxes(range=[0, 1.8 * longest])
    figure.update_yaxes(autorange="reversed", automargin=True)
    title = "One round: {model}, {gpu}, {context} tokens, batch {batch}, gamma {gamma}".format(**rows[0])
    return titled(figure.update_layout(barmode="stack"), title, "ms")


def tuning_rows(model: str, gpu: str, context: int, batch: int) -> list[Row]:
    """Fig 12: tokens per second of SpecAttn over gamma and sparse ratio, at the planner's acceptance."""
    gammas = np.arange(1, MAX_GAMMA + 1)
    workload = {"model": model, "gpu": gpu, "context": context, "batch": batch}
    rows: list[Row] = []
    for ratio in RATIO.values:
        case = _drafting("SpecAttn", "specattn", gamma=int(GAMMA.default), ratio=ratio, **workload)
        speeds = batch / np.broadcast_to(tpot_s_of_gammas(case, gammas), gammas.shape)
        rows += [
            {**workload, "ratio": ratio, "gamma": int(gamma), "tokens_per_s": float(speed)}
            for gamma, speed in zip(gammas, speeds, strict=True)
        ]
    return rows


def draw_tuning(rows: Sequence[Row]) -> go.Figure:
    """A heat map, with a cross at the best of all."""
    ratios, gammas = (list(dict.fromkeys(row[name] for row in rows)) for name in ("ratio", "gamma"))
    speeds = np.reshape([row["tokens_per_s"] for row in rows], (len(ratios), len(gammas)))
    best = max(rows, key=lambda row: row["tokens_per_s"])
    labels = [f"{ratio:.0%}" for ratio in ratios]
    figure = go.Figure(go.Heatmap(x=gammas, y=labels, z=speeds, colorscale="Viridis", colorbar_title="tokens/s",
                                  hovertemplate="gamma %{x}, %{y}<br>%{z:.4g} tokens/s<extra></extra>"))  # fmt: skip
    figure.add_scatter(name=f"best: {best['tokens_per_s']:.0f} tokens/s", x=[best["gamma"]], y=[f"{best['ratio']:.0%}"],
                       mode="markers", marker={"symbol": "x", "size": 14, "color": "white"})  # fmt: skip
    figure.update_yaxes(type="category")
    title = "SpecAttn's throughput: {model}, {gpu}, {context} tokens, batch {batch}".format(**rows[0])
    return titled(figure, title, "gamma", "sparse ratio")


FIGURES = (
    PaperFigure(
        "specattn-fig6", "specattn", "Fig 6", "overhead of collecting attention logits", logits_rows,
        partial(lines, over="queries", title="Writing attention logits, over reading the KV cache",
                x="queries whose logits are kept", y="overhead of attention", tickformat=".0%"),
    ),
    PaperFigure(
        "specattn-fig3", "specattn", "Fig 3", "a round by its parts",
        round_rows, draw_round, (MODEL, GPU, CONTEXT, BATCH, GAMMA, RATIO),
    ),
    PaperFigure(
        "specattn-fig10b", "specattn", "Fig 10b", "overhead of choosing tokens",
        partial(table_rows, "specattn", "Headline", "selection_overhead"),
        partial(dumbbells, title="Choosing tokens, over a round without it, {gpu}", x="overhead", tickformat=".0%"),
        (GPU,),
    ),
    PaperFigure(
        "specattn-fig12", "specattn", "Fig 12", "throughput over gamma and sparse ratio",
        tuning_rows, draw_tuning, (MODEL, GPU, CONTEXT, BATCH),
    ),
    PaperFigure(
        "specattn-table2", "specattn", "Table 2", "the best gamma",
        partial(table_rows, "specattn", "Table 2", "best_gamma"),
        partial(dumbbells, title="The best gamma, {gpu}", x="gamma"), (GPU,),
    ),
)  # fmt: skip
