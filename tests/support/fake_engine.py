"""An OpenAI-compatible server on this machine that decodes at known times, whatever else the machine does."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ridgeplan.validate import engine_steps

StepS = Callable[[int, int], float]  # seconds at a context and a batch
PACE_S = 0.005  # between steps: requests that are sent together must arrive before the first of them ends


@dataclass
class Completion:
    """A request that decodes: when each of its chunks is due, on the server's own clock."""

    context: int
    chunks: int  # to come
    due_s: SimpleQueue[float] = field(default_factory=SimpleQueue)


class FakeServer(ThreadingHTTPServer):
    """An engine that takes `step_s(context, batch)` for a token of each running request, at most `slots` at once.

    Its clock goes on by these times only, so what is measured does not depend on when its threads run.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, step_s: StepS, slots: int, *, takes_tokens: bool, chunk_tokens: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.step_s, self.takes_tokens, self.chunk_tokens = step_s, takes_tokens, chunk_tokens
        self.places, self.lock, self.open = threading.Semaphore(slots), threading.Lock(), True
        self.running: list[Completion] = []
        self.bodies: list[dict[str, Any]] = []

    def decode(self) -> None:
        """Steps of all running requests, until the server closes."""
        now_s = 0.0
        while self.open:
            with self.lock:
                for each in self.running:
                    each.due_s.put(now_s)
                    each.chunks -= 1
                if self.running:
                    longest = max(each.context for each in self.running)
                    now_s += self.chunk_tokens * self.step_s(longest, len(self.running))
                self.running = [each for each in self.running if each.chunks]
            time.sleep(PACE_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


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
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        chunks = -(-tokens // self.server.chunk_tokens)
        completion = Completion(context, chunks)
        with self.server.lock:
            self.server.running.append(completion)
        for _ in range(chunks):
            self._event({"choices": [{"text": "x", "index": 0}], "due": completion.due_s.get()})
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
    for run in (server.serve_forever, server.decode):
        threading.Thread(target=run, daemon=True).start()
    try:
        with arrivals_as_due():
            yield server
    finally:
        server.open = False
        server.shutdown()
        server.server_close()
