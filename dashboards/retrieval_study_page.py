"""The study of selections as a page: hit rates by method and by layer, and overlap of adjacent steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from ridgeplan.dashboards.html_page import figure_html, html_page, table

Rows = Sequence[Mapping[str, Any]]  # of `validate.studies.retrieval.Row`
FIGURES = {
    "hit": "Share of the model's own top tokens that are read (Fig 5)",
    "distant": "The same of tokens that are neither first nor recent",
    "mass": "Share of the attention on what is read",
    "overlap": "Share of the choice that was chosen one step before (Fig 6b)",
}


def page(document: Mapping[str, Any]) -> str:
    """The HTML of the study's JSON."""
    title = f"Selections of {document['model']} on {document['text']}"
    contexts = dict.fromkeys(row["context"] for row in document["rows"])
    parts = (part for context in contexts for part in _context(document["rows"], context))
    return html_page(title, (f"<h1>{escape(title)}</h1>", *parts))


def _context(rows: Rows, context: int) -> Iterator[str]:
    own = [row for row in rows if row["context"] == context]
    yield f"<h2>{context} tokens</h2>"
    for name, text in FIGURES.items():
        yield figure_html(by_budget(own, name, text))
    yield figure_html(by_layer(own))
    lines = ((row["method"], row["budget"], *(f"{row[name]:.3f}" for name in FIGURES)) for row in own)
    yield table(("method", "budget", *FIGURES), lines)


def by_budget(rows: Rows, name: str, title: str) -> go.Figure:
    """One figure of every method over the budgets."""
    figure = go.Figure()
    for method in dict.fromkeys(row["method"] for row in rows):
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["budget"])
        figure.add_scatter(x=[row["budget"] for row in own], y=[row[name] for row in own], name=method,
                           mode="lines+markers")  # fmt: skip
    figure.update_xaxes(type="log")
    return figure.update_layout(title=title, template="plotly_white", xaxis_title="budget in tokens", height=420)


def by_layer(rows: Rows) -> go.Figure:
    """Hit rates of every method over the layers, at the largest budget."""
    budget, figure = max(row["budget"] for row in rows), go.Figure()
    for row in rows:
        if row["budget"] == budget:
            figure.add_scatter(x=list(range(len(row["by_layer"]))), y=list(row["by_layer"]), name=row["method"])
    title = f"Hit rate by layer, {budget} tokens"
    return figure.update_layout(title=title, template="plotly_white", xaxis_title="layer", height=420)
