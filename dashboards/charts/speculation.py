"""The speed-up of speculation over gamma and acceptance, with the optimum."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from ridgeplan.dashboards.charts.style import HEAT, PURPLE, RED, SKY, bar_above, below, styled
from ridgeplan.planner.curves.speculation_map import SpeculationMap

WHITE = "#ffffff"


def speculation(found: SpeculationMap) -> go.Figure:
    """A map of the speed-up over plain decoding: drafts of a round by conditional acceptance.

    The dashed line is the best gamma at each acceptance, the star the optimum at the predicted acceptance, whose band
    is the bar through it.
    """
    gamma, gain = found.optimum
    figure = go.Figure(
        go.Heatmap(
            x=found.gammas, y=found.acceptances, z=found.speedup, colorscale=HEAT,
            colorbar=bar_above("speed-up"),
            hovertemplate="gamma %{x}, acceptance %{y:.2f}: %{z:.2f}x<extra></extra>",
        )
    )  # fmt: skip
    figure.add_scatter(
        name="as fast as plain decoding", x=found.gammas, y=break_even(found), mode="lines", hoverinfo="skip",
        line={"color": SKY, "width": 4},
    )  # fmt: skip
    worthwhile = found.best_gammas > 0
    figure.add_scatter(
        name="best gamma", x=found.best_gammas[worthwhile], y=found.acceptances[worthwhile], mode="lines",
        line={"color": PURPLE, "dash": "dash", "width": 3}, hoverinfo="skip",
    )  # fmt: skip
    known = found.predicted
    figure.add_scatter(
        name=f"optimum: gamma {gamma}, {gain:.2f}x", x=[gamma], y=[known.best], mode="markers",
        marker={"symbol": "star", "size": 18, "color": RED, "line": {"color": WHITE, "width": 1}},
        error_y={"type": "data", "symmetric": False, "array": [known.high - known.best],
                 "arrayminus": [known.best - known.low], "color": RED, "thickness": 3},
        hovertemplate=f"predicted acceptance {known.best:.3f} ({known.low:.3f} to {known.high:.3f})<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="gamma (drafts of a round)", tickvals=found.gammas, showgrid=False)
    ends = np.array([found.acceptances[0], found.acceptances[-1]])
    figure.update_yaxes(title_text="conditional acceptance", range=list(ends), showgrid=False)
    return styled(figure, height=480, top=70, legend=below(-0.16))


def break_even(found: SpeculationMap) -> np.ndarray:
    """The acceptance from which each gamma is faster than plain decoding; NaN where none of the map's is: [gammas]."""
    rising = (np.interp(1.0, column, found.acceptances, np.nan, np.nan) for column in found.speedup.T)
    return np.array(list(rising))
