"""`ridgeplan dashboard`: serves the what-if page on this machine."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import click

from ridgeplan.dashboards.cli.groups import command
from ridgeplan.planner.extras import require_package

APP = Path(__file__).parents[1] / "app.py"
FOLDER_VARIABLE = "RIDGEPLAN_PAGE_FOLDER"  # of the environment: where relative paths on the page begin
ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")  # other names that lead here are those of a page that rebinds its own
FIRST_PORT, PORTS = 8501, 50
# Streamlit's settings. They override those of the user's own config.toml.
SERVER = {
    "server.headless": "true", "server.baseUrlPath": "", "server.fileWatcherType": "none",
    "server.enableCORS": "true", "server.enableXsrfProtection": "true", "server.enableStaticServing": "false",
    "server.enableAgentApi": "false", "server.trustedUserHeaders": "{}", "browser.gatherUsageStats": "false",
    "browser.serverAddress": ADDRESS,  # which Streamlit takes for an allowed origin
    "secrets.files": f"{os.devnull}.toml",  # none: Streamlit sets environment variables from such files
    "logger.level": "warning", "client.toolbarMode": "minimal", "client.showErrorDetails": "full",
    "global.disableWidgetStateDuplicationWarning": "true",  # fix cards and sliders set texts that have defaults
    "theme.light.primaryColor": "#0072b2", "theme.dark.primaryColor": "#3d9bd6",
}  # fmt: skip


@command()
@click.option("--port", type=click.IntRange(1, 65535), help="Port on 127.0.0.1.  [default: the first free from 8501]")
def dashboard(port: int | None) -> None:
    """Serve the page on localhost only. Ctrl-C or closing the terminal ends it.

    Examples:
      ridgeplan dashboard
      ridgeplan dashboard --port 8600
      ridgeplan dashboard --help
    """
    require_package("streamlit")
    port = _free_port() if port is None else _require_free(port)
    # -P keeps the working directory off sys.path, where a folder such as kernels/ would shadow installed packages.
    serve = [sys.executable, "-P", "-m", "streamlit", "run", str(APP)]
    origins = [f"http://{host}:{port}" for host in HOSTS]
    settings = [*SERVER.items(), ("server.address", ADDRESS), ("server.port", str(port))]
    settings += [("server.corsAllowedOrigins", origin) for origin in origins]
    settings += [("server.allowedHosts", host) for host in HOSTS]
    # Streamlit also reads settings and secrets from the working directory, whose files may be someone else's.
    with suppress(FileNotFoundError):  # the folder was removed
        os.environ[FOLDER_VARIABLE] = str(Path.cwd())
    os.chdir(APP.parent)
    # The server replaces this process, so that ending the command ends the server.
    os.execv(sys.executable, [*serve, *(word for name, value in settings for word in (f"--{name}", value))])


def _free_port() -> int:
    """The first free port from `FIRST_PORT` on. Raises UsageError where many in a row are in use."""
    for port in range(FIRST_PORT, FIRST_PORT + PORTS):
        if not _bind_error(port):
            return port
    raise click.UsageError(f"ports {FIRST_PORT} to {FIRST_PORT + PORTS - 1} are all in use; give a free --port")


def _require_free(port: int) -> int:
    """The port itself. Raises UsageError where the server could not listen."""
    problem = _bind_error(port)
    if problem:
        raise click.UsageError(f"--port {port} cannot be used: {problem}; allowed: a free port")
    return port


def _bind_error(port: int) -> str:
    """The error of listening on a port; "" if there is none."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that just ended leaves its port free
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
