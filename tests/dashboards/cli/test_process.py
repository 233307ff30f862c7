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

RECOMMEND = ("recommend", "meta-llama/Llama-3.1-8B", "--gpu", "h200", "--ctx", "131072", "--json")
LIMIT_S = 300  # far beyond what any command takes, also on a busy machine
HEAVY = ("torch", "transformers", "streamlit", "plotly", "sympy", "scipy")


def ridgeplan(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("ridgeplan")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ | environment)


@pytest.mark.parametrize("arguments", [RECOMMEND, ("estimate", *RECOMMEND[1:], "--preset", "quantspec"), ("models",)])
def test_answers_import_nothing_heavy(profile_path: Path, arguments: tuple[str, ...]) -> None:
    own = () if arguments == ("models",) else ("--profile", str(profile_path))
    code = (
        "import sys; from ridgeplan.dashboards.cli import main\n"
        "try: main(sys.argv[1:])\n"
        f"finally: print(*(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments, *own]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert result.stderr.split() == []
    assert result.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("recommend", "no-such-model", *RECOMMEND[2:]), 2),
        ((*RECOMMEND, "--batch", "-1"), 2),
        ((*RECOMMEND, "--memory-limit", "1GiB"), 3),
        (("nonsense",), 2),
        (("run", "/nowhere/plan.json"), 2),
    ],
)
def test_errors_are_one_line(profile_path: Path, arguments: tuple[str, ...], code: int) -> None:
    own = ("--profile", profile_path) if arguments[0] == "recommend" else ()
    result = ridgeplan(*arguments, *own)
    assert result.returncode == code
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_help_and_version() -> None:
    listed = ridgeplan("--help")
    assert listed.returncode == 0
    for command in ("plan", "estimate", "run", "calibrate", "validate", "models", "gpus", "dashboard", "demo"):
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
