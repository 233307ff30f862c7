"""The OpenAI-compatible server over a tiny model: answers, errors, the queue, streams that break off, and growth."""

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
        ({"prompt": "a" * 257}, "the length of prompt 0 is 257; allowed by the plan: up to 256", 400),
        ({"prompt": [[300]]}, "a token of prompt 0 is 300; allowed", 400),
        ({"max_tokens": 65}, "max_new_tokens is 65; allowed by the plan: up to 64", 400),
        ({"max_tokens": 0}, "max_new_tokens is 0; allowed", 400),
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


@pytest.mark.parametrize(
    ("content", "headers", "words", "status"),
    [
        (b"{", {}, "the body is not JSON", 400),
        (b"[" * 100_000, {}, "the body is not JSON", 400),
        (b"[]", {}, "the body is []; allowed: one JSON object", 400),
        (b'"' + b"a" * (17 << 20) + b'"', {}, "the body is too large; allowed: up to 16 MiB", 413),
        (b"{}", {"content-type": "text/plain"}, "the content type is 'text/plain'; allowed: application/json", 415),
    ],
    ids=["no JSON", "deep", "a list", "large", "another type"],
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
    assert client.get("/health", headers={"host": "rebound.example"}).status_code == 400


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


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(
    address: tuple[str, int], engine: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A generation of which each token waits until the test goes on, so that it cannot end by itself."""
    tokens, closed, begun = iter(range(65, 10**6)), threading.Event(), threading.Event()

    def slow(ids: list[int], *_: Any, **__: Any) -> Iterator[int]:
        try:
            for token in tokens:
                begun.set()
                time.sleep(0.01)
                yield token % 26 + 65
        finally:
            closed.set()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "stream", slow)
        connection = post(address, max_tokens=64, stream=stream)
        assert begun.wait(30)
        if stream:
            connection.recv(1 << 10)
        connection.close()
        assert closed.wait(30)
    assert b'"finish_reason":"length"' in received(post(address, max_tokens=4))


def test_openais_own_client_reads_the_answers(address: tuple[str, int], engine: Any) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://localhost:{address[1]}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]
    body = {"model": "tiny", "prompt": "The capital", "max_tokens": 8, "temperature": 0}
    text = "".join(engine.stream("The capital", 8))
    assert client.completions.create(**body).choices[0].text == text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**body, stream=True)) == text
    with pytest.raises(openai.BadRequestError, match="temperature is -1; allowed"):
        client.completions.create(**body | {"temperature": -1})


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
