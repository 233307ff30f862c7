"""An OpenAI-compatible server of one engine: a queue in front of it, streaming, and an end with the client's.

The engine runs in one thread, and requests take turns in the order in which they came. A generation whose client has
gone is closed after the round that runs. This is for one user's tools; traffic is vLLM's (docs/serve.md).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ridgeplan.dashboards.files import is_user_error
from ridgeplan.dashboards.openai_api import ApiAnswer, ApiError, ApiRequest, Usage, model_list
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.runtime import Engine
from ridgeplan.runtime.chat_template import TemplateProcess, chat_text
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.request import Request as EngineRequest
from ridgeplan.runtime.text import TextStream, encoded, stop_tokens

MAX_BODY_BYTES = 16 << 20
MAX_WAITING = 64  # requests in the queue
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
        self._turn = asyncio.Lock()  # which is fair
        self._waiting = 0

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
        completion = ApiRequest.parse(await _body(request), self.model, chat=chat)
        if self._waiting >= MAX_WAITING:
            raise ApiError(f"{MAX_WAITING} requests are waiting; allowed: another one later", status=503)
        self._waiting += 1  # for its prompts; `_queued` counts it while it waits for its turn
        try:
            prompts = await asyncio.get_running_loop().run_in_executor(
                self._prompt_thread, self._prompt_ids, completion
            )
        finally:
            self._waiting -= 1
        limit = self.engine.plan.workload.new_tokens if completion.max_tokens is None else completion.max_tokens
        for ids in prompts:
            EngineRequest.build([ids], limit, completion.sampling).check(
                self.engine.plan.workload, self.engine.config.shape.vocab
            )
        answer, usage = ApiAnswer(self.model, chat), Usage()
        pieces = self._pieces(completion, prompts, limit, usage)
        if completion.stream:
            events = self._events(pieces, answer, usage if completion.include_usage else None)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        choices = [("", "") for _ in prompts]
        async with aclosing(pieces):
            async for index, text, reason in pieces:
                choices[index] = choices[index][0] + text, reason or ""
                if await request.is_disconnected():
                    return Response(status_code=499)  # nobody reads it
        return JSONResponse(answer.whole(choices, usage))

    def _prompt_ids(self, asked: ApiRequest) -> list[list[int]]:
        """Token ids of the prompts. Raises ChatTemplateError and ModelError."""
        tokenizer = self._tokenizer
        if asked.messages:
            return [encoded(tokenizer, chat_text(tokenizer, asked.messages, self._templates), special_tokens=False)]
        return [encoded(tokenizer, each) if isinstance(each, str) else each for each in asked.prompts]

    async def _pieces(
        self, asked: ApiRequest, prompts: list[list[int]], limit: int, usage: Usage
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices, one choice after the other, once it is this request's turn."""
        engine = self.engine
        sampling = replace(asked.sampling, stop_token_ids=stop_tokens(engine.tokenizer))
        async with self._queued():
            for index, ids in enumerate(prompts):
                tokens = engine.stream(ids, limit, sampling, reuse_prefix=True)
                stream = TextStream(tokens, engine.tokenizer, asked.stop, sampling.stop_token_ids)
                pieces, before = iter(stream), usage.completion
                usage.prompt += len(ids)
                try:
                    while (piece := await self._run(next, pieces, None)) is not None:
                        usage.completion = before + len(stream.tokens)
                        yield index, piece, None
                    await self._run(tokens.close)
                finally:
                    # A request that was cancelled during a round is closed after it.
                    self._thread.submit(tokens.close)
                usage.cached += engine.statistics.reused_tokens
                yield index, "", stream.finish_reason

    async def _events(
        self, pieces: AsyncGenerator[Piece, None], answer: ApiAnswer, usage: Usage | None
    ) -> AsyncIterator[str]:
        """An answer as server-sent events. An error after the first one is an event, too."""
        begun: set[int] = set()
        try:
            async with aclosing(pieces):
                async for index, text, reason in pieces:
                    if text or reason:
                        yield _event(answer.chunk(index, text, reason, first=index not in begun))
                        begun.add(index)
        except ValueError as error:
            if not is_user_error(error):
                raise
            yield _event(ApiError(str(error), status=500).document)
        if usage is not None:
            yield _event(answer.usage_chunk(usage))
        yield "data: [DONE]\n\n"

    @asynccontextmanager
    async def _queued(self) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turn.release()

    async def _run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls a function in the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


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
    local = [Middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_NAMES, "[::1]"])] if host in LOCAL_NAMES else []
    handlers = {
        ApiError: _refused, HTTPException: _not_here, ValueError: _wrong, ClientDisconnect: _gone, Exception: _failed,
    }  # fmt: skip
    return Starlette(routes=routes, middleware=local, exception_handlers=handlers)


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
