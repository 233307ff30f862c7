"""The OpenAI-compatible server over a tiny model: answers, errors, the queue, streams that break off, and growth."""

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from ridgeplan.dashboards import server
from ridgeplan.runtime.text import TextStream


@pytest.fixture(scope="module")
def engine(chat_engine: Any) -> Any:
    return chat_engine


@pytest.fixture(scope="module")
def client(engine: Any) -> Iterator[TestClient]:
    with TestClient(server.server_app(engine, "tiny", "127.0.0.1"), base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="module")
def address(engine: Any) -> Iterator[tuple[str, int]]:
    """The server on a real socket, for what a test client does not do: two at once, and a connection that breaks."""
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(server.server_app(engine, "tiny", "127.0.0.1"), log_level="warning"))
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    yield listener.getsockname()
    running.should_exit = True
    thread.join(30)


def completion(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"model": "tiny", "prompt": "The capital", "temperature": 0, **fields})


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_is_what_the_engine_generates(client: TestClient, engine: Any) -> None:
    answer = completion(client, max_tokens=8).json()
    expected = "".join(engine.stream("The capital", 8))
    assert answer["choices"] == [{"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 11, "completion_tokens": 8, "total_tokens": 19, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    several = completion(client, prompt=["The capital", list(b"Once")], max_tokens=8).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1]
    assert several["choices"][0]["text"] == expected
    assert several["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("limit", [65, 4096, 10**100])
def test_a_limit_beyond_the_plans_new_tokens_is_that_of_the_plan(client: TestClient, limit: int) -> None:
    """As clients expect, which send one limit to every model; beside the longest prompt, too."""
    for prompt in ("The capital", "a" * 256):
        answer = completion(client, prompt=prompt, max_tokens=limit, ignore_eos=True).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 64


def test_a_stream_adds_up_to_the_whole_answer(client: TestClient) -> None:
    whole = completion(client, max_tokens=12, stop=["zzz"]).json()
    response = completion(client, max_tokens=12, stop=["zzz"], stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)


def test_a_stop_word_ends_the_text(client: TestClient) -> None:
    text = completion(client, max_tokens=12).json()["choices"][0]["text"]
    (choice,) = completion(client, max_tokens=12, stop=text[4:6]).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[4:6])], "stop")


def test_the_finish_reason_is_what_ended_the_text(client: TestClient, engine: Any) -> None:
    """Not the texts' lengths: a stop word may be the text's last characters, at the limit, too."""
    text = "".join(engine.stream("The capital", 12))
    (choice,) = completion(client, max_tokens=12, stop=text[-1]).json()["choices"]
    assert choice["finish_reason"] == "stop"
    (first,) = engine.generate([list(b"The capital")], 12).tokens
    for token, reason in ((first[3], "stop"), (None, "length")):
        answer = TextStream(first[:4], engine.tokenizer, (), () if token is None else (token,))
        assert ("".join(answer), answer.finish_reason) == (engine.tokenizer.decode(first[:4]), reason)


def test_the_end_of_a_text_may_be_ignored(client: TestClient, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As servers' benchmarks ask for."""
    prompt = list(b"The capital")
    (tokens,) = engine.generate([prompt], 12).tokens
    monkeypatch.setitem(vars(engine), "stop_token_ids", (tokens[3],))
    for fields, expected in (({}, tokens.index(tokens[3]) + 1), ({"ignore_eos": True}, 12)):
        answer = completion(client, prompt=prompt, max_tokens=12, **fields).json()
        assert answer["usage"]["completion_tokens"] == expected


def test_a_chat_is_answered_in_the_models_template(client: TestClient, engine: Any) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Why?"},
    ]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 8, "stream": True}
    deltas = [chunk["choices"][0]["delta"] for chunk in events(client.post("/v1/chat/completions", json=body).text)]
    assert deltas[0]["role"] == "assistant"
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == "".join(engine.stream("<s>Be brief.<u>Why?<a>", 8))


def test_the_next_turn_continues_the_cache(client: TestClient) -> None:
    prompt = "a" * 150
    answer = completion(client, prompt=prompt, max_tokens=20).json()["choices"][0]["text"]
    usage = completion(client, prompt=f"{prompt}{answer} and", max_tokens=4).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 150


@pytest.mark.parametrize(
    ("fields", "words", "status"),
    [
        ({"model": "gpt-4"}, "model is 'gpt-4'; allowed: 'tiny'", 404),
        ({"prompt": ""}, "prompt is ''; allowed: a text", 400),
        ({"prompt": [1, "a"]}, "prompt is [1, 'a']; allowed: a text", 400),
        ({"prompt": "a" * 257}, "the length of prompt 1 is 257; allowed by the plan: up to 256", 400),
        ({"prompt": [[300]]}, "a token of prompt 1 is 300; allowed", 400),
        ({"max_tokens": 0}, "max_tokens is 0; allowed: a whole number 1 or more", 400),
        ({"max_tokens": 4096.5}, "max_tokens is 4096.5; allowed", 400),
        ({"temperature": -1}, "temperature is -1; allowed", 400),
        ({"temperature": "hot"}, "temperature is 'hot'; allowed", 400),
        ({"seed": 1.5}, "seed is 1.5; allowed", 400),
        ({"stop": [""]}, "stop is ['']; allowed", 400),
        ({"stream": 1}, "stream is 1; allowed: true or false", 400),
        ({"n": 2}, "n is 2; allowed: 1", 400),
        ({"logprobs": 5}, "logprobs is 5; allowed: false", 400),
        ({"messages": []}, "'messages' is not a parameter here; allowed", 400),
    ],
)
def test_bad_requests_are_refused_in_one_line(
    client: TestClient, fields: dict[str, Any], words: str, status: int
) -> None:
    response = completion(client, **fields)
    error = response.json()["error"]
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert (response.status_code, error["type"]) == (status, "invalid_request_error")
    assert error["param"] == next(iter(fields))


@pytest.mark.parametrize(
    ("content", "headers", "words", "status"),
    [
        (b"{", {}, "the body is not JSON", 400),
        (b"[" * 100_000, {}, "the body is not JSON", 400),
        (b"[]", {}, "the body is []; allowed: one JSON object", 400),
        (b"null", {}, "the body is null; allowed: one JSON object", 400),
        (b'"' + b"a" * (17 << 20) + b'"', {}, "the body is too large; allowed: up to 16 MiB", 413),
        (b"{}", {"content-type": "text/plain"}, "the content type is 'text/plain'; allowed: application/json", 415),
    ],
    ids=["no JSON", "deep", "a list", "null", "large", "another type"],
)
def test_bad_bodies_are_refused(
    client: TestClient, content: bytes, headers: dict[str, str], words: str, status: int
) -> None:
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"} | headers)
    assert words in response.json()["error"]["message"]
    assert response.status_code == status


@pytest.mark.parametrize(
    "messages",
    ["Why?", [], [{"role": "user"}], [{"role": "robot", "content": "a"}], [{"role": "user", "content": [{}]}]],
)
def test_bad_messages_are_refused(client: TestClient, messages: Any) -> None:
    response = client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    assert response.status_code == 400
    assert "allowed: " in response.json()["error"]["message"]


def test_other_paths_and_other_names_of_this_machine_are_refused(client: TestClient) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/v1/models/tiny").json()["object"] == "model"
    assert client.get("/v1/models/other").status_code == client.get("/v2").status_code == 404
    assert "GET '/v1/completions' is not here; allowed" in client.get("/v1/completions").json()["error"]["message"]
    assert client.get("/health").status_code == 200
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
        assert client.get("/health", headers={"host": host}).status_code == 200
    for host in ("rebound.example", "localhost.example:8000", "", "[::2]", "localhost:80:80"):
        refused = client.get("/health", headers={"host": host})
        assert refused.status_code == 400
        assert f"the host is {host!r}; allowed: 127.0.0.1" in refused.json()["error"]["message"]


def post(address: tuple[str, int], **fields: Any) -> socket.socket:
    body = json.dumps({"model": "tiny", "prompt": "The capital", "temperature": 0, **fields}).encode()
    connection = socket.create_connection(address, timeout=60)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def received(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_two_requests_at_once_take_turns(address: tuple[str, int], engine: Any) -> None:
    with ThreadPoolExecutor(4) as clients:
        connections = [post(address, max_tokens=40, stream=True) for _ in range(4)]
        answers = list(clients.map(received, connections))
    texts = [answer.partition(b"\r\n\r\n")[2].count(b'"finish_reason": "length"') for answer in answers]
    assert texts == [1, 1, 1, 1]
    assert not engine._running


class Tokens:
    """An engine's stream that generates tokens until it is closed, as fast as asked."""

    def __init__(self, pause_s: float = 0.0, letter: int = 65) -> None:
        self.begun, self.closed, self._pause_s, self._letter = threading.Event(), threading.Event(), pause_s, letter

    def __call__(self, *_: Any, **__: Any) -> Iterator[int]:
        try:
            while True:
                self.begun.set()
                time.sleep(self._pause_s)
                yield self._letter
        finally:
            self.closed.set()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("letter", [65, 0xE2], ids=["text", "a character that never ends"])
def test_a_client_that_leaves_ends_its_generation(
    address: tuple[str, int], engine: Any, monkeypatch: pytest.MonkeyPatch, stream: bool, letter: int
) -> None:
    tokens = Tokens(0.01, letter)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "stream", tokens)
        connection = post(address, max_tokens=64, stream=stream)
        assert tokens.begun.wait(30)
        connection.close()
        assert tokens.closed.wait(30)
    assert b'"finish_reason":"length"' in received(post(address, max_tokens=4))


def test_a_client_that_reads_nothing_keeps_nobody_waiting(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its generation goes on into a buffer until that is full; then its stream ends, and its connection in time."""
    app, tokens, sent = server.server_app(engine, "tiny", "localhost"), Tokens(), []
    monkeypatch.setattr(server, "MAX_UNREAD_PIECES", 50)
    monkeypatch.setattr(server, "SLOW_CLIENT_S", 0.2)

    async def answered(*, reads: bool) -> None:
        body = {"model": "tiny", "prompt": "The capital", "max_tokens": 8, "stream": True}
        messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

        async def receive() -> Any:
            return next(messages, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if not reads and message.get("body"):
                await asyncio.Event().wait()
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await app(scope, receive, send)

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "stream", tokens)
            stalled = asyncio.create_task(answered(reads=False))
            assert await asyncio.to_thread(tokens.closed.wait, 30)
        await answered(reads=True)
        assert sent[-2]["body"].endswith(b"[DONE]\n\n")
        sent.clear()
        await stalled
        assert not sent  # its response is not complete, for which the server closes the connection

    asyncio.run(scenario())


def test_openais_own_client_reads_the_answers(address: tuple[str, int], engine: Any) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://localhost:{address[1]}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]
    body = {"model": "tiny", "prompt": "The capital", "max_tokens": 8, "temperature": 0}
    text = "".join(engine.stream("The capital", 8))
    assert client.completions.create(**body).choices[0].text == text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**body, stream=True)) == text
    with pytest.raises(openai.BadRequestError, match="temperature is -1; allowed") as refused:
        client.completions.create(**body | {"temperature": -1})
    assert refused.value.param == "temperature"


@pytest.mark.parametrize("requests", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_requests_leave_nothing_behind(client: TestClient, requests: int) -> None:
    def answer(count: int) -> None:
        for index in range(count):
            completion(client, prompt=f"{index} " * 20, max_tokens=2, stream=bool(index % 2), seed=index, temperature=1)

    answer(4)
    gc.collect()
    gc.freeze()  # what is there is not counted below
    answer(requests)
    gc.collect()
    objects = len(gc.get_objects())
    gc.unfreeze()
    assert objects < 200 + requests / 10
