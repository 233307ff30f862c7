"""An OpenAI-compatible server of one engine: a queue in front of it, streaming, and an end with the client's.

The engine runs in one thread, which takes requests in the order in which they came and does not wait for their readers:
a request's text goes into a buffer, and whoever reads too slowly loses the stream. A generation whose client has gone
ends after the token that runs. This is for one user's tools; traffic is vLLM's (docs/serve.md).
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeplan.dashboards.openai_api import ApiAnswer, ApiError, ApiRequest, Usage, model_list, refused_as
from ridgeplan.roofline.catalog.validation import brief, is_user_error
from ridgeplan.runtime import Engine
from ridgeplan.runtime.chat_template import TemplateProcess, chat_text
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.request import Request as EngineRequest
from ridgeplan.runtime.text import TextStream, encoded

MAX_BODY_BYTES = 16 << 20
MAX_WAITING = 64  # requests in the queue
MAX_UNREAD_PIECES = 4096  # of a stream, beyond what the connection buffers
SLOW_CLIENT_S = 30  # after which a client that reads nothing loses its connection
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
Result = TypeVar("Result")
# A piece of a choice's text, and the reason of its end with the last one: index, text, reason.
Piece = tuple[int, str, str | None]


class EngineServer:
    """The engine, its queue, and the answers to requests. model: the name under which it is served."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.engine, self.model = engine, model
        self.created = int(time.time())
        self._thread = ThreadPoolExecutor(1, "engine")
        # Prompts are encoded meanwhile, one at a time, by a tokenizer of their own: one is not safe in two threads.
        self._prompt_thread, self._tokenizer = ThreadPoolExecutor(1, "prompts"), load_tokenizer(engine.source)
        self._templates = TemplateProcess()
        self._jobs: set[Future[Any]] = set()  # of both threads, those that wait included

    def close(self) -> None:
        """Ends the threads after the tokens that run."""
        for thread in (self._thread, self._prompt_thread):
            thread.shutdown(cancel_futures=True)
        self._templates.close()

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, chat=True)

    async def models(self, request: Request) -> Response:
        """GET /v1/models, and /v1/models/NAME."""
        listed = model_list(self.model, self.created)
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse(listed)
        if name != self.model:
            raise ApiError(f"model is {brief(name)}; allowed: {brief(self.model)}", "model", 404, "model_not_found")
        return JSONResponse(listed["data"][0])

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return Response()

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        completion = ApiRequest.parse(await _body(request), self.model, self.engine.plan.workload, chat=chat)
        if len(self._jobs) > MAX_WAITING:
            raise ApiError(f"{MAX_WAITING} requests are waiting; allowed: another one later", status=503)
        prompts = await asyncio.wrap_future(self._submit(self._prompt_thread, self._prompt_ids, completion))
        with refused_as("messages" if chat else "prompt"):
            for ids in prompts:
                EngineRequest.build([ids], completion.max_tokens, completion.sampling).check(
                    self.engine.plan.workload, self.engine.config.shape.vocab
                )
        answer, usage = ApiAnswer(self.model, chat), Usage()
        pieces = self._pieces(completion, prompts, usage)
        if completion.stream:
            return EventStream(self._events(pieces, answer, usage if completion.include_usage else None))
        choices = await _while_connected(request, _joined(pieces, len(prompts)))
        return Response(status_code=499) if choices is None else JSONResponse(answer.whole(choices, usage))

    def _submit(self, thread: ThreadPoolExecutor, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        job = thread.submit(function, *arguments)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    def _prompt_ids(self, asked: ApiRequest) -> list[list[int]]:
        """Token ids of the prompts. Raises ChatTemplateError and ModelError."""
        tokenizer = self._tokenizer
        if asked.messages:
            return [encoded(tokenizer, chat_text(tokenizer, asked.messages, self._templates), special_tokens=False)]
        return [encoded(tokenizer, each) if isinstance(each, str) else each for each in asked.prompts]

    async def _pieces(self, asked: ApiRequest, prompts: list[list[int]], usage: Usage) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices, one choice after the other, once it is this request's turn.

        Closing it ends the generation after the token that runs. Raises ApiError where too many pieces are unread.
        """
        loop, ended = asyncio.get_running_loop(), threading.Event()
        unread: asyncio.Queue[Piece | None] = asyncio.Queue()

        def deliver(piece: Piece | None) -> None:
            if not ended.is_set():  # else the loop may have ended, too
                loop.call_soon_threadsafe(unread.put_nowait, piece)

        def generate() -> None:
            for piece in self._generated(asked, prompts, usage, ended):
                if unread.qsize() >= MAX_UNREAD_PIECES:
                    raise ApiError(f"the client left {MAX_UNREAD_PIECES} pieces unread; allowed: reading them in time")
                deliver(piece)

        job = self._submit(self._thread, generate)
        job.add_done_callback(lambda _: deliver(None))
        try:
            while (piece := await unread.get()) is not None:
                yield piece
            job.result()  # raises what it raised
        finally:
            ended.set()
            job.cancel()

    def _generated(
        self, asked: ApiRequest, prompts: list[list[int]], usage: Usage, ended: threading.Event
    ) -> Iterator[Piece]:
        """The pieces as the engine generates them, in its thread."""
        engine = self.engine
        sampling = replace(asked.sampling, stop_token_ids=() if asked.ignore_eos else engine.stop_token_ids)
        for index, ids in enumerate(prompts):
            before = usage.completion
            usage.prompt += len(ids)
            with closing(engine.stream(ids, asked.max_tokens, sampling, reuse_prefix=True)) as tokens:
                wanted = takewhile(lambda _: not ended.is_set(), tokens)
                text = TextStream(wanted, engine.tokenizer, asked.stop, sampling.stop_token_ids)
                for piece in text:
                    usage.completion = before + len(text.tokens)
                    if piece:
                        yield index, piece, None
            if ended.is_set():
                return
            usage.cached += engine.statistics.reused_tokens
            yield index, "", text.finish_reason

    async def _events(
        self, pieces: AsyncGenerator[Piece, None], answer: ApiAnswer, usage: Usage | None
    ) -> AsyncGenerator[str, None]:
        """An answer as server-sent events. An error after the first one is an event, too."""
        begun: set[int] = set()
        try:
            async with aclosing(pieces):
                async for index, text, reason in pieces:
                    yield _event(answer.chunk(index, text, reason, first=index not in begun))
                    begun.add(index)
        except (ApiError, ValueError) as error:
            if not isinstance(error, ApiError) and not is_user_error(error):
                raise
            yield _event(ApiError(str(error), status=500).document)
        if usage is not None:
            yield _event(answer.usage_chunk(usage))
        yield "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. Their generator is closed with the response, whatever ends it."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SLOW_CLIENT_S):
                await send(message)

        async with aclosing(self._events):
            with suppress(TimeoutError):  # the server closes a connection whose response is not complete
                await super().stream_response(send_in_time)


class LocalNames:
    """Refuses requests under other names than this machine's, by which a web page could send them (DNS rebinding)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else LOCAL_NAMES[0]
        app = self.app
        if re.sub(r":\d*$", "", host).strip("[]").lower() not in LOCAL_NAMES:
            error = ApiError(f"the host is {brief(host)}; allowed: {', '.join(LOCAL_NAMES)}")
            app = JSONResponse(error.document, error.status)
        await app(scope, receive, send)


def server_app(engine: Engine, model: str, host: str) -> Starlette:
    """The application. On localhost it refuses other names, by which a web page could reach it (DNS rebinding)."""
    server = EngineServer(engine, model)
    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/models", server.models, methods=["GET"]),
        Route("/v1/models/{name:path}", server.models, methods=["GET"]),
        Route("/health", server.health, methods=["GET"]),
    ]
    local = [Middleware(LocalNames)] if host in LOCAL_NAMES else []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        with closing(server):
            yield

    handlers = {
        ApiError: _refused, HTTPException: _not_here, ValueError: _wrong, ClientDisconnect: _gone, Exception: _failed,
    }  # fmt: skip
    return Starlette(routes=routes, middleware=local, exception_handlers=handlers, lifespan=lifespan)


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page can send any other kind to localhost without being asked
        raise ApiError(f"the content type is {brief(kind)}; allowed: application/json", status=415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the body is too large; allowed: up to {MAX_BODY_BYTES >> 20} MiB", status=413)
    return bytes(body)


async def _joined(pieces: AsyncGenerator[Piece, None], count: int) -> list[tuple[str, str]]:
    """The text and the finish reason of each of `count` choices."""
    choices = [("", "")] * count
    async with aclosing(pieces):
        async for index, text, reason in pieces:
            choices[index] = choices[index][0] + text, reason or ""
    return choices


async def _while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`. It is cancelled when the client leaves; the result is None then."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    tasks = working, asyncio.create_task(leave())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.document, error.status)


async def _wrong(request: Request, error: Exception) -> Response:
    """The package's own errors are about the request; any other one is a defect."""
    if not isinstance(error, ValueError) or not is_user_error(error):
        raise error
    return JSONResponse(ApiError(" ".join(str(error).split())).document, 400)


async def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /health"
    message = f"{request.method} {brief(request.url.path)} is not here; allowed: {allowed}"
    return JSONResponse(ApiError(message, status=error.status_code).document, error.status_code)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    """A defect: the server's log has the traceback."""
    return JSONResponse(ApiError("the server failed; its log says why", status=500).document, 500)
