"""A figure of a paper: what may be varied, its rows, how they are drawn, the shared look, and PNG files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import plotly.graph_objects as go
import plotly.io as pio

from ridgeplan.dashboards.charts.style import SERIES
from ridgeplan.dashboards.rows import Row
from ridgeplan.planner.extras import pip_command
from ridgeplan.roofline.catalog.validation import brief

Value = str | int | float
GPUS = ("a6000", "a100-80gb", "h100-sxm", "h200", "b200", "l40s", "rtx4090")


class FigureError(ValueError):
    """A figure that does not exist, or a value that one of its sliders does not have."""


@dataclass(frozen=True)
class Slider:
    """An input of a figure: its values in order, and the paper's own as the default."""

    name: str
    label: str
    values: tuple[Value, ...]
    default: Value

    def read(self, text: Value) -> Value:
        """The value that a text means. Raises FigureError with what is allowed."""
        value = next((value for value in self.values if str(value) == str(text)), None)
        if value is None:
            raise FigureError(f"{self.name} is {brief(text)}; allowed: {', '.join(map(str, self.values))}")
        return value


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

    def settings(self, **settings: Value) -> dict[str, Value]:
        """A value for every slider: the given one, or the paper's. Raises FigureError."""
        known = {slider.name: slider for slider in self.sliders}
        stray = next((name for name in settings if name not in known), None)
        if stray:
            raise FigureError(f"{self.name} has no {brief(stray)}; allowed: {', '.join(known) or 'nothing'}")
        return {name: slider.read(settings.get(name, slider.default)) for name, slider in known.items()}

    def data(self, **settings: Value) -> list[Row]:
        """The rows at these settings. Raises FigureError."""
        return self.rows(**self.settings(**settings))

    def plot(self, **settings: Value) -> go.Figure:
        """The plotly figure at these settings. Raises FigureError."""
        return self.draw(self.data(**settings))


def colors_of(names: Iterable[str]) -> Mapping[str, str]:
    """A colour for each distinct name, in the order of their first appearance."""
    return {name: SERIES[index % len(SERIES)] for index, name in enumerate(dict.fromkeys(names))}


WIDTH, SCALE = 1000, 2  # pixels, and how many of the file are one of them


def can_draw() -> bool:
    """Whether kaleido is installed."""
    return find_spec("kaleido") is not None


def write_pngs(figures: Mapping[Path, go.Figure]) -> None:
    """Writes each figure to its path, all in one start of the browser. Raises FigureError without kaleido or Chrome."""
    if not can_draw():
        raise FigureError(f"PNG files need kaleido: `{pip_command('kaleido')}`; allowed without it: other formats")
    heights, widths = ([getattr(figure.layout, side) for figure in figures.values()] for side in ("height", "width"))
    widths = [width or WIDTH for width in widths]
    try:
        pio.write_images([*figures.values()], [*figures], format="png", width=widths, height=heights, scale=SCALE)
    except RuntimeError as error:  # of kaleido: no Chrome is there, or it does not start
        reason = " ".join(str(error).split())
        raise FigureError(f"PNG files need a Chrome that starts; `plotly_get_chrome` installs it. {reason}") from error
