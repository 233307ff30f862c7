"""The tab Papers: each figure from the model, with its sliders and its rows as CSV."""

from __future__ import annotations

from typing import Any

import streamlit as st

from ridgeplan.dashboards.charts.style import without_walls
from ridgeplan.dashboards.figures import PAPER_FIGURES
from ridgeplan.dashboards.figures.paper_figure import PaperFigure, Slider, Value
from ridgeplan.dashboards.page.inputs import IN_URL
from ridgeplan.dashboards.rows import csv_text

PAPERS = {"quantspec": "QuantSpec", "specontext": "SpeContext", "specattn": "SpecAttn", "dapq": "DapQ"}
FIRST = "quantspec-table3-speedup"
KEPT = 64  # figures whose rows the server remembers


def show() -> None:
    """The choice of a figure, its sliders, the figure, and its rows."""
    figures = {title(figure): figure for figure in PAPER_FIGURES}
    first = next(place for place, figure in enumerate(figures.values()) if figure.name == FIRST)
    chosen = figures[st.selectbox("Figure", list(figures), first, key="figure", bind=IN_URL)]
    values = _sliders(chosen)
    rows = rows_of(chosen.name, values)
    st.plotly_chart(without_walls(chosen.draw(rows)), key="paper_figure", alt=title(chosen))
    st.download_button("Download CSV", csv_text(rows), f"{chosen.name}.csv", "text/csv", icon=":material/download:",
                       on_click="ignore")  # fmt: skip


def title(figure: PaperFigure) -> str:
    """The paper, the figure's number, and what it shows."""
    return f"{PAPERS[figure.paper]}, {figure.figure}: {figure.title}"


@st.cache_data(max_entries=KEPT, show_spinner=False)
def rows_of(name: str, values: dict[str, Value]) -> list[dict[str, Any]]:
    """The rows of a figure at its sliders' values."""
    (figure,) = (figure for figure in PAPER_FIGURES if figure.name == name)
    return [dict(row) for row in figure.data(**values)]


def _sliders(figure: PaperFigure) -> dict[str, Value]:
    """A slider for each of the figure's numbers, and a list for each of its names, side by side."""
    if not figure.sliders:
        return {}
    columns = st.columns(len(figure.sliders))
    pairs = zip(columns, figure.sliders, strict=True)
    return {slider.name: _slider(column, figure, slider) for column, slider in pairs}


def _slider(column: Any, figure: PaperFigure, slider: Slider) -> Value:
    key = f"{figure.name}-{slider.name}"
    value: Value
    if isinstance(slider.default, str):
        value = column.selectbox(slider.label, slider.values, slider.values.index(slider.default), key=key, bind=IN_URL)
    else:
        value = column.select_slider(slider.label, slider.values, slider.default, key=key, bind=IN_URL)
    return value
