"""Every figure: its rows, its drawing, its sliders, its CSV."""

import csv
import json
from io import StringIO

import pytest

from ridgeplan.dashboards.figures import PAPER_FIGURES, figures_named
from ridgeplan.dashboards.figures.paper_figure import FigureError, PaperFigure, csv_text

NAMES = [figure.name for figure in PAPER_FIGURES]


@pytest.mark.parametrize("figure", PAPER_FIGURES, ids=NAMES)
def test_a_figure_draws_its_rows_which_are_plain_values(figure: PaperFigure) -> None:
    rows = figure.data()
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert not any(isinstance(value, (list, dict)) for row in rows for value in row.values())
    drawn = figure.draw(rows)
    assert drawn.data
    assert drawn.layout.title.text
    assert len(list(csv.DictReader(StringIO(csv_text(rows))))) == len(rows)


@pytest.mark.parametrize("figure", [one for one in PAPER_FIGURES if one.sliders], ids=lambda one: one.name)
def test_the_last_value_of_every_slider_draws_too(figure: PaperFigure) -> None:
    last = {slider.name: slider.values[-1] for slider in figure.sliders}
    rows = figure.data(**last)
    assert all(row[name] == value for row in rows for name, value in last.items() if row.get(name))
    assert figure.draw(rows).data


def test_every_default_is_one_of_the_values() -> None:
    assert all(slider.default in slider.values for figure in PAPER_FIGURES for slider in figure.sliders)


def test_names_are_unique_and_papers_name_all_their_figures() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert figures_named([]) == PAPER_FIGURES
    assert {one.paper for one in figures_named(["dapq", "quantspec-fig4"])} == {"dapq", "quantspec"}
    assert [one.name for one in figures_named(["quantspec-fig4"])] == ["quantspec-fig4"]


def test_values_are_read_from_text_and_wrong_ones_are_refused() -> None:
    (figure,) = figures_named(["quantspec-fig4"])
    assert figure.settings(gamma="6") == {"gpu": "a6000", "gamma": 6}
    with pytest.raises(FigureError, match=r"gamma is '7'; allowed: 1, 2, 3"):
        figure.data(gamma="7")
    with pytest.raises(FigureError, match=r"quantspec-fig4 has no 'ratio'; allowed: gpu, gamma"):
        figure.data(ratio=0.1)
    with pytest.raises(FigureError, match=r"unknown figure 'fig4'; allowed: quantspec"):
        figures_named(["fig4"])


def test_absent_values_are_empty_in_csv() -> None:
    assert csv_text([{"a": 1, "b": None}, {"a": "x, y", "c": 2.5}]) == 'a,b,c\n1,,\n"x, y",,2.5\n'
