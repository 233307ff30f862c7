"""Decode steps of a serving engine, measured on the user's machine: vLLM in this process, or any server by HTTP."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any, Protocol
from urllib.parse import urlsplit

from ridgeplan.planner.engines.measurements import MeasuredStep
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.validation import brief

NEW_TOKENS = 96  # of every sequence
SKIPPED_STEPS = 8  # at the start and, together with the last ones, at the end
MIN_STEPS = 16  # in which all sequences of a batch decode
MAX_NEW_TOKENS = 1536
MAX_REFUSAL = 300  # characters of a server's message
TIMEOUT_S = 600.0
OnCase = Callable[[str, int, int], None]


class EngineFailed(ValueError):
    """The engine cannot be reached, started or measured, with its own words."""


class BatchTooLarge(EngineFailed):
    """A batch whose sequences do not all decode at once: the engine's memory or its limit holds fewer."""


class ServingEngine(Protocol):
    """An engine that can be measured."""

    version: str

    def step(self, context: int, batch: int) -> tuple[float, int]:
        """Milliseconds of a decode step of `batch` sequences of `context` tokens, and the context as it counts them."""


def measure_steps(
    engine: ServingEngine, shape: ModelShape, contexts: Sequence[int], batches: Sequence[int], weights: str, kv: str,
    on_case: OnCase = lambda what, done, total: None, on_skip: Callable[[str], None] = lambda why: None,
) -> Iterator[MeasuredStep]:  # fmt: skip
    """One measured step for each context and batch, the longest context first: shorter prompts are its beginnings.

    Batches that the engine does not run at once are left out. Raises EngineFailed.
    """
    cases = list(itertools.product(sorted(contexts, reverse=True), sorted(batches)))
    for done, (context, batch) in enumerate(cases):
        on_case(f"{context} tokens x {batch}", done, len(cases))
        try:
            tpot_ms, counted = engine.step(context, batch)
        except BatchTooLarge as error:
            on_skip(str(error))
            continue
        yield MeasuredStep(model=shape.name, context=counted, batch=batch, tpot_ms=tpot_ms, weights=weights, kv=kv)


def random_prompts(vocab: int, tokens: int, count: int) -> list[list[int]]:
    """Prompts of random tokens, so that no two share a beginning; always the same, so that a cache may hold them."""
    draw = random.Random(7)
    low, high = min(1000, vocab // 4), 9 * vocab // 10  # special tokens are at either end
    return [[draw.randrange(low, high) for _ in range(tokens)] for _ in range(count)]


# A server.


@dataclass(frozen=True)
class Stream:
    """The arrivals of one streamed completion: when, and how many tokens they held together."""

    stamps: tuple[float, ...]
    tokens: int
    prompt_tokens: int

    def step_s(self, first: float, last: float) -> float | None:
        """Seconds per token between two moments; None where too few tokens arrived there."""
        within = [stamp for stamp in self.stamps if first <= stamp <= last]
        per_chunk = self.tokens / len(self.stamps)
        if (len(within) - 1) * per_chunk < MIN_STEPS:
            return None
        return (within[-1] - within[0]) / ((len(within) - 1) * per_chunk)


@dataclass
class CompletionsServer:
    """An OpenAI-compatible server that is running. model: as it names it. vocab: of the model's tokens."""

    url: str
    model: str
    vocab: int
    version: str
    key: str = ""
    as_text: bool = False  # whether the server takes prompts as text alone

    @classmethod
    def connect(cls, url: str, vocab: int, model: str | None = None) -> CompletionsServer:
        """The server behind a URL, with the first model that it lists unless one is named. Raises EngineFailed."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineFailed(f"{brief(url)} is no address; allowed: http://HOST:PORT of a running server")
        base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        server = cls(base, model or "", vocab, "of an unknown version", os.environ.get("OPENAI_API_KEY", ""))
        listed = server._json("GET", "/v1/models").get("data")
        names = [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        if not names or (model is not None and model not in names):
            raise EngineFailed(f"{base} serves {brief(names)}" + (f", not {brief(model)}" if model else ": no model"))
        server.model, server.version = model or str(names[0]), server._version()
        return server

    def _version(self) -> str:
        """What vLLM or SGLang says of itself."""
        for path in ("/version", "/get_server_info", "/server_info"):
            try:
                version = self._json("GET", path).get("version")
            except EngineFailed:
                continue
            if isinstance(version, str) and version:
                return version
        return self.version

    def step(self, context: int, batch: int) -> tuple[float, int]:
        """As `ServingEngine.step`: the requests start together, and their time is that while all of them decode."""
        prompts = self._prompts(context, batch)
        self._run(prompts, 1)  # to the prefix cache, where there is one
        new_tokens = NEW_TOKENS
        while new_tokens <= MAX_NEW_TOKENS:
            try:
                streams = self._run(prompts, new_tokens)
            except EngineFailed:
                if new_tokens == NEW_TOKENS:
                    raise
                break  # more than the server allows
            first = max(stream.stamps[min(SKIPPED_STEPS, len(stream.stamps) - 1)] for stream in streams)
            last = min(stream.stamps[-1] for stream in streams)
            times = [stream.step_s(first, last) for stream in streams]
            measured = [seconds for seconds in times if seconds is not None]
            if len(measured) == batch:
                return 1e3 * statistics.median(measured), streams[0].prompt_tokens or context
            new_tokens *= 4
        raise BatchTooLarge(
            f"{batch} requests of {context} tokens never decode together; allowed: fewer, or a server that runs as "
            "many at once (--max-num-seqs, --max-running-requests)"
        )

    def _prompts(self, context: int, batch: int) -> list[Any]:
        tokens = random_prompts(self.vocab, context, batch)
        if self.as_text:
            return [" ".join(chr(ord("a") + token % 26) for token in prompt) for prompt in tokens]
        try:
            self.stream(tokens[0][:8], 1)
        except EngineFailed as error:
            if "status 4" not in str(error):
                raise
            self.as_text = True
            return self._prompts(context, batch)
        return tokens

    def _run(self, prompts: Sequence[Any], new_tokens: int) -> list[Stream]:
        """Completions that start together."""
        barrier = Barrier(len(prompts))

        def run(prompt: Any) -> Stream:
            try:
                barrier.wait(TIMEOUT_S)
            except BrokenBarrierError:
                raise EngineFailed("another request failed") from None
            return self.stream(prompt, new_tokens)

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(run, prompts))

    def stream(self, prompt: Any, new_tokens: int) -> Stream:
        """One streamed completion. Raises EngineFailed, also for one without a token."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        stamps: list[float] = []
        usage: Mapping[str, Any] = {}
        with self._response("POST", "/v1/completions", body) as lines:
            for line in lines:
                text = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or text == b"[DONE]":
                    continue
                chunk = _object(text, self.url)
                if chunk.get("error"):
                    raise EngineFailed(f"{self.url}: {brief(chunk['error'])}")
                stamps += [time.perf_counter()] if chunk.get("choices") else []
                usage = chunk.get("usage") or usage
        if not stamps:
            raise EngineFailed(f"{self.url} streamed no token")
        return Stream(tuple(stamps), usage.get("completion_tokens", new_tokens), usage.get("prompt_tokens", 0))

    def _json(self, method: str, path: str) -> Mapping[str, Any]:
        with self._response(method, path) as lines:
            return _object(b"".join(lines), self.url)

    def _response(self, method: str, path: str, body: Any = None) -> _Response:
        return _Response(self.url, method, path, body, self.key)


def _refusal(body: bytes) -> str:
    """The message of OpenAI's error object, or what there is in its place, on one line."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return brief(body)
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(message.split())[:MAX_REFUSAL] if isinstance(message, str) else brief(error)


@dataclass
class _Response:
    """One request, whose lines can be read as they arrive within a `with` block. Raises EngineFailed."""

    url: str
    method: str
    path: str
    body: Any
    key: str
    connection: http.client.HTTPConnection | None = field(default=None, init=False)

    def __enter__(self) -> Iterator[bytes]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.connection = kind(parts.netloc, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        content = None if self.body is None else json.dumps(self.body).encode()
        try:
            self.connection.request(self.method, parts.path + self.path, content, headers)
            response = self.connection.getresponse()
            if response.status != http.client.OK:
                raise EngineFailed(
                    f"{self.url}{self.path} answers status {response.status}: {_refusal(response.read())}"
                )
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            raise EngineFailed(f"{self.url} cannot be reached: {error or type(error).__name__}") from None
        return self._lines(response)

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            yield from response
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"{self.url} broke off its answer: {error or type(error).__name__}") from None

    def __exit__(self, *_: object) -> None:
        if self.connection is not None:
            self.connection.close()


def _object(text: bytes, url: str) -> Mapping[str, Any]:
    """A JSON object that a server sent. Raises EngineFailed."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EngineFailed(f"{url} answers {brief(text)}; allowed: a JSON object")
    return value


# vLLM in this process.


@dataclass
class InProcessVllm:
    """A vLLM that was started in this process, so that its steps can be timed one by one."""

    llm: Any
    version: str
    vocab: int

    @classmethod
    def start(
        cls, model: str, vocab: int, max_model_len: int, *, quantization: str | None = None, kv: str | None = None,
        load_format: str = "auto", **arguments: Any,
    ) -> InProcessVllm:  # fmt: skip
        """Starts vLLM with its defaults but for what is named. Raises EngineFailed if it is not installed or fails."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's steps are then this process's own
        try:
            vllm = import_module("vllm")
        except ImportError as error:
            raise EngineFailed(
                f"vLLM cannot be imported ({error}); allowed: --url of a running server, or an installed vLLM"
            ) from None
        formats = {"quantization": quantization, "kv_cache_dtype": kv}
        chosen = {name: value for name, value in formats.items() if value is not None}
        try:
            llm = vllm.LLM(
                model=model, load_format=load_format, skip_tokenizer_init=True, max_model_len=max_model_len,
                enable_prefix_caching=True, **chosen, **arguments,
            )  # fmt: skip
        except (ValueError, RuntimeError, OSError) as error:
            raise EngineFailed(f"vLLM does not start: {brief(str(error))}") from error
        return cls(llm, vllm.__version__, vocab)

    def step(self, context: int, batch: int) -> tuple[float, int]:
        """As `ServingEngine.step`: the median time between two steps of the engine, until a sequence ends: with drafts
        they end one after another."""
        requests = [{"prompt_token_ids": prompt} for prompt in random_prompts(self.vocab, context, batch)]
        first, many = (
            import_module("vllm").SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            for tokens in (1, NEW_TOKENS)
        )
        self.llm.generate(requests, first, use_tqdm=False)  # to the prefix cache
        engine, stamps, ends = self.llm.llm_engine, [time.perf_counter()], []
        run_step = type(engine).step

        def timed() -> Any:
            outputs = run_step(engine)
            stamps.append(time.perf_counter())
            if any(output.finished for output in outputs):
                ends.append(len(stamps))
            return outputs

        engine.step = timed
        try:
            self.llm.generate(requests, many, use_tqdm=False)
        finally:
            del engine.step
        steps = len(stamps) - 1
        late = max(steps - NEW_TOKENS, 0)  # before the last sequence's first token: its prompt was not in the cache
        gaps = [later - sooner for sooner, later in itertools.pairwise(stamps[: ends[0]])][late + SKIPPED_STEPS : -2]
        if not gaps or late > NEW_TOKENS // 2:  # some sequences waited for others
            raise BatchTooLarge(f"{batch} requests of {context} tokens took {steps} steps for {NEW_TOKENS} tokens each")
        return 1e3 * statistics.median(gaps), context


def saved_config(shape_file: str) -> str:
    """The model for vLLM to load: the folder of a config.json, or the name itself."""
    path = Path(shape_file)
    return str(path.parent) if path.name == "config.json" else shape_file
