"""The plans of an answer beside each other."""

from __future__ import annotations

import plotly.graph_objects as go

from ridgeplan.dashboards.charts.style import BLUE, GOLD, GREEN, GREY, PURPLE, RED, below, styled
from ridgeplan.planner import Recommendation

VERDICT_COLORS = {"recommended": BLUE, "within the noise": GREEN, "slower": GREY, "larger": GREY, "quality": GOLD,
                  "does not fit": RED, "estimated only": PURPLE, "not calibrated": PURPLE}  # fmt: skip


def alternatives(recommendation: Recommendation) -> go.Figure:
    """Milliseconds per token of the recommended plan and all others, with bands, coloured by why they lost."""
    rows = [(recommendation.name, recommendation.predicted, "recommended")]
    rows += [(other.preset, other.predicted, other.rejected) for other in recommendation.alternatives]
    figure = go.Figure()
    for verdict, color in VERDICT_COLORS.items():
        alike = [row for row in rows if row[2].startswith(verdict)]
        if alike:
            names, predicted, reasons = zip(*alike, strict=True)
            figure.add_bar(
                name=verdict, y=names, x=[one.best.tpot_ms for one in predicted], orientation="h", marker_color=color,
                error_x={"type": "data", "symmetric": False, "thickness": 1, "color": GREY,
                         "array": [one.high.tpot_ms - one.best.tpot_ms for one in predicted],
                         "arrayminus": [one.best.tpot_ms - one.low.tpot_ms for one in predicted]},
                customdata=reasons, hovertemplate="%{y}: %{x:.3g} ms per token<br>%{customdata}",
            )  # fmt: skip
    figure.update_xaxes(title_text="ms per token")
    figure.update_yaxes(categoryorder="array", categoryarray=[name for name, _, _ in rows][::-1], automargin=True)
    return styled(figure, height=140 + 22 * len(rows), legend=below(-60 / (22 * len(rows))))
