"""The study of sparse drafts as a page: tables, and acceptance by position and by ratio."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from ridgeplan.dashboards.html_page import figure_html, html_page, table

SHOWN_RATIO = 0.07  # of the plot by position, or the nearest measured one
SYMBOLS = {"bf16": "circle", "kv4": "square", "w4kv4": "diamond"}


def page(document: Mapping[str, Any]) -> str:
    """The HTML of the study's JSON."""
    contexts = dict.fromkeys(row["context"] for row in document["rows"])
    title = f"Sparse drafts of {document['model']} on {document['text']}"
    parts = (part for context in contexts for part in _context(document["rows"], context))
    return html_page(title, (f"<h1>{escape(title)}</h1>", *parts))


def _context(rows: Iterable[Mapping[str, Any]], context: int) -> list[str]:
    found = [row for row in rows if row["context"] == context]
    positions = [str(position) for position in range(1, 1 + len(found[0]["by_position"]))]
    lines = (
        (row["policy"], f"{row['ratio']:g}", row["format"], f"{row['mean']:.3f}", f"{row['tokens_per_round']:.2f}",
         *(f"{value:.3f}" for value in row["by_position"])) for row in found
    )  # fmt: skip
    return [
        f"<h2>{context} tokens</h2>",
        figure_html(by_position(found)),
        figure_html(by_ratio(found)),
        table(("policy", "ratio", "reads", "mean", "tokens a round", *positions), lines),
    ]


def by_position(rows: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Acceptance by position in a round at one ratio: sets chosen once a round grow stale (SpecAttn, Fig 4)."""
    ratios = {row["ratio"] for row in rows if row["ratio"] < 1}
    shown = min(ratios, key=lambda ratio: abs(ratio - SHOWN_RATIO), default=1.0)
    figure = go.Figure()
    for row in rows:
        if row["ratio"] in (shown, 1.0):
            positions = list(range(1, 1 + len(row["by_position"])))
            _line(figure, row, positions, row["by_position"])
    return _styled(figure, f"Conditional acceptance by position, {shown:.0%} of the tokens", "position of the draft")


def by_ratio(rows: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Mean acceptance by the share of tokens that drafts read."""
    figure = go.Figure()
    for policy, form in dict.fromkeys((row["policy"], row["format"]) for row in rows):
        own = sorted(
            (row for row in rows if (row["policy"], row["format"]) == (policy, form)), key=lambda x: x["ratio"]
        )
        if len(own) > 1:
            _line(figure, own[0], [row["ratio"] for row in own], [row["mean"] for row in own])
    figure.update_xaxes(type="log", tickformat=".0%")
    return _styled(figure, "Mean conditional acceptance by ratio", "share of the tokens")


def _line(figure: go.Figure, row: Mapping[str, Any], x: Sequence[float], y: Sequence[float]) -> None:
    hidden = None if row["format"] == "bf16" or row["ratio"] == 1 else "legendonly"
    figure.add_scatter(
        x=x, y=y, name=f"{row['policy']}, {row['format']}", mode="lines+markers", visible=hidden,
        marker_symbol=SYMBOLS.get(row["format"], "circle"),
    )  # fmt: skip


def _styled(figure: go.Figure, title: str, x: str) -> go.Figure:
    return figure.update_layout(
        title=title, template="plotly_white", xaxis_title=x, yaxis_title="conditional acceptance"
    )
