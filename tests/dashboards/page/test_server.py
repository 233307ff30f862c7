"""How `ridgeplan dashboard` starts Streamlit."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from ridgeplan.dashboards.cli import dashboard


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, invoke: Callable) -> Callable[..., list[str]]:
    """The words with which the command replaces itself."""

    def run(*arguments: object) -> list[str]:
        seen: list[list[str]] = []
        monkeypatch.chdir(".")  # and back, when the test ends
        monkeypatch.setenv(dashboard.FOLDER_VARIABLE, "")
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


def test_a_config_file_cannot_weaken_what_protects_the_page(
    started: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamlit's own reading of the command line, and of a folder .streamlit in the working directory."""
    folder = tmp_path / ".streamlit"
    folder.mkdir()
    (folder / "config.toml").write_text(
        "[server]\nenableCORS = false\nenableXsrfProtection = false\nenableStaticServing = true\n"
        "enableAgentApi = true\n"
        'corsAllowedOrigins = ["http://evil.example"]\nallowedHosts = ["*"]\ntrustedUserHeaders = {"X-User" = "user"}\n'
        'cookieSecret = "known"\n[browser]\nserverAddress = "evil.example"\n'
        '[theme]\nbase = "http://127.0.0.1:1/theme.toml"\n'
    )
    (folder / "secrets.toml").write_text('FROM_SECRETS = "set"\n')
    monkeypatch.chdir(tmp_path)
    code = """if True:
        import json, os, sys
        from streamlit import config, net_util
        from streamlit.web import cli
        from streamlit.web.server import server_util
        net_util.get_internal_ip = net_util.get_external_ip = lambda: None  # which asks a server
        def report(file, args=None, flag_options=None):
            cli.bootstrap.load_config_options(flag_options=flag_options)
            print(json.dumps({
                **{name: config.get_option(f"server.{name}") for name in sys.argv[1].split(",")},
                "cookie is known": server_util.get_cookie_secret() == "known",
                "evil is allowed": server_util.is_url_from_allowed_origins("http://evil.example"),
                "base of theme": config.get_option("theme.base"),
                "of secrets": os.environ.get("FROM_SECRETS"),
            }))
        cli._main_run = report
        cli.main(sys.argv[2:], standalone_mode=False)
    """
    names = "enableCORS enableXsrfProtection enableStaticServing enableAgentApi allowedHosts trustedUserHeaders address"
    words = started("--port", 8601)
    command = [sys.executable, "-c", code, ",".join(names.split()), *words[words.index("run") :]]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(shown.splitlines()[-1]) == {
        "enableCORS": True, "enableXsrfProtection": True, "enableStaticServing": False, "enableAgentApi": False,
        "allowedHosts": ["127.0.0.1", "localhost"], "trustedUserHeaders": {}, "address": "127.0.0.1",
        "cookie is known": False, "evil is allowed": False, "base of theme": None, "of secrets": None,
    }  # fmt: skip
    assert os.environ[dashboard.FOLDER_VARIABLE] == str(tmp_path)
    origins = [word for name, word in pairwise(words) if name == "--server.corsAllowedOrigins"]
    assert origins == ["http://127.0.0.1:8601", "http://localhost:8601"]


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
