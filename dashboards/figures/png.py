"""PNG files of figures, which kaleido draws in a browser."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import plotly.graph_objects as go
import plotly.io as pio

from ridgeplan.dashboards.figures.paper_figure import FigureError

WIDTH, SCALE = 1000, 2  # pixels, and how many of the file are one of them


def can_draw() -> bool:
    """Whether kaleido is installed."""
    return find_spec("kaleido") is not None


def write_pngs(figures: Mapping[Path, go.Figure]) -> None:
    """Writes each figure to its path, all in one start of the browser. Raises FigureError without kaleido or Chrome."""
    if not can_draw():
        raise FigureError("PNG files need kaleido; allowed: html, csv, or `pip install 'ridgeplan[png]'` first")
    heights = [figure.layout.height for figure in figures.values()]
    try:
        pio.write_images([*figures.values()], [*figures], format="png", width=WIDTH, height=heights, scale=SCALE)
    except RuntimeError as error:  # of kaleido: no Chrome is there, or it does not start
        told = " ".join(str(error).split())
        raise FigureError(f"PNG files need a Chrome that starts; allowed: html, csv. {told}") from error
