"""The end of a command: user errors as one line on stderr, exit codes, streams and signals."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import click

from ridgeplan.dashboards.cli.output import echo
from ridgeplan.dashboards.files import FileProblem

BAD_INPUT, NOTHING_FITS, TOO_BUSY, INTERRUPTED = 2, 3, 4, 130
EXIT_CODES = {
    0: "The command succeeded.",
    1: "The reader of its output closed the pipe, or the command failed with a traceback, which is a defect.",
    BAD_INPUT: "The input is wrong, leaves nothing to measure, or needs a package that is not installed. One line on "
    "stderr says what is allowed.",
    NOTHING_FITS: "No plan fits. The message names the sizes and the GPU that would fit.",
    TOO_BUSY: "Other programs keep the machine too busy to measure it.",
    INTERRUPTED: "Ctrl-C interrupted the command.",
    128 + signal.SIGTERM: "SIGTERM ended the command.",
}
CODES = {"NothingFits": NOTHING_FITS, "NoisyMachine": TOO_BUSY}  # by name, as importing the errors takes long
# Errors of a full or failing disk, if stdout is a file on it.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
LONGEST_WORD, LONGEST_MESSAGE = 250, 1500  # characters in an error's line


def exit_code(action: Callable[[], Any]) -> int:
    """Runs `action` and returns an exit code of `EXIT_CODES`, or the code that `action` returns.

    Errors that are no user's raise.
    """
    try:
        code = action()
    except click.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        echo(error.format_message())
    except click.MissingParameter as error:
        path = error.ctx.command_path if error.ctx else "ridgeplan"
        return _fail(f"{error.format_message()} `{path} --help` has examples", BAD_INPUT)
    except click.ClickException as error:
        return _fail(error.format_message(), BAD_INPUT)
    except ValueError as error:
        from ridgeplan.roofline.catalog.validation import is_user_error, with_options  # which --help does without

        if not is_user_error(error):
            raise
        return _fail(with_options(str(error)), CODES.get(type(error).__name__, BAD_INPUT))
    except ModuleNotFoundError as error:
        from ridgeplan.planner.extras import missing_package  # the planner takes a while

        missing = missing_package(error)
        if missing is None:
            raise
        return _fail(missing, BAD_INPUT)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _drop_output()
        return _fail(f"cannot write the output: {error.strerror}", BAD_INPUT)
    else:
        return code if isinstance(code, int) else 0
    return 0


def shortened(message: str) -> str:
    """`message` on one line; very long words and a very long end are cut."""
    words = (word if len(word) < LONGEST_WORD else f"{word[: LONGEST_WORD - 3]}..." for word in message.split())
    line = " ".join(words)
    return line if len(line) <= LONGEST_MESSAGE else f"{line[: LONGEST_MESSAGE - 3]}..."


def _drop_output() -> None:
    """Discards stdout's buffer; otherwise the interpreter would fail again at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _fail(message: str, code: int) -> int:
    echo(f"error: {shortened(message)}", err=True)
    return code


TERMINATED = 128 + signal.SIGTERM
RAISED_BY = {SystemExit: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}
PAUSE_S = 0.05


def prepare_process() -> None:
    """Prints unencodable characters as question marks, and ends on SIGTERM as on Ctrl-C.

    Raises FileProblem if stdout is closed.
    """
    if sys.stdout is None:  # descriptor 1 is closed
        raise FileProblem("stdout is closed; allowed: a terminal, a file or a pipe")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _send_again


def require_utf8(words: Sequence[str]) -> None:
    """Raises UsageError for an argument that is not UTF-8, which no result could name, before anything is measured."""
    for word in words:
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise click.UsageError(f"the argument {word!r} is not UTF-8; allowed: arguments in UTF-8")


def _terminate(number: int, frame: FrameType | None) -> None:
    """Unwinds the command, so that it removes partly written files."""
    raise SystemExit(TERMINATED)


def _send_again(ignored: Any) -> None:
    """Sends a signal again that arrived in a finalizer, where Python ignores the exception that it raises."""
    number = RAISED_BY.get(ignored.exc_type)
    if number is None:
        sys.__unraisablehook__(ignored)
    else:
        threading.Timer(PAUSE_S, os.kill, (os.getpid(), number)).start()
