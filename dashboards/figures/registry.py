"""All figures of the papers, by name."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeplan.dashboards.figures import dapq, placement, quantspec_intensity, quantspec_speed, specattn, specontext
from ridgeplan.dashboards.figures.paper_figure import FigureError, PaperFigure
from ridgeplan.planner.published import PAPERS
from ridgeplan.roofline.catalog.mistakes import brief

PAPER_FIGURES: tuple[PaperFigure, ...] = (
    *quantspec_intensity.FIGURES,
    *quantspec_speed.FIGURES,
    *specontext.FIGURES,
    *placement.FIGURES,
    *specattn.FIGURES,
    *dapq.FIGURES,
)


def figures_named(names: Sequence[str]) -> tuple[PaperFigure, ...]:
    """Figures by their names or their papers' names; all for none. Raises FigureError with what is allowed."""
    known = [*PAPERS, *(one.name for one in PAPER_FIGURES)]
    unknown = next((name for name in names if name not in known), None)
    if unknown:
        raise FigureError(f"unknown figure {brief(unknown)}; allowed: {', '.join(known)}")
    return tuple(one for one in PAPER_FIGURES if not names or one.name in names or one.paper in names)
