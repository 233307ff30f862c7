"""The documents of OpenAI's completions and chat completions: requests that are checked, answers, and errors.

Reference: https://platform.openai.com/docs/api-reference. `top_k` and `ignore_eos` are vLLM's.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.runtime.errors import WorkloadError, require_whole
from ridgeplan.runtime.sampling import SamplingParams

COMPLETION_TOKENS = 16  # of a completion whose request says nothing, as OpenAI has it; a chat's are the plan's
MAX_PROMPTS, MAX_STOP_WORDS = 64, 16
# Parameters that are taken only with a value that changes nothing, and those that never change an answer.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,), "suffix": ("",),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
    "tool_choice",
}  # fmt: skip
SAMPLING = ("temperature", "top_p", "top_k", "seed")
COMMON = {*SAMPLING, "model", "max_tokens", "stop", "stream", "stream_options", "ignore_eos"}
ROLES = {"developer": "system"}  # newer names of roles


class ApiError(Exception):
    """A request that is refused, with the status and the error object of its answer."""

    def __init__(self, message: str, parameter: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.parameter, self.code = status, parameter, code

    @property
    def document(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}


@contextmanager
def refused_as(parameter: str) -> Iterator[None]:
    """What the engine refuses inside the body is an ApiError about this parameter."""
    try:
        yield
    except WorkloadError as error:
        raise ApiError(str(error), parameter) from error


@dataclass(frozen=True)
class ApiRequest:
    """A checked request. prompts: texts or token ids, of a completion; messages: of a chat.

    max_tokens: of an answer, at most the plan's new tokens, for which the cache has room after any prompt.
    ignore_eos: tokens that end a text are tokens like any other, as benchmarks ask for.
    """

    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignore_eos: bool = False
    prompts: tuple[str | list[int], ...] = ()
    messages: tuple[dict[str, str], ...] = ()

    @classmethod
    def parse(cls, body: bytes, model: str, workload: Workload, *, chat: bool) -> ApiRequest:
        """Reads a body. model: the name that is served. workload: the plan's. Raises ApiError."""
        fields = _object(body)
        known = COMMON | ({"messages", "max_completion_tokens"} if chat else {"prompt"})
        for name, value in fields.items():
            if name in NEUTRAL and value not in NEUTRAL[name]:
                allowed = json.dumps(NEUTRAL[name][0])
                raise ApiError(f"{name} is {brief(value)}; allowed: {allowed}, other values are not supported", name)
            if name not in known and name not in NEUTRAL and name not in IGNORED:
                raise ApiError(f"{brief(name)} is not a parameter here; allowed: {', '.join(sorted(known))}", name)
        if fields.get("model") != model:
            shown = f"model is {brief(fields['model'])}" if "model" in fields else "model is missing"
            raise ApiError(f"{shown}; allowed: {brief(model)}", "model", 404, "model_not_found")
        options = _typed(fields, "stream_options", dict, "an object") or {}
        sampling = SamplingParams(temperature=1.0, seed=secrets.randbits(62))
        for name in (name for name in SAMPLING if name in fields):
            with refused_as(name):
                sampling = replace(sampling, **{name: fields[name]})
        name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        limit = fields.get(name, workload.new_tokens if chat else COMPLETION_TOKENS)
        with refused_as(name):
            require_whole(name, limit, 1, None)
        flags = (fields, "stream"), (options, "include_usage"), (fields, "ignore_eos")
        stream, with_usage, ignore_eos = (bool(_typed(of, flag, bool, "true or false")) for of, flag in flags)
        return cls(
            sampling, min(limit, workload.new_tokens), _stop_words(fields.get("stop")), stream, with_usage, ignore_eos,
            () if chat else _prompts(fields.get("prompt")), _messages(fields.get("messages")) if chat else (),
        )  # fmt: skip


def _object(body: bytes) -> dict[str, Any]:
    """The parameters of a body; those that are null count as left out."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {str(error)[:100]}; allowed: one JSON object") from error
    if not isinstance(value, dict):
        raise ApiError(f"the body is {'null' if value is None else brief(value)}; allowed: one JSON object")
    return {name: part for name, part in value.items() if part is not None}


def _typed(fields: Mapping[str, Any], name: str, kind: type, allowed: str) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise ApiError(f"{name} is {brief(value)}; allowed: {allowed}", name)
    return value


def _stop_words(value: Any) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else [] if value is None else value
    valid = isinstance(words, list) and all(isinstance(word, str) and word for word in words)
    if not valid or len(words) > MAX_STOP_WORDS:
        raise ApiError(
            f"stop is {brief(value)}; allowed: up to {MAX_STOP_WORDS} texts of one character or more", "stop"
        )
    return tuple(words)


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    """The prompts of a completion: a text or token ids, or several of them."""
    single = isinstance(value, str) or (isinstance(value, list) and value and all(type(part) is int for part in value))
    prompts = [value] if single else value
    valid = isinstance(prompts, list) and all(
        isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt))
        for prompt in prompts
    )
    if not valid or not prompts or not all(prompts) or len(prompts) > MAX_PROMPTS:
        allowed = f"a text, token ids, or up to {MAX_PROMPTS} of them, none empty"
        raise ApiError(f"prompt is {brief(value)}; allowed: {allowed}", "prompt")
    return tuple(prompts)


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    """A chat's messages, each with a role and a text; the chat template checks the roles."""
    if not isinstance(value, list) or not value:
        raise ApiError(f"messages is {brief(value)}; allowed: one or more messages", "messages")
    messages = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        fields = {name: part for name, part in message.items() if part is not None} if isinstance(message, dict) else {}
        content = fields.get("content")
        if isinstance(content, list):
            texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
            content = "".join(texts) if texts and len(texts) == len(content) else None
        if not isinstance(fields.get("role"), str) or not isinstance(content, str) or set(fields) - {
            "role", "content", "name"
        }:  # fmt: skip
            raise ApiError(f"{where} is {brief(message)}; allowed: a role and a content, which is text", where)
        messages.append({"role": ROLES.get(fields["role"], fields["role"]), "content": content})
    return tuple(messages)


@dataclass
class Usage:
    """Tokens of an answer so far. cached: of the prompts, those whose keys and values were still in the cache."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    @property
    def document(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt, "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion, "prompt_tokens_details": {"cached_tokens": self.cached},
        }  # fmt: skip


@dataclass(frozen=True)
class ApiAnswer:
    """The documents of one answer, whole or in chunks."""

    model: str
    chat: bool
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[tuple[str, str]], usage: Usage) -> dict[str, Any]:
        """The answer at once. choices: the text and the finish reason of each."""
        documents = [
            self._choice(
                index, {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}, reason
            )
            for index, (text, reason) in enumerate(choices)
        ]
        return self._document("chat.completion" if self.chat else "text_completion", documents, usage)

    def chunk(self, index: int, text: str, reason: str | None = None, *, first: bool = False) -> dict[str, Any]:
        """A piece of a choice's text; first: of its first piece; reason: of its end."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text or first:
            delta["content"] = text
        choice = self._choice(index, {"delta": delta} if self.chat else {"text": text}, reason)
        return self._document(self._chunk_kind, [choice], None)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream whose request includes the usage."""
        return self._document(self._chunk_kind, [], usage)

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _choice(self, index: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}

    def _document(self, kind: str, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        counts = {} if usage is None else {"usage": usage.document}
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices, **counts}


def model_list(model: str, created: int) -> dict[str, Any]:
    """The only model, as /v1/models lists it."""
    return {"object": "list", "data": [{"id": model, "object": "model", "created": created, "owned_by": "ridgeplan"}]}
