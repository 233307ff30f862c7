"""The papers' figures by name, made from the model: rows of plain values, and pure plotly functions that draw them.

Not here: charts of answers and of measurements (dashboards/charts), and the figures' numbers (validate/papers).
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeplan.dashboards.figures import dapq, quantspec, specattn, specontext
from ridgeplan.dashboards.figures.paper_figure import FigureError, PaperFigure
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.validate.papers.rows import PAPERS

PAPER_FIGURES: tuple[PaperFigure, ...] = (*quantspec.FIGURES, *specontext.FIGURES, *specattn.FIGURES, *dapq.FIGURES)


def figures_named(names: Sequence[str]) -> tuple[PaperFigure, ...]:
    """Figures by their names or their papers' names; all for none. Raises FigureError with what is allowed."""
    known = [*PAPERS, *(figure.name for figure in PAPER_FIGURES)]
    unknown = next((name for name in names if name not in known), None)
    if unknown:
        raise FigureError(f"unknown figure {brief(unknown)}; allowed: {', '.join(known)}")
    return tuple(figure for figure in PAPER_FIGURES if not names or figure.name in names or figure.paper in names)
