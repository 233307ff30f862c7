"""Prepares the process's streams and signals before a command runs."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from ridgeplan.dashboards.user_errors import FileProblem

TERMINATED = 128 + signal.SIGTERM
RAISED_BY = {SystemExit: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}
PAUSE_S = 0.05


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
    sys.unraisablehook = _send_again


def _terminate(number: int, frame: FrameType | None) -> None:
    """Unwinds the command, so that it removes partly written files."""
    raise SystemExit(TERMINATED)


def _send_again(ignored: Any) -> None:
    """A signal that arrives in a finalizer is lost with what it raises there, so it is sent once more."""
    number = RAISED_BY.get(ignored.exc_type)
    if number is None:
        sys.__unraisablehook__(ignored)
    else:
        threading.Timer(PAUSE_S, os.kill, (os.getpid(), number)).start()
