"""The process's streams and signals, made ready before a command runs."""

from __future__ import annotations

import io
import signal
import sys
from types import FrameType

from ridgeplan.dashboards.user_errors import FileProblem

TERMINATED = 128 + signal.SIGTERM


def prepare_process() -> None:
    """Characters that a stream cannot show become question marks, and SIGTERM ends a command as Ctrl-C does.

    Raises FileProblem where stdout is closed.
    """
    if sys.stdout is None:  # the interpreter found no open descriptor 1
        raise FileProblem("stdout is closed; allowed: a terminal, a file or a pipe")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    """Unwinds the command, so that it removes what it has half written."""
    raise SystemExit(TERMINATED)
