"""The page's server and a headless Chromium: `make test-browser`, which says where Chromium is. Else all here skip."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("RIDGEPLAN_CHROMIUM")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
LIMIT_S = 300  # far beyond what anything takes, also on a busy machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CHROMIUM is None:
        skip = pytest.mark.skip(reason="needs RIDGEPLAN_CHROMIUM, as `make test-browser` sets it")
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(skip)


class Server:
    """`ridgeplan dashboard` on a free port."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-P", "-c", "from ridgeplan.dashboards.cli import main; main()", "dashboard"]
        self.process = subprocess.Popen([*command, "--port", str(port)], start_new_session=True)
        self.url = f"http://127.0.0.1:{port}"
        for _ in range(5 * LIMIT_S):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=5):
                return
            time.sleep(0.2)
        raise AssertionError("the server does not answer")

    def end(self, number: int = signal.SIGTERM) -> None:
        """Sends a signal to the command alone, not to its group, and waits until it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(LIMIT_S)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.end()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def width() -> int:
    """Pixels of the browser's window."""
    return 1440


@pytest.fixture
def scheme() -> str:
    """What the system prefers: light or dark."""
    return "light"


@pytest.fixture
def context(chromium: Any, width: int, scheme: str) -> Iterator[Any]:
    """A new session of the browser."""
    browser_context = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
    )
    browser_context.set_default_timeout(1e3 * LIMIT_S)
    yield browser_context
    browser_context.close()
