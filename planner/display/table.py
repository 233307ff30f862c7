"""Answers that are also tables: their line, their HTML in a notebook, their data frame and their figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from ridgeplan.planner.display.marks import Bars, Lines, cell_text

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go

SHOWN_ROWS = 20  # of a table in a notebook


class NotInstalled(ImportError):
    """A package that is only needed for what was just asked for."""


class Table:
    """A mixin of frozen dataclasses (repr=False): they say what their rows are, and in one line what they are."""

    chart: ClassVar[Bars | Lines]
    names: ClassVar[tuple[str, ...]] = ()  # columns that tell the rows apart

    def table(self) -> list[dict[str, Any]]:
        """Flat rows of plain values, for CSV and data frames."""
        raise NotImplementedError

    def summary(self) -> str:
        """The answer in one line."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary()})"

    def _repr_html_(self) -> str:
        return table_html(self.summary(), self.table())

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame. Raises NotInstalled without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise NotInstalled("to_pandas needs pandas, which is not installed: pip install pandas") from error
        return pandas.DataFrame(self.table())

    def plot(self) -> go.Figure:
        """A plotly figure of the rows."""
        from ridgeplan.planner.display.plot import draw  # imports plotly, which takes longer than a plan

        return draw(self.table(), self.chart, self.names, self.summary())


def table_html(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The first rows as an HTML table, below a line of text."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = _line("th", columns)
    body = "".join(_line("td", [cell_text(row.get(name)) for name in columns]) for row in rows[:SHOWN_ROWS])
    more = f"<p>{len(rows) - SHOWN_ROWS} more rows</p>" if len(rows) > SHOWN_ROWS else ""
    return f"<p>{escape(title)}</p><table><thead>{head}</thead><tbody>{body}</tbody></table>{more}"


def _line(kind: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"
