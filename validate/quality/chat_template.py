"""Renders the chat template of a model, which is a program from its file, in a process of its own with limits.

jinja's sandbox keeps a template from reading files, but not from running for hours or filling the memory. A template is
rendered around a marker, whose place messages then take. As its cost and its text may depend on the message, each
message that a model gets is rendered, too, within the same limits.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CPU_S, WALL_S = 5, 120  # of rendering; of the whole process, which imports transformers
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 16  # that a template adds to a message; system prompts take a few thousand
MAX_REASON = 200
MARKER = "ridgeplan's message"
PROBE = "a \"quoted\" 'message'\nof two lines: <b> & {{ braces }} {% raw %} \\n \u00e9"  # as prompts may look


class ChatTemplateError(ValueError):
    """A chat template that is too slow, too large, wrong, or changes messages."""


@dataclass(frozen=True)
class ChatFrame:
    """What a model's chat template puts before and after a user's message, the opening of the answer included."""

    before: str
    after: str
    template: str
    special_tokens: dict[str, Any]

    def around(self, message: str) -> str:
        """The message in its frame."""
        return self.before + message + self.after

    def check(self, messages: Sequence[str]) -> None:
        """Raises ChatTemplateError unless the template, within its limits, treats messages as it does the marker."""
        _framed(self.template, self.special_tokens, messages)


def chat_frame(tokenizer: Any) -> ChatFrame | None:
    """The frame of a tokenizer's chat template; None without one. Raises ChatTemplateError, one line."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several templates, none of which is the default
        raise _failure(str(error)) from error
    special_tokens = dict(tokenizer.special_tokens_map)
    return ChatFrame(*_framed(template, special_tokens, [PROBE]), template, special_tokens)


def _failure(why: str) -> ChatTemplateError:
    line = "".join(filter(str.isprintable, " ".join(why.split())))
    shown = line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 3]}..."
    return ChatTemplateError(f"the model's chat template cannot be used: {shown}; allowed: --tasks none")


def _framed(template: str, special_tokens: dict[str, Any], messages: Sequence[str]) -> tuple[str, str]:
    """What the template puts before and after each message. Raises ChatTemplateError unless that is the same for all.

    The marker is rendered with them: a template may print the date, which changes during a long run.
    """
    marked, *rendered = _rendered(template, special_tokens, [MARKER, *messages])
    before, marker, after = marked.partition(MARKER)
    if not marker or rendered != [before + message + after for message in messages]:
        raise _failure("it does not hold a user's message once and as it is")
    return before, after


def _rendered(template: str, special_tokens: dict[str, Any], messages: Sequence[str]) -> list[str]:
    """The template around each user's message, from a process with limits for all. Raises ChatTemplateError."""
    request = json.dumps({
        "template": template, "special_tokens": special_tokens, "messages": list(messages), "cpu_s": CPU_S,
    })  # fmt: skip
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, encoding="utf-8", errors="replace", timeout=WALL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _failure(f"it takes more than {WALL_S} s") from error
    if done.returncode < 0:  # by a signal, as the limit of the CPU's time sends
        raise _failure(f"it takes more than {CPU_S} s of CPU time")
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        last = done.stderr.strip().splitlines()[-1:] or ["its process ended without an answer"]
        raise _failure(last[0]) from error
    if "error" in answer:
        raise _failure(answer["error"])
    texts: list[str] = answer["texts"]
    return texts


def main() -> None:
    """Reads a request from stdin and writes its answer to stdout."""
    from transformers.utils.chat_template_utils import render_jinja_template

    request = json.load(sys.stdin)
    used_s = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + 1 + request["cpu_s"], used_s + 2 + request["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    conversations = [[{"role": "user", "content": message}] for message in request["messages"]]
    try:
        texts, _ = render_jinja_template(
            conversations, chat_template=request["template"], add_generation_prompt=True, **request["special_tokens"]
        )
        added = max(len(text) - len(message) for text, message in zip(texts, request["messages"], strict=True))
        answer = {"texts": texts} if added <= MAX_CHARACTERS else {"error": f"it makes {added} characters"}
    except MemoryError:
        answer = {"error": f"it takes more than {MEMORY_BYTES >> 30} GiB of memory"}
    except Exception as error:  # noqa: BLE001 - a template raises whatever it likes
        answer = {"error": f"{type(error).__name__}: {str(error)[:MAX_REASON]}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
