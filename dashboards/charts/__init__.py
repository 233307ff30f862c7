"""Plotly figures of recommendations and predictions, one family a file. Pure functions: values in, figure out.

Not here: widgets (dashboards/page), the papers' figures (dashboards/figures), and the values themselves (planner).
"""

from ridgeplan.dashboards.charts.capacity import capacity_map
from ridgeplan.dashboards.charts.memory import memory_over_context
from ridgeplan.dashboards.charts.plans import alternatives, front_of, times_over_context, trade_offs
from ridgeplan.dashboards.charts.rooflines import ridge_plane, roofline
from ridgeplan.dashboards.charts.rounds import round_parts, speculation, waterfall
from ridgeplan.dashboards.charts.style import PLAIN
from ridgeplan.dashboards.charts.traffic import front_figure, latency_figure

__all__ = [
    "PLAIN", "alternatives", "capacity_map", "front_figure", "front_of", "latency_figure", "memory_over_context",
    "ridge_plane", "roofline", "round_parts", "speculation", "times_over_context", "trade_offs", "waterfall",
]  # fmt: skip
