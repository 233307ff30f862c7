"""Closed and narrow streams, signals and overlong messages: one line, no traceback, no process left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeplan.dashboards.cli.errors import LONGEST_MESSAGE, LONGEST_WORD, shortened

COMMAND = str(Path(sys.executable).with_name("ridgeplan"))


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = command.replace("ridgeplan", COMMAND)
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=300, env=os.environ | environment
    )


def test_a_closed_stdout_is_one_line() -> None:
    result = shell("ridgeplan models >&-")
    assert result.returncode == 2
    assert result.stderr == "error: stdout is closed; allowed: a terminal, a file or a pipe\n"


def test_a_closed_stderr_changes_nothing() -> None:
    assert shell("ridgeplan models 2>&-").stdout == shell("ridgeplan models").stdout


def test_what_a_narrow_stdout_cannot_show_becomes_question_marks() -> None:
    code = "from ridgeplan.dashboards.cli.errors import prepare_process as p; p(); print('caf\\u00e9 \\u2192 \\u4e2d')"
    environment = os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, env=environment)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == b"caf\xe9 ? ?\n"


def test_sigterm_ends_a_command_quietly(tmp_path: Path) -> None:
    pipe = tmp_path / "plan.json"
    os.mkfifo(pipe)
    process = subprocess.Popen([COMMAND, "run", str(pipe)], stderr=subprocess.PIPE, text=True)
    with pipe.open("w"):  # opens once the command reads, which then waits for an end that does not come
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr == ""


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("two\n lines ", "two lines"),
        ("x" * 5000 + " is unknown", "x" * (LONGEST_WORD - 3) + "... is unknown"),
        ("a " * 5000, ("a " * 5000)[: LONGEST_MESSAGE - 3] + "..."),
    ],
)
def test_messages_are_one_line_that_fits_a_screen(message: str, shown: str) -> None:
    assert shortened(message) == shown


FINALIZED = """
import os, signal, sys, time
from ridgeplan.dashboards.cli.errors import prepare_process

class Signalled:
    def __del__(self):
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
        time.sleep(0)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
prepare_process()
one = Signalled()
del one
time.sleep(600)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_a_signal_in_a_finalizer_is_not_lost(name: str, code: int) -> None:
    """Python drops what is raised there, after a traceback. Unhandled, KeyboardInterrupt ends it by the signal."""
    result = subprocess.run([sys.executable, "-c", FINALIZED, name], capture_output=True, text=True, timeout=60)
    assert result.returncode == code
    assert "Exception ignored" not in result.stderr
