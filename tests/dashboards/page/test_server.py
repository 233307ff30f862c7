"""How `ridgeplan dashboard` starts Streamlit."""

import socket
import sys
from collections.abc import Callable

import pytest

from ridgeplan.dashboards.cli import dashboard


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, invoke: Callable) -> Callable[..., list[str]]:
    """The words with which the command replaces itself."""

    def run(*arguments: object) -> list[str]:
        seen: list[list[str]] = []
        monkeypatch.setattr("os.execv", lambda _, words: seen.append(words))
        assert invoke("dashboard", *arguments).exit_code == 0
        return seen[0]

    return run


def value(words: list[str], name: str) -> str:
    return words[words.index(f"--{name}") + 1]


def test_it_listens_to_this_machine_on_the_port_that_is_asked(started: Callable[..., list[str]]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = started("--port", port)
    assert words[:5] == [sys.executable, "-P", "-m", "streamlit", "run"]
    assert value(words, "server.port") == str(port)
    assert value(words, "server.address") == "127.0.0.1"
    assert value(words, "browser.gatherUsageStats") == "false"


def test_without_a_port_it_takes_the_next_free_one(
    started: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        monkeypatch.setattr(dashboard, "FIRST_PORT", taken)
        assert int(value(started(), "server.port")) > taken


def test_where_no_port_is_free_it_says_so(invoke: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "PORTS", 1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(dashboard, "FIRST_PORT", other.getsockname()[1])
        result = invoke("dashboard")
    assert result.exit_code == 2
    assert "are all in use; give a free --port" in result.stderr
