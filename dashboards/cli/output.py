"""Output of commands: JSON, tables, files."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeplan.dashboards.user_errors import FileProblem

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PIPE_COLUMNS = 140  # width of tables without a terminal
TEXT_COLUMNS = 80  # of paragraphs


def print_json(data: Any) -> None:
    """Prints `data` as indented JSON on stdout."""
    click.echo(json.dumps(data, indent=2, allow_nan=False))


def number(value: float) -> str:
    """Three significant digits below 1000, all whole digits above."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def wrapped(line: str) -> str:
    """A line in as many as 80 columns need, those after the first further in. Words stay whole."""
    inner = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, TEXT_COLUMNS, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a titled table on stdout; the first and the last column hold words, the others figures.

    which stand one or two characters apart, so that most"""
    from rich.markup import escape
    from rich.table import Table

    body = list(rows)
    shown = len(columns) if any(row[-1] for row in body) else len(columns) - 1
    widths = [max(map(len, column)) for column in zip(columns[:shown], *(row[:shown] for row in body), strict=True)]
    screen = console()
    gap = 2 if sum(widths) + 2 * (shown - 1) <= screen.width else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for index, column in enumerate(columns[:shown]):
        words = index in (0, len(columns) - 1)
        table.add_column(column, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in body:
        table.add_row(*map(escape, row[:shown]))
    click.echo(title)
    screen.print(table)


def print_notes(notes: Iterable[str]) -> None:
    """Prints caveats, one to a line."""
    for note in notes:
        click.echo(wrapped(f"note: {note}"))


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for the tables without one."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal else PIPE_COLUMNS)


def progress() -> Progress:
    """Progress bars on stderr if it is a terminal, erased at the end."""
    from rich.progress import Progress

    return Progress(console=console(stderr=True), transient=True, disable=not sys.stderr.isatty())


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Prints warnings inside the body as one line on stderr."""

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        click.echo(f"note: {' '.join(str(message).split())}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = note
        yield


def require_writable(path: Path) -> None:
    """Raises FileProblem if `path` cannot be written. Check early, so no result is lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise FileProblem(
            f"cannot write {str(path)!r}: {error.strerror}; allowed: XDG_CACHE_HOME at a folder that can be written"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Writes a file completely or not at all; a link stays one. Raises FileProblem."""
    target = Path(os.path.realpath(path))
    staging = target.with_name(f".ridgeplan-{os.getpid()}")
    try:
        staging.write_text(text, encoding="utf-8")
        staging.replace(target)
    except OSError as error:
        raise FileProblem(f"cannot write {str(path)!r}: {error.strerror}") from error
    finally:
        staging.unlink(missing_ok=True)
