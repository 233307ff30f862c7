"""The installed command as its own process: exit codes, streams and what it imports."""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeplan.dashboards.cli.errors import LONGEST_MESSAGE, LONGEST_WORD, shortened

RECOMMEND = ("recommend", "meta-llama/Llama-3.1-8B", "--gpu", "h200", "--ctx", "131072", "--json")
LIMIT_S = 300  # far beyond what any command takes, also on a busy machine
HEAVY = ("torch", "transformers", "streamlit", "plotly", "sympy", "scipy")


def ridgeplan(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [word if isinstance(word, bytes) else str(word) for word in arguments]
    command = [str(Path(sys.executable).with_name("ridgeplan")), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ | environment)


@pytest.mark.parametrize("arguments", [RECOMMEND, ("estimate", *RECOMMEND[1:], "--preset", "quantspec"), ("models",)])
def test_answers_import_nothing_heavy(profile_path: Path, arguments: tuple[str, ...]) -> None:
    profile_option = () if arguments == ("models",) else ("--profile", str(profile_path))
    code = (
        "import sys; from ridgeplan.dashboards.cli import main\n"
        "try: main(sys.argv[1:])\n"
        f"finally: print(*(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments, *profile_option]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert result.stderr.split() == []
    assert result.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((*RECOMMEND, "--memory-limit", "1GiB"), 3),
        (("export", b"plan\xff.json", "--to", "vllm"), 2),
        (("acceptance", "--text", "book.txt", "--text-name", b"\xff"), 2),
    ],
)
def test_errors_are_one_line(profile_path: Path, arguments: tuple[str | bytes, ...], code: int) -> None:
    profile_option = ("--profile", profile_path) if arguments[0] == "recommend" else ()
    result = ridgeplan(*arguments, *profile_option)
    assert result.returncode == code
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("recommend", "no-such-model", *RECOMMEND[2:]),
        (*RECOMMEND, "--batch", "-1"),
        ("nonsense",),
        ("quality", "int8", "--text", "a\nb.txt"),
        ("tune", "plan.json", "--text", "\x1b]0;x.txt"),
        ("run", "/nowhere/plan.json"),
    ],
)
def test_wrong_arguments_are_one_line(refuses: Callable[..., str], arguments: tuple[str, ...]) -> None:
    refuses(*arguments)


def test_help_and_version() -> None:
    listed = ridgeplan("--help")
    assert listed.returncode == 0
    for command in ("plan", "estimate", "run", "calibrate", "validate", "list", "dashboard", "demo"):
        assert command in listed.stdout
    assert ridgeplan("--version").stdout.startswith("ridgeplan, version ")


def test_closed_pipe_is_quiet(profile_path: Path) -> None:
    command = f"{Path(sys.executable).with_name('ridgeplan')} models | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=LIMIT_S)
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_full_disk_is_one_line(option: tuple[str, ...]) -> None:
    command = [str(Path(sys.executable).with_name("ridgeplan")), "models", *option]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert result.returncode == 2
    assert result.stderr == "error: cannot write the output: No space left on device\n"


def test_interrupt_is_quiet(tmp_path: Path) -> None:
    pipe = tmp_path / "plan.json"
    os.mkfifo(pipe)
    command = [str(Path(sys.executable).with_name("ridgeplan")), "run", str(pipe)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heeding(signal.SIGINT))
    with pipe.open("w"):  # opens once the command opens the pipe, from which it then reads without end
        stderr = interrupted(process)
    assert process.returncode == 130
    assert stderr.strip() == ""


def heeding(number: signal.Signals) -> Callable[[], object]:
    """Tests that run in the background or under nohup ignore a signal, and what they start would too."""
    return functools.partial(signal.signal, number, signal.SIG_DFL)


def interrupted(process: subprocess.Popen[str]) -> str:
    """What a process prints on stderr once Ctrl-C has ended it.

    A signal that arrives just before a read starts to wait does not end that read; the next one does.
    """
    for _ in range(10):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=LIMIT_S / 10)[1]
    raise AssertionError("the process ignores Ctrl-C")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_dashboard_serves_this_machine_only_until_its_terminal_closes(number: signal.Signals) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ridgeplan")), "dashboard", "--port", str(port)]
    none, heed = subprocess.DEVNULL, heeding(number)
    process = subprocess.Popen(command, stdout=none, stderr=none, start_new_session=True, preexec_fn=heed)
    try:
        assert answers(f"http://127.0.0.1:{port}/_stcore/health")
        with socket.socket() as other, pytest.raises(OSError, match="refused"):
            other.connect(("127.0.0.2", port))
    finally:
        process.send_signal(number)  # to the command only, not its group
        process.wait(timeout=LIMIT_S)
    with socket.socket() as free:  # nothing listens there any more
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def answers(url: str) -> bool:
    """Whether `url` answers within LIMIT_S."""
    for _ in range(5 * LIMIT_S):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
        time.sleep(0.2)
    return False


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = ridgeplan("dashboard", "--port", port)
    assert result.returncode == 2
    assert result.stderr == f"error: --port {port} cannot be used: Address already in use; allowed: a free port\n"


# Closed and narrow streams, signals and overlong messages: one line, no traceback, no process left.

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
        ("x" * LONGEST_WORD, "x" * (LONGEST_WORD - 3) + "..."),
        ("x" * (LONGEST_WORD - 1), "x" * (LONGEST_WORD - 1)),
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


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_damaged_rows_are_named_in_one_warning_each(profile_path: Path, tmp_path: Path, command: str) -> None:
    folder = tmp_path / "ridgeplan"
    folder.mkdir()
    preset = ("--preset", "int8") if command == "estimate" else ()
    question = (command, *RECOMMEND[1:], "--profile", profile_path, *preset)
    good = ridgeplan(*question, XDG_CACHE_HOME=str(tmp_path))
    for name in ("quality.json", "acceptance.json"):
        (folder / name).write_text('{"schema": 1, "rows": [{"mod')
    damaged = ridgeplan(*question, XDG_CACHE_HOME=str(tmp_path))
    assert (good.returncode, good.stderr, damaged.returncode, damaged.stdout) == (0, "", 0, good.stdout)
    lines = damaged.stderr.splitlines()
    assert sorted(line.split("ridgeplan/")[1].split("'")[0] for line in lines) == ["acceptance.json", "quality.json"]
    assert all(line.startswith("note: ") for line in lines)
