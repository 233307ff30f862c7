"""Answers in Python: one line, HTML that is escaped, data frames, figures."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from ridgeplan.planner.render.plots import draw
from ridgeplan.planner.render.tables import SHOWN_ROWS, Bars, Lines, NotInstalled, Table, labels, table_html

ROWS = [
    {"gpu": "h200", "context": 8192, "batch": 1, "ms": 2.0, "low": 1.5, "high": 3.0},
    {"gpu": "h200", "context": 4096, "batch": 1, "ms": 1.0, "low": 0.5, "high": 2.0},
    {"gpu": "a6000", "context": 4096, "batch": 1, "ms": 5.0, "low": 4.0, "high": 7.0},
]


@dataclass(frozen=True, repr=False)
class Answer(Table):
    count: int = 1

    chart = Bars("ms", "ms per token", "low", "high")
    names = ("gpu", "context")

    def table(self) -> list[dict[str, Any]]:
        return ROWS

    def summary(self) -> str:
        return "<b>three</b> rows"


def test_an_answer_is_one_line() -> None:
    assert repr(Answer()) == str(Answer()) == "Answer(<b>three</b> rows)"


def test_a_data_frame_has_the_rows() -> None:
    frame = Answer().to_pandas()
    assert list(frame.columns) == list(ROWS[0])
    assert frame["ms"].tolist() == [2.0, 1.0, 5.0]


def test_without_pandas_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NotInstalled, match=r"^to_pandas needs pandas, which is not installed: pip install pandas$"):
        Answer().to_pandas()


def test_html_is_escaped_and_cut() -> None:
    html = table_html("a < b", [{"name": "<script>", "value": 1 / 3, "absent": None}] * (SHOWN_ROWS + 2))
    assert "<p>a &lt; b</p>" in html
    assert "<script>" not in html
    assert html.count("<td>0.3333</td>") == SHOWN_ROWS
    assert html.endswith("<p>2 more rows</p>")
    assert "&lt;b&gt;three" in Answer()._repr_html_()


def test_bars_have_the_ends_of_their_bands() -> None:
    (bar,) = Answer().plot().data
    assert list(bar.y) == ["h200, 8192", "h200, 4096", "a6000, 4096"]
    assert list(bar.x) == [2.0, 1.0, 5.0]
    assert (list(bar.error_x.array), list(bar.error_x.arrayminus)) == ([1.0, 1.0, 2.0], [0.5, 0.5, 1.0])


def test_lines_run_over_what_varies_with_one_for_each_of_the_rest() -> None:
    figure = draw(ROWS, Lines(("batch", "context"), "ms", "ms", ("gpu",)), (), "title")
    assert figure.layout.xaxis.title.text == "context"  # all batches are the same
    assert {line.name: (list(line.x), list(line.y)) for line in figure.data} == {
        "h200": ([4096, 8192], [1.0, 2.0]), "a6000": ([4096], [5.0]),
    }  # fmt: skip


def test_labels_name_what_differs() -> None:
    assert labels(ROWS, ("gpu", "batch", "context")) == ["h200, 8192", "h200, 4096", "a6000, 4096"]
    assert labels(ROWS[:1], ("gpu", "batch")) == ["1"]


def test_planning_imports_neither_pandas_nor_plotly() -> None:
    code = "import sys; from ridgeplan import planner; print({'pandas', 'plotly'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
