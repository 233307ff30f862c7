"""Pages as one HTML file that loads nothing: their frame, and the pages of sweeps, suites and studies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from ridgeplan.dashboards.charts import results
from ridgeplan.dashboards.charts.capacity import capacity_map
from ridgeplan.dashboards.charts.plans import BRIEF_PLANS, first_plans
from ridgeplan.dashboards.charts.rounds import waterfall
from ridgeplan.dashboards.charts.style import titled
from ridgeplan.dashboards.charts.traffic import LATENCIES, front_figure, latency_figure
from ridgeplan.dashboards.rows import Row, grouped
from ridgeplan.planner import Recommendation
from ridgeplan.planner.queries.sweep import GridSweep
from ridgeplan.planner.render.verdict import plan_sentence, reasons, sentence, verdict
from ridgeplan.planner.traffic.serving import ServingCapacity
from ridgeplan.roofline.catalog.validation import with_options
from ridgeplan.roofline.plan.presets import short_name

# Forbids the browser to load anything, whatever the texts of a report contain.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "worker-src blob:"
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "h1,p,li{overflow-wrap:anywhere}.js-plotly-plot{max-width:100%;overflow-x:auto}"
    "table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}"
    "@media(max-width:600px){table:has(th:nth-child(5))::after{content:'Swipe the table for more columns.';color:#888}}"
    "td,th{padding:3px 10px;border-bottom:1px solid #ddd;text-align:left}"
    "td.figure{text-align:right;font-variant-numeric:tabular-nums}.missed{color:#d1495b}.met{color:#2f9e6e}"
)


def html_page(title: str, parts: Iterable[str]) -> str:
    """A page of these parts, which are HTML; the title is text."""
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style>'
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
    is_figure = shown[:1] in "+-0123456789" and len(shown.split()) == 1
    kind = "figure" if is_figure else shown if shown in ("met", "missed") else ""
    return f'<td class="{kind}">{shown}</td>' if kind else f"<td>{shown}</td>"


def sweep_page(sweep: GridSweep) -> str:
    """The page. Names and values are shown as text, whatever they hold."""
    parts = ["<h1>Fastest plans</h1>"]
    for point in sweep.points:
        if point.plans is not None:
            settings = "".join(f", {name} {value}" for name, value in point.columns.items())
            title = f"{point.question.shape.name} on {point.question.profile.hardware.name}{settings}"
            parts += [f"<h2>{escape(title)}</h2>", figure_html(capacity_map(point.plans))]
        parts.append(_plan_table(point.rows(), "why_not"))
    return html_page("ridgeplan sweep", parts)


PLAN_COLUMNS = {
    "context": "context", "batch": "batch", "plan": "plan", "gamma": "gamma", "ms per token": "tpot_ms",
    "first token, ms": "ttft_request_ms", "batch's last, ms": "ttft_ms", "tokens/s": "tokens_per_s",
    "speed-up": "speedup", "peak GB": "peak_gb",
}  # fmt: skip


def _plan_table(rows: Iterable[Row], why: str) -> str:
    """A table of plans. why: the column that says why a plan was not chosen, or why there is none."""
    rows = [{**row, "peak_gb": row["peak_memory_bytes"] and row["peak_memory_bytes"] / 1e9} for row in rows]
    names = (*PLAN_COLUMNS.values(), why)
    return table((*PLAN_COLUMNS, "why"), ([_shown(row[name]) for name in names] for row in rows))


def brief_page(recommendation: Recommendation, degrees: Iterable[str]) -> str:
    """An answer for a slide: the verdict, the reasons, charts of plans and of time, and the table.

    degrees: lines on the degrees of parallelism, if any.
    """
    name, baseline = short_name(recommendation.name), recommendation.baseline
    why = [(sentence(what), text) for what, text in reasons(recommendation)]
    first, *more = map(escape, map(with_options, (plan_sentence(recommendation), *recommendation.notes, *degrees)))
    drawn = {
        "Milliseconds per token": first_plans(recommendation),
        "Where a token's time goes": waterfall(recommendation.predicted, baseline, name),
    }
    return html_page(
        f"ridgeplan: {recommendation.plan.workload.model}",
        [
            f"<h1>{escape(verdict(recommendation))}</h1><p>{first}</p><p>{'<br>'.join(more)}</p>",
            "<h2>Why this plan</h2>", table(("", ""), why),
            *_sections(drawn),
            f"<h2>The first {BRIEF_PLANS} plans</h2>", _plan_table(recommendation.table()[:BRIEF_PLANS], "verdict"),
        ],
    )  # fmt: skip


def capacity_page(result: ServingCapacity) -> str:
    """The verdicts, the figures of simulated traffic and its rows."""
    texts = map(with_options, (*result.verdicts, *result.notes))
    rows, notes = result.table(), "".join(f"<li>{escape(text)}</li>" for text in texts)
    drawn = {title.capitalize(): latency_figure(result, name) for name, title in LATENCIES.items()}
    drawn["Throughput against time per token"] = front_figure([result])
    body = table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows])
    head = f"<h1>Serving capacity</h1><p>{escape(result.summary())}</p><ul>{notes}</ul>"
    return html_page("ridgeplan capacity", [head, *_sections(drawn), body])


def _sections(drawn: Mapping[str, go.Figure]) -> Iterator[str]:
    return (f"<h2>{title}</h2>{figure_html(figure)}" for title, figure in drawn.items())


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


WORST = 40  # rows in the table of the largest errors


def validation_page(report: Mapping[str, Any], summary: Sequence[Row]) -> str:
    """The HTML of a report's JSON and of the summaries' JSON."""
    return html_page(
        "ridgeplan: predicted and measured",
        (*_head(report), *_summary(summary), *_rows(report["rows"]), *_regret(report["regret"]), *_notes(report)),
    )


def _head(report: Mapping[str, Any]) -> list[str]:
    software = ", ".join(f"{name} {version}" for name, version in report["software"].items())
    origin = f"{report['device']}, {report['date']}, {software}. Predicted by {report['profile']}."
    return [f"<h1>Predicted and measured: suite {escape(report['suite'])}</h1>", f"<p>{escape(origin)}</p>"]


def _summary(summary: Sequence[Row]) -> list[str]:
    columns = ("", "rows", "signed median", "median", "p90", "worst", "mean", "target", "")
    names = ("signed_median", "median", "p90", "worst", "mean")
    rows = (
        (entry["name"], entry["count"], *(f"{entry[name]:+.1%}" if name == "signed_median" else f"{entry[name]:.1%}"
         for name in names), _target(entry["limits"]), {None: "", True: "met", False: "missed"}[entry["met"]])
        for entry in summary
    )  # fmt: skip
    return ["<h2>Errors and their targets</h2>", table(columns, rows)]


def _target(limits: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {limit:.1%}" for name, limit in limits.items() if limit is not None)


def _rows(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    scatters = (figure_html(results.scatter(alike, unit)) for unit, alike in grouped(rows, "unit").items())
    worst = sorted(rows, key=lambda row: -abs(row["relative_error"]))[:WORST]
    cells = (
        (row["kind"], f"{row['predicted']:.4g}", f"{row['measured']:.4g}", row["unit"],
         f"{row['relative_error']:+.1%}", results.hover(row)) for row in worst
    )  # fmt: skip
    columns = ("", "predicted", "measured", "", "error", "case")
    return [
        "<h2>Predicted over measured</h2>", *scatters,
        "<h2>Errors by kind</h2>", figure_html(results.errors(rows)),
        "<h2>Largest errors</h2>", table(columns, cells),
    ]  # fmt: skip


def _regret(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    cells = (
        (f"{row['model']} {row['context']}x{row['batch']}", row["recommended"], f"{row['recommended_ms']:.4g}",
         row["best"], f"{row['best_ms']:.4g}", f"{row['regret']:.1%}", len(row["candidates"]), row["left_out"])
        for row in rows
    )  # fmt: skip
    columns = ("workload", "recommended", "ms", "best measured", "ms", "regret", "measured", "left out")
    return ["<h2>Regret of the recommended plans</h2>", figure_html(results.regrets(rows)), table(columns, cells)]


def _notes(report: Mapping[str, Any]) -> list[str]:
    how = [f"<p><b>{escape(section)}.</b> {escape(text)}</p>" for section, text in report["methods"].items()]
    skipped = [f"<li>{escape(text)}</li>" for text in report["skipped"]]
    listed = ["<h2>Not run</h2>", f"<ul>{''.join(skipped)}</ul>"] if skipped else []
    return ["<h2>How it was measured</h2>", *how, *listed]


ACCEPTANCE = "conditional acceptance"
SHOWN_RATIO = 0.07  # of the plot by position, or the nearest measured one
SYMBOLS = {"bf16": "circle", "kv4": "square", "w4kv4": "diamond"}


def draft_study_page(document: Mapping[str, Any]) -> str:
    """The HTML of the study's JSON."""
    return _study_page(f"Sparse drafts of {document['model']} on {document['text']}", document["rows"], _draft_context)


def _study_page(title: str, rows: Sequence[Row], parts: Callable[[Sequence[Row]], Iterable[str]]) -> str:
    """A page with a section for the rows of each context."""
    sections = (
        part for context, alike in grouped(rows, "context").items()
        for part in (f"<h2>{context} tokens</h2>", *parts(alike))
    )  # fmt: skip
    return html_page(title, (f"<h1>{escape(title)}</h1>", *sections))


def _draft_context(rows: Sequence[Row]) -> list[str]:
    reached = max(len(row["by_position"]) for row in rows)  # by any draft; not all drafts were ever accepted so far
    positions = [str(position) for position in range(1, 1 + reached)]
    lines = (
        (row["policy"], f"{row['ratio']:g}", row["format"], f"{row['mean']:.3f}", f"{row['tokens_per_round']:.2f}",
         *(f"{value:.3f}" for value in row["by_position"]), *[""] * (reached - len(row["by_position"]))) for row in rows
    )  # fmt: skip
    columns = ("policy", "ratio", "reads", "mean", "tokens a round", *positions)
    plots = (by_position(rows), by_gamma(rows), by_ratio(rows))
    return [*map(figure_html, plots), table(columns, lines)]


def by_position(rows: Sequence[Row]) -> go.Figure:
    """Acceptance by position in a round at one ratio: sets chosen once a round grow stale (SpecAttn, Fig 4)."""
    names = "Conditional acceptance by position", "position of the draft", ACCEPTANCE
    return _at_one_ratio(rows, lambda shares: shares, *names)


def by_gamma(rows: Sequence[Row]) -> go.Figure:
    """Share of accepted drafts over gamma, from the acceptance by position at one gamma (QuantSpec, Fig 9)."""
    names = "Accepted share of drafts by gamma", "gamma", "accepted drafts / (gamma x rounds)"
    return _at_one_ratio(rows, lambda shares: np.cumprod(shares).cumsum() / np.arange(1, 1 + len(shares)), *names)


def _at_one_ratio(rows: Sequence[Row], values: Callable[[Any], Any], title: str, x: str, y: str) -> go.Figure:
    """`values` of each draft's acceptance by position, at the ratio nearest to SHOWN_RATIO, and of all tokens."""
    ratios = {row["ratio"] for row in rows if row["ratio"] < 1}
    shown, figure = min(ratios, key=lambda ratio: abs(ratio - SHOWN_RATIO), default=1.0), go.Figure()
    for row in rows:
        if row["ratio"] in (shown, 1.0):
            shares = np.array(row["by_position"])
            _line(figure, row, list(range(1, 1 + len(shares))), values(shares).tolist())
    return titled(figure, f"{title}, {shown:.0%} of the tokens", x, y)


def by_ratio(rows: Sequence[Row]) -> go.Figure:
    """Mean acceptance by the share of tokens that drafts read."""
    figure = go.Figure()
    for alike in grouped(sorted(rows, key=lambda row: row["ratio"]), "policy", "format").values():
        if len(alike) > 1:
            _line(figure, alike[0], [row["ratio"] for row in alike], [row["mean"] for row in alike])
    figure.update_xaxes(type="log", tickformat=".0%")
    return titled(figure, "Mean conditional acceptance by ratio", "share of the tokens", ACCEPTANCE)


def _line(figure: go.Figure, row: Mapping[str, Any], x: Sequence[float], y: Sequence[float]) -> None:
    hidden = None if row["format"] == "bf16" or row["ratio"] == 1 else "legendonly"
    figure.add_scatter(
        x=x, y=y, name=f"{row['policy']}, {row['format']}", mode="lines+markers", visible=hidden,
        marker_symbol=SYMBOLS.get(row["format"], "circle"),
    )  # fmt: skip


Rows = Sequence[Row]  # of `validate.studies.retrieval.RetrievalRow`
FIGURES = {
    "hit": "Share of the model's own top tokens that are read (Fig 5)",
    "distant": "The same of tokens that are neither first nor recent",
    "mass": "Share of the attention on what is read",
    "overlap": "Share of the choice that was chosen one step before (Fig 6b)",
}


def dapq_study_page(document: Mapping[str, Any]) -> str:
    """The HTML of the study's JSON: its plots."""
    plots = (results.similarities, results.offsets, results.recalls, results.attentions, results.choices)
    return html_page("DapQ", (figure_html(draw(document["figures"])) for draw in plots))


def retrieval_study_page(document: Mapping[str, Any]) -> str:
    """The HTML of the study's JSON."""
    return _study_page(f"Selections of {document['model']} on {document['text']}", document["rows"], _retrieval_context)


def _retrieval_context(rows: Rows) -> Iterator[str]:
    for name, text in FIGURES.items():
        yield figure_html(by_budget(rows, name, text))
    yield figure_html(by_layer(rows))
    lines = ((row["method"], row["budget"], *(f"{row[name]:.3f}" for name in FIGURES)) for row in rows)
    yield table(("method", "budget", *FIGURES), lines)


def by_budget(rows: Rows, name: str, title: str) -> go.Figure:
    """One figure of every method over the budgets."""
    figure = go.Figure()
    for method, alike in grouped(rows, "method").items():
        alike.sort(key=lambda row: row["budget"])
        figure.add_scatter(x=[row["budget"] for row in alike], y=[row[name] for row in alike], name=method,
                           mode="lines+markers")  # fmt: skip
    figure.update_xaxes(type="log")
    return titled(figure, title, "budget in tokens")


def by_layer(rows: Rows) -> go.Figure:
    """Hit rates of every method over the layers, at the largest budget."""
    budget, figure = max(row["budget"] for row in rows), go.Figure()
    for row in rows:
        if row["budget"] == budget:
            figure.add_scatter(x=list(range(len(row["by_layer"]))), y=list(row["by_layer"]), name=row["method"])
    return titled(figure, f"Hit rate by layer, {budget} tokens", "layer")
