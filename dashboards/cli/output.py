"""Output of commands on the terminal: JSON, tables, notes and progress."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.files import json_text, write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from ridgeplan.runtime.progress import OnProgress

PIPE_COLUMNS = 140  # width of tables without a terminal
TEXT_COLUMNS = 80  # width of paragraphs
BAR_COLUMNS = 40  # of the longest bar of a chart
LINE_S = 5.0  # between lines of progress where there is no terminal
ESTIMATED_FROM = 0.25  # of the steps; the first ones also load, compile and allocate, and say little of the others


@cache
def _controls() -> re.Pattern[str]:
    from ridgeplan.roofline.catalog.validation import UNPRINTABLE  # takes 50 ms that --help does without

    return re.compile(rf"(?![\n\t])[{UNPRINTABLE}]")


def printable(text: str) -> str:
    """`text` without control characters, which terminals obey; line breaks and tabs stay."""
    return _controls().sub("", text)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints text on stdout or stderr, as all commands do, but for tables and progress bars."""
    click.echo(printable(text), err=err, nl=nl)


def print_json(data: Any) -> None:
    """Prints `data` as indented JSON on stdout."""
    echo(json_text(data), nl=False)


def print_answer(document: Any, as_json: bool, show: Callable[[], None]) -> None:
    """Prints the JSON of an answer where the command line asks for it; else `show` prints its text."""
    print_json(document) if as_json else show()


def number(value: float) -> str:
    """Three significant digits below 1000, all integer digits above."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def wrapped(line: str) -> str:
    """A line wrapped at 80 columns with a hanging indent; words stay whole."""
    from ridgeplan.roofline.catalog.validation import with_options  # see `_controls`

    line, inner = with_options(line), " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, TEXT_COLUMNS, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a titled table; the first and last columns hold words, the others figures.

    Words wrap where the screen is narrow, those of the last column first. An empty last column is left out.
    """
    from rich.markup import escape
    from rich.table import Table

    body = [tuple(map(printable, row)) for row in rows]
    shown = len(columns) if any(row[-1] for row in body) else len(columns) - 1
    widths = [max(map(len, column)) for column in zip(columns[:shown], *(row[:shown] for row in body), strict=True)]
    screen = console()
    gap = 2 if sum(widths) + 2 * (shown - 1) <= screen.width else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    longest_word = max((len(word) for row in body for word in row[shown - 1].split()), default=0)
    first_fits = sum(widths[:-1]) + gap * (shown - 1) + longest_word <= screen.width
    for index, column in enumerate(columns[:shown]):
        words = index in (0, len(columns) - 1)
        no_wrap = not words or (index == 0 and first_fits)
        table.add_column(column, justify="left" if words else "right", overflow="fold", no_wrap=no_wrap)
    for row in body:
        table.add_row(*map(escape, row[:shown]))
    echo(title)
    screen.print(table)


def print_bars(title: str, bars: Iterable[tuple[str, str, float, str]]) -> None:
    """Prints a chart of horizontal bars: the name of a group, of a bar, its length, and its text."""
    from rich.bar import Bar
    from rich.markup import escape
    from rich.table import Table

    rows = list(bars)
    longest = max(length for _, _, length, _ in rows)
    table = Table(box=None, pad_edge=False, show_header=False)
    for group, name, length, text in rows:
        table.add_row(escape(printable(group)), name, Bar(longest, 0, length, width=BAR_COLUMNS), text)
    echo(title)
    console().print(table)


def write_page(path: Path | None, page: str, *arguments: Any, hint: str = "") -> None:
    """Writes the HTML of a function of html_pages, if there is a path. It needs plotly; a note says if that is missing.

    hint: what the note adds. Raises FileProblem.
    """
    if path is not None and importlib.util.find_spec("plotly") is None:
        from ridgeplan.planner.extras import pip_command

        echo(f"note: plotly is not installed ({pip_command('plotly')}), so no HTML is written{hint}", err=True)
    elif path is not None:
        from ridgeplan.dashboards import html_pages

        write_atomically(path, getattr(html_pages, page)(*arguments))


def print_notes(notes: Iterable[str]) -> None:
    """Prints a line for each note."""
    for note in notes:
        echo(wrapped(f"note: {note}"))


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for tables without one."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal else PIPE_COLUMNS)


@contextmanager
def progress(first: str) -> Iterator[OnProgress]:
    """A bar on stderr, erased at the end. It says `first` until the function that the block gets is called.

    Where stderr is no terminal, long work prints a line on it every LINE_S seconds.
    """
    from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class TimeLeft(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if task.percentage >= 100 * ESTIMATED_FROM else Text()

    label = TextColumn("{task.description}", markup=False)  # names of models are no markup
    columns = (label, BarColumn(), TaskProgressColumn(), TimeLeft())  # rich's own, but for the label and early times
    begun: tuple[float, int] | None = None  # the time of the first call and the steps done then
    printed, disabled = time.monotonic(), not sys.stderr.isatty()
    with Progress(*columns, console=console(stderr=True), transient=True, disable=disabled) as bars:
        bar = bars.add_task(first)

        def show(what: str, done: int, total: int) -> None:
            nonlocal printed, begun
            bars.update(bar, description=printable(what), completed=done, total=total)
            now = time.monotonic()
            start, before = begun = begun or (now, done)
            if disabled and done < total and now - printed >= LINE_S:
                printed, known = now, done > before and done >= ESTIMATED_FROM * total
                left = f", about {(now - start) * (total - done) / (done - before):,.0f} s left" if known else ""
                echo(f"{printable(what)} ({done} of {total}{left})", err=True)

        yield show


@contextmanager
def runs_progress(titles: Sequence[str], tokens: int) -> Iterator[Callable[[int, int], None]]:
    """Progress of runs in turns. It yields what is told of a run: its place and how many of its `tokens` are done."""
    done = [0] * len(titles)
    with progress("loading the model") as show:

        def advance(index: int, tokens_done: int) -> None:
            done[index] = tokens_done
            doing = "running" if tokens_done else "loading the model and the prompt of"
            show(f"{doing} {titles[index]}, {tokens_done} of {tokens} tokens", sum(done), tokens * len(titles))

        yield advance


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Prints warnings inside the body as one line on stderr."""

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        echo(f"note: {' '.join(str(message).split())}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = note
        yield
