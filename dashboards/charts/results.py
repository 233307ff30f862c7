"""Figures of measured results: the suite, and the study of DapQ. Pure functions: JSON values in, figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ridgeplan.dashboards.charts.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, titled
from ridgeplan.dashboards.rows import Row, grouped

SECTION_COLORS = {"kernels": BLUE, "steps": ORANGE, "outputs": RED, "generations": GREEN, "regret": PURPLE}
WITHIN = 0.1  # the band around a perfect prediction


def scatter(rows: Sequence[Row], unit: str) -> go.Figure:
    """Predicted over measured of all rows of one unit, by kind, with a band of 10% around equality (log-log)."""
    figure = go.Figure()
    ends = _ends(rows)
    for factor, dash in ((1 - WITHIN, "dot"), (1.0, "solid"), (1 + WITHIN, "dot")):
        figure.add_scatter(
            x=ends, y=[factor * end for end in ends], mode="lines", hoverinfo="skip", showlegend=False,
            line={"color": GREY, "dash": dash, "width": 1},
        )  # fmt: skip
    for kind, alike in grouped(rows, "kind").items():
        figure.add_scatter(
            name=kind, x=[row["measured"] for row in alike], y=[row["predicted"] for row in alike], mode="markers",
            marker={"size": 7, "opacity": 0.7}, text=[hover(row) for row in alike],
            hovertemplate="%{text}<br>measured %{x:.4g}, predicted %{y:.4g}",
        )  # fmt: skip
    label = f", {unit}" if unit else ""
    figure.update_xaxes(type="log", title_text=f"measured{label}")
    figure.update_yaxes(type="log", title_text=f"predicted{label}")
    return figure.update_layout(template="plotly_white", height=520)


def errors(rows: Sequence[Row]) -> go.Figure:
    """Signed errors in percent, a box with all points for each kind."""
    figure = go.Figure()
    by_kind = grouped(rows, "kind")
    for kind, alike in by_kind.items():
        figure.add_box(
            name=kind, x=[100 * row["relative_error"] for row in alike], boxpoints="all", jitter=0.4, pointpos=0,
            marker={"size": 4, "color": SECTION_COLORS[alike[0]["section"]]}, text=[hover(row) for row in alike],
            hovertemplate="%{text}<br>%{x:+.1f}%",
        )  # fmt: skip
    figure.add_vline(0, line_color=RED, line_width=1)
    figure.update_xaxes(title_text="predicted over measured minus 1, %")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure.update_layout(template="plotly_white", height=160 + 34 * len(by_kind), showlegend=False)


def regrets(rows: Sequence[Row]) -> go.Figure:
    """Regret in percent of every workload."""
    figure = go.Figure()
    figure.add_bar(
        x=[100 * row["regret"] for row in rows], y=[f"{row['model']} {row['context']}x{row['batch']}" for row in rows],
        orientation="h", marker_color=PURPLE, text=[f"{row['recommended']}; best: {row['best']}" for row in rows],
        textposition="none", hovertemplate="%{y}: %{x:.1f}%<br>%{text}",
    )  # fmt: skip
    figure.update_xaxes(title_text="time per token of the recommended plan over the best candidate's minus 1, %")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure.update_layout(template="plotly_white", height=140 + 24 * len(rows))


def hover(row: Row) -> str:
    """What a point is."""
    return " ".join(filter(None, (row["model"], row["case"], f"[{row['source']}]")))


def _ends(rows: Sequence[Row]) -> list[float]:
    values = [row[name] for row in rows for name in ("predicted", "measured") if row[name] > 0]
    return [min(values), max(values)]


Rows = Sequence[Row]  # of `validate.studies.dapq.summary`


def similarities(rows: Rows) -> go.Figure:
    """Bars of Table 1: content x position, after and before RoPE."""
    figure = go.Figure()
    for when in ("after", "before"):
        alike = [row for row in _of(rows, "similarity") if row["figure"][3] == when]
        names = [f"{row['figure'][1]} content, {row['figure'][2]} position" for row in alike]
        figure.add_bar(x=names, y=_means(alike), error_y={"array": _deviations(alike)}, name=f"{when} RoPE")
    return titled(figure, "Cosine similarity of queries to the true ones")


def offsets(rows: Rows) -> go.Figure:
    """The curve of Figure 2b."""
    rows = _of(rows, "offset")
    figure = go.Figure(go.Scatter(x=[row["figure"][1] for row in rows], y=_means(rows),
                                  error_y={"array": _deviations(rows)}, mode="lines+markers"))  # fmt: skip
    figure.update_xaxes(type="log")
    return titled(figure, "Similarity of the true tokens' queries at earlier positions", "positions too early")


def recalls(rows: Rows) -> go.Figure:
    """Figure 3, a panel for each budget."""
    rows = _of(rows, "recall")
    budgets = sorted({row["figure"][3] for row in rows})
    titles = [f"budget {budget}" for budget in budgets]
    figure = make_subplots(cols=len(budgets), shared_yaxes=True, subplot_titles=titles)
    for column, budget in enumerate(budgets, start=1):
        _lines(figure, [row for row in rows if row["figure"][3] == budget], {"row": 1, "col": column})
    return titled(figure, "Recall of the prompt tokens that the continuation reads most", "window")


def attentions(rows: Rows) -> go.Figure:
    """The figures of Table 8."""
    figure = go.Figure()
    _lines(figure, _of(rows, "attention"), {})
    return titled(figure, "Cosine similarity of attention to the continuation's", "window")


def choices(rows: Rows) -> go.Figure:
    """Figures 4a and 4c: recall by content, position and head aggregation of pseudo queries, a panel for each."""
    rows = _of(rows, "choice")
    axes = list(dict.fromkeys(row["figure"][1] for row in rows))
    figure = make_subplots(cols=max(1, len(axes)), shared_yaxes=True, subplot_titles=axes)
    for column, axis in enumerate(axes, start=1):
        of_axis = [row for row in rows if row["figure"][1] == axis]
        for budget in dict.fromkeys(row["figure"][3] for row in of_axis):
            of_budget = [row for row in of_axis if row["figure"][3] == budget]
            names = [row["figure"][2] for row in of_budget]
            figure.add_bar(x=names, y=_means(of_budget), name=f"{axis}, {budget} tokens", row=1, col=column)
    return titled(figure, "Recall by the choice of pseudo queries", "choice")


def _lines(figure: go.Figure, rows: Rows, place: Mapping[str, int]) -> None:
    """A line for each method, over windows."""
    for method in dict.fromkeys(row["figure"][1] for row in rows):
        method_rows = [row for row in rows if row["figure"][1] == method]
        line = go.Scatter(x=[row["figure"][2] for row in method_rows], y=_means(method_rows), name=method,
                          mode="lines+markers", legendgroup=method, showlegend=place.get("col", 1) == 1)  # fmt: skip
        figure.add_trace(line, **place)


def _of(rows: Rows, kind: str) -> Rows:
    return [row for row in rows if row["figure"][0] == kind]


def _means(rows: Rows) -> list[float]:
    return [row["mean"] for row in rows]


def _deviations(rows: Rows) -> list[float]:
    return [row["deviation"] for row in rows]
