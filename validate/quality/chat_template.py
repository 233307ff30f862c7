"""Renders the chat template of a model, which is a program from its file, in a process of its own with limits.

jinja's sandbox keeps a template from reading files, but not from running for hours or filling the memory. A template is
rendered once, around a marker, and prompts then take the marker's place.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
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

    def around(self, message: str) -> str:
        """The message in its frame."""
        return self.before + message + self.after


def chat_frame(tokenizer: Any) -> ChatFrame | None:
    """The frame of a tokenizer's chat template; None without one. Raises ChatTemplateError, one line."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several templates, none of which is the default
        raise _failure(str(error)) from error
    marked, probed = _rendered(template, dict(tokenizer.special_tokens_map), [MARKER, PROBE])
    before, marker, after = marked.partition(MARKER)
    frame = ChatFrame(before, after)
    if not marker or frame.around(PROBE) != probed:
        raise _failure("it does not hold a user's message once and as it is")
    return frame


def _failure(why: str) -> ChatTemplateError:
    line = "".join(filter(str.isprintable, " ".join(why.split())))
    shown = line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 3]}..."
    return ChatTemplateError(f"the model's chat template cannot be used: {shown}; allowed: --tasks none")


def _rendered(template: str, special_tokens: dict[str, Any], messages: list[str]) -> list[str]:
    """The template around each user's message, from a process with limits. Raises ChatTemplateError."""
    request = json.dumps({"template": template, "special_tokens": special_tokens, "messages": messages})
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
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + 1 + CPU_S, used_s + 2 + CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    conversations = [[{"role": "user", "content": message}] for message in request["messages"]]
    try:
        texts, _ = render_jinja_template(
            conversations, chat_template=request["template"], add_generation_prompt=True, **request["special_tokens"]
        )
        longest = max(map(len, texts))
        answer = {"texts": texts} if longest <= MAX_CHARACTERS else {"error": f"it makes {longest} characters"}
    except MemoryError:
        answer = {"error": f"it takes more than {MEMORY_BYTES >> 30} GiB of memory"}
    except Exception as error:  # noqa: BLE001 - a template raises whatever it likes
        answer = {"error": f"{type(error).__name__}: {str(error)[:MAX_REASON]}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
