"""An OpenAI-compatible server on this machine that decodes at known times, whatever else the machine does."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ridgeplan.validate import engine_steps

StepS = Callable[[int, int], float]  # seconds at a context and a batch


class FakeServer(ThreadingHTTPServer):
    """An engine that takes `step_s(context, batch)` for a token of each running request, at most `slots` at once."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, step_s: StepS, slots: int, *, takes_tokens: bool, chunk_tokens: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.step_s, self.takes_tokens, self.chunk_tokens = step_s, takes_tokens, chunk_tokens
        self.running, self.places, self.lock = 0, threading.Semaphore(slots), threading.Lock()
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def count(self, change: int) -> int:
        with self.lock:
            self.running += change
            return self.running


class Handler(BaseHTTPRequestHandler):
    """/v1/models, /version and streamed /v1/completions."""

    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        answers = {"/v1/models": {"data": [{"id": "served"}]}, "/version": {"version": "0.24.0"}}
        self._send(200 if self.path in answers else 404, answers.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if isinstance(body["prompt"], list) and not self.server.takes_tokens:
            self._send(422, {"error": "prompt must be a text"})
            return
        prompt = body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split()
        with self.server.places:
            self._stream(len(prompt), body["max_tokens"])

    def _stream(self, context: int, tokens: int) -> None:
        self.server.count(1)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        due = time.perf_counter() + 0.02  # a prompt
        for done in range(0, tokens, self.server.chunk_tokens):
            time.sleep(max(due - time.perf_counter(), 0))
            self._event({"choices": [{"text": "x", "index": 0}], "due": due})
            due += self.server.chunk_tokens * self.server.step_s(context, self.server.running)
            assert done < tokens
        self.server.count(-1)
        self._event({"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": context}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status: int, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def arrivals_as_due() -> Iterator[None]:
    """Lets the client take the moment at which a chunk was due for that of its arrival, which load would delay."""
    arrived = threading.local()
    parse = engine_steps._object

    def parsed(text: bytes, url: str) -> Any:
        chunk = parse(text, url)
        arrived.due = chunk.get("due", 0.0)
        return chunk

    clock = SimpleNamespace(perf_counter=lambda: arrived.due)
    with mock.patch.object(engine_steps, "_object", parsed), mock.patch.object(engine_steps, "time", clock):
        yield


@contextmanager
def serving(
    step_s: StepS, slots: int = 64, *, takes_tokens: bool = True, chunk_tokens: int = 1
) -> Iterator[FakeServer]:
    server = FakeServer(step_s, slots, takes_tokens=takes_tokens, chunk_tokens=chunk_tokens)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with arrivals_as_due():
            yield server
    finally:
        server.shutdown()
        server.server_close()
