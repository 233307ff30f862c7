"""Prepares the process's streams and signals before a command runs."""

from __future__ import annotations

import io
import signal
import sys
from types import FrameType

from ridgeplan.dashboards.user_errors import FileProblem

TERMINATED = 128 + signal.SIGTERM


def prepare_process() -> None:
    """Unencodable characters become question marks, and SIGTERM ends a command as Ctrl-C does.

    Raises FileProblem if stdout is closed.
    """
    if sys.stdout is None:  # descriptor 1 is closed
        raise FileProblem("stdout is closed; allowed: a terminal, a file or a pipe")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    """Unwinds the command, so that it removes partly written files."""
    raise SystemExit(TERMINATED)
