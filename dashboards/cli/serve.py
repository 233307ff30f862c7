"""`ridgeplan serve`: an OpenAI-compatible server of one model."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli.engine_request import EngineRequest, conversation_options
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo
from ridgeplan.planner.extras import require_package

LOCALHOST, PORT = "127.0.0.1", 8000
GRACE_S = 2  # for answers that run when the server ends


@command()
@conversation_options
@click.option("--host", default=LOCALHOST, help="Address to listen on. Any but this machine's own is open to others.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help="Port; 0 takes a free one.")
@click.option(
    "--served-model-name", "name", metavar="NAME", help="Name of the model in requests.  [default: the plan's]"
)
def serve(host: str, port: int, name: str | None, max_new_tokens: int | None, **engine_options: Any) -> None:
    """Serve completions and chat completions on localhost, as OpenAI's API has them. Ctrl-C ends it.

    Requests are answered one at a time, which suits one user's tools and tests; for traffic, serve the plan with vLLM
    (`ridgeplan export PLAN --to vllm`). A request that begins like the last one reuses its KV cache.

    Examples:
      ridgeplan serve plan.json --model Qwen/Qwen2.5-0.5B-Instruct
      ridgeplan serve model.gguf --ctx 16k --port 8080
      ridgeplan serve plan.json --served-model-name local
    """
    request = EngineRequest(**engine_options, new_tokens=max_new_tokens)
    require_package("starlette")
    require_package("uvicorn")
    listener = _listener(host, port)  # before weights, which take minutes to load
    with listener:
        engine = request.conversation()
        import uvicorn

        from ridgeplan.dashboards.server import server_app

        name = name or Path(engine.plan.workload.model).name
        app = server_app(engine, name, host)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S)
        address = f"[{host}]" if ":" in host else host
        echo(f"serving {name} at http://{address}:{listener.getsockname()[1]}/v1, one request at a time", err=True)
        if host != LOCALHOST and not host.startswith("127."):
            echo("note: anyone who can reach this address can use the model; no key is asked for", err=True)
        uvicorn.Server(config).run(sockets=[listener])
        engine.close()


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UsageError where it cannot."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise click.UsageError(
            f"cannot listen on {host} port {port}: {reason}; allowed: a free port, at an address of this machine"
        ) from error
