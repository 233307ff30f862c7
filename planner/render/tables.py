"""Answers as tables: columns of a plan, one line, HTML in a notebook, data frame and figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from ridgeplan.planner.extras import pip_command
from ridgeplan.planner.prediction import Prediction
from ridgeplan.planner.quality import quality_of
from ridgeplan.planner.quantities import size_text, time_text
from ridgeplan.roofline.plan.plan import Plan

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go


@dataclass(frozen=True)
class Bars:
    """A figure with a bar for each row: its length, and the columns of the ends of its band, if it has one."""

    length: str
    unit: str
    low: str = ""
    high: str = ""


@dataclass(frozen=True)
class Lines:
    """A figure of one column over another, with a line for each combination of the other named columns."""

    over: tuple[str, ...]  # the first of them that varies
    height: str
    unit: str
    by: tuple[str, ...] = ()


def cell_text(value: Any) -> str:
    """A value as a table shows it; floats with four digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "" if value is None else str(value)


def labels(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """A label for each row: its values in the columns `names` that vary, or in the last column if none varies."""
    varying = [name for name in names if len({row.get(name) for row in rows}) > 1] or list(names[-1:])
    return [", ".join(cell_text(row.get(name)) for name in varying) for row in rows]


def plan_row(plan: Plan, name: str, predicted: Prediction) -> dict[str, Any]:
    """Flat values of one plan. tokens/s is of the batch."""
    workload = plan.workload
    return {
        "model": workload.model, "gpu": workload.hardware, "context": workload.context, "batch": workload.batch,
        "plan": name, "gamma": predicted.gamma, **asdict(predicted.best), "tpot_low_ms": predicted.low.tpot_ms,
        "tpot_high_ms": predicted.high.tpot_ms, "speedup": predicted.speedup, "quality": str(quality_of(plan)),
        "source": predicted.source,
    }  # fmt: skip


def plan_text(plan: Plan, name: str, predicted: Prediction, plain: str = "plain decoding") -> str:
    """A plan's headline figures in one line. plain: over what the speed-up is."""
    workload, best = plan.workload, predicted.best
    return (
        f"{name} for {workload.model} on {workload.devices}, {workload.context} tokens, batch {workload.batch}: "
        f"{time_text(best.tpot_ms)} per token, {predicted.speedup:.2f}x {plain}, "
        f"{size_text(best.peak_memory_bytes)}, {predicted.source}"
    )


SHOWN_ROWS = 20  # of a table in a notebook


class NotInstalled(ImportError):
    """An optional package is missing."""


class Table:
    """A mixin for frozen dataclasses (repr=False) that provide `table()` and `summary()`."""

    chart: ClassVar[Bars | Lines]
    names: ClassVar[tuple[str, ...]] = ()  # columns that identify a row

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
        """A plotly figure of the rows. Raises NotInstalled without plotly."""
        try:
            from ridgeplan.planner.render.plots import draw  # imports plotly, which takes longer than a plan
        except ImportError as error:
            raise NotInstalled(f"plot needs plotly, which is not installed: {pip_command('plotly')}") from error
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
