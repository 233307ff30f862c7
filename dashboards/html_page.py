"""Pages of figures and tables as one HTML file that loads nothing: scripts, figures and tables are all in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

# The browser is told to load nothing either, whatever the texts of a report hold.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "worker-src blob:"
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:3px 10px;border-bottom:1px solid #ddd;text-align:left}"
    "td.figure{text-align:right;font-variant-numeric:tabular-nums}.missed{color:#d1495b}.met{color:#2f9e6e}"
)


def html_page(title: str, parts: Iterable[str]) -> str:
    """A page of these parts, which are HTML; the title is text."""
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>\n{body}\n</body></html>\n"
    )


def figure_html(figure: go.Figure) -> str:
    """A figure's element and script, without plotly's own code, which the page holds once."""
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return text


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table; all cells are text."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    shown = escape(str(value))
    kind = shown if shown in ("met", "missed") else "figure" if shown[:1] in "+-0123456789" and shown else ""
    return f'<td class="{kind}">{shown}</td>' if kind else f"<td>{shown}</td>"
