"""A figure of a paper: what it is called, what may be varied, the rows that it shows, and how they are drawn."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from ridgeplan.roofline.catalog.mistakes import brief

Value = str | int | float
Row = Mapping[str, Any]
GPUS = ("a6000", "a100-80gb", "h100-sxm", "h200", "b200", "l40s", "rtx4090")


class FigureError(ValueError):
    """A figure that does not exist, or a value that one of its sliders does not have."""


@dataclass(frozen=True)
class Slider:
    """An input of a figure: its values in order, of which the first row of a paper's caption is the default."""

    name: str
    label: str
    values: tuple[Value, ...]
    default: Value

    def read(self, text: Value) -> Value:
        """The value that a text means. Raises FigureError with what is allowed."""
        found = next((value for value in self.values if str(value) == str(text)), None)
        if found is None:
            raise FigureError(f"{self.name} is {brief(text)}; allowed: {', '.join(map(str, self.values))}")
        return found


def gpu_slider(default: str) -> Slider:
    """The GPU, of which the paper's own is the default."""
    return Slider("gpu", "GPU", tuple(dict.fromkeys((default, *GPUS))), default)


@dataclass(frozen=True)
class PaperFigure:
    """One figure. `rows` takes the sliders' values by name and returns what is shown, one flat mapping per point.

    `draw` takes these rows alone, so a CSV of them holds all that the figure shows.
    """

    name: str
    paper: str
    figure: str
    title: str
    rows: Callable[..., list[Row]]
    draw: Callable[[Sequence[Row]], go.Figure]
    sliders: tuple[Slider, ...] = ()

    def settings(self, **given: Value) -> dict[str, Value]:
        """A value for every slider: the given one, or the paper's. Raises FigureError."""
        known = {slider.name: slider for slider in self.sliders}
        stray = next((name for name in given if name not in known), None)
        if stray:
            raise FigureError(f"{self.name} has no {brief(stray)}; allowed: {', '.join(known) or 'nothing'}")
        return {name: slider.read(given.get(name, slider.default)) for name, slider in known.items()}

    def data(self, **given: Value) -> list[Row]:
        """The rows at these settings. Raises FigureError."""
        return self.rows(**self.settings(**given))

    def plot(self, **given: Value) -> go.Figure:
        """The plotly figure at these settings. Raises FigureError."""
        return self.draw(self.data(**given))


def csv_text(rows: Sequence[Row]) -> str:
    """Rows as CSV with a header; an absent value is empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
