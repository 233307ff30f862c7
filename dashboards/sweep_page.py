"""A sweep as one HTML file: a heat map of time per token for every question, and the table of all rows."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from ridgeplan.dashboards.html_page import figure_html, html_page, table
from ridgeplan.planner.interface.quantities import tokens_text
from ridgeplan.planner.questions.grid_sweep import GridSweep, SweepPoint
from ridgeplan.planner.search.plan_map import PlanMap

SHOWN = ("context", "batch", "plan", "gamma", "tpot_ms", "ttft_ms", "tokens_per_s", "peak_memory_bytes", "speedup",
         "why_not")  # fmt: skip


def sweep_page(found: GridSweep) -> str:
    """The page. Names and values are shown as text, whatever they hold."""
    parts = ["<h1>Fastest plans</h1><p>TTFT and tokens/s are the whole batch's; blank where no plan fits.</p>"]
    for point in found.points:
        parts += [] if point.found is None else [figure_html(tpot_map(point, point.found))]
        parts.append(table(SHOWN, [[_shown(row[name]) for name in SHOWN] for row in point.rows()]))
    return html_page("ridgeplan sweep", parts)


def tpot_map(point: SweepPoint, found: PlanMap) -> go.Figure:
    """Milliseconds per token over context and batch, with the plan's name and gamma in every cell's label."""
    times = np.where(found.fits, 1e3 * found.tpot_s, np.nan)
    labels = [[f"{name}, gamma {gamma}" for name, gamma in zip(*pair, strict=True)]
              for pair in zip(found.names, found.gamma, strict=True)]  # fmt: skip
    heat = go.Heatmap(
        x=[str(batch) for batch in found.batches], y=[tokens_text(one) for one in found.contexts],
        z=np.log10(times), text=labels, customdata=times, colorscale="Cividis",
        colorbar={"title": "ms per token", **_ticks(times)},
        hovertemplate="context %{y}, batch %{x}<br>%{customdata:.3g} ms per token<br>%{text}<extra></extra>",
    )  # fmt: skip
    figure = go.Figure(heat)
    asked = ", ".join(f"{name} {value}" for name, value in point.asked.items())
    title = f"{point.question.shape.name} on {point.question.profile.hardware.name}"
    figure.update_layout(title=f"{title}, {asked}" if asked else title, xaxis_title="batch", yaxis_title="context",
                         xaxis_type="category", yaxis_type="category")  # fmt: skip
    return figure


def _ticks(times: np.ndarray) -> dict[str, list[float] | list[str]]:
    """Marks of the logarithmic colours, in milliseconds."""
    known = times[np.isfinite(times)]
    if not known.size:
        return {}
    marks = np.geomspace(known.min(), known.max(), 5)
    return {"tickvals": [float(mark) for mark in np.log10(marks)], "ticktext": [f"{mark:.3g}" for mark in marks]}


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
