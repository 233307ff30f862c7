"""Renders the chat template of a model, which is a program from its file, in a process of its own with limits.

jinja's sandbox keeps a template from reading files, but not from running for hours or filling the memory.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

CPU_S, WALL_S = 5, 120  # of rendering; of the whole process, which imports transformers
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 16  # that a template adds to a message; system prompts take a few thousand
MAX_REASON = 200
ROLES = ("system", "user", "assistant")
Messages = Sequence[Mapping[str, str]]  # each with a role and its content


class ChatTemplateError(ValueError):
    """A chat template that is missing, too slow, too large, wrong, or changes messages."""


def chat_text(tokenizer: Any, messages: Messages) -> str:
    """A conversation as the model reads it, up to the opening of the next answer.

    messages: `{"role": "system" | "user" | "assistant", "content": text}`, the last one not the assistant's.
    Raises ChatTemplateError, one line.
    """
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ChatTemplateError(f"message {index} is wrong; allowed: an object with a role and a content")
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise ChatTemplateError(f"message {index} is wrong; allowed: a text, of the role {', '.join(ROLES)}")
    if not messages or messages[-1]["role"] == "assistant":
        raise ChatTemplateError("there is nothing to answer; allowed: messages of which the last is the user's")
    if not getattr(tokenizer, "chat_template", None):
        raise ChatTemplateError("the model has no chat template; allowed: prompts that are plain text")
    allowed = "prompts that are plain text"
    return rendered(*template_of(tokenizer, allowed), [list(messages)], allowed)[0]


def template_of(tokenizer: Any, allowed: str) -> tuple[str, dict[str, Any]]:
    """The chat template and the special tokens of a tokenizer. Raises ChatTemplateError where no template is default.

    allowed: what the error suggests instead.
    """
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:  # several templates, none of which is the default
        raise unusable(str(error), allowed) from error
    return template, dict(tokenizer.special_tokens_map)


def unusable(why: str, allowed: str) -> ChatTemplateError:
    """The error of a template that cannot be used, one line."""
    line = "".join(filter(str.isprintable, " ".join(why.split())))
    shown = line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 3]}..."
    return ChatTemplateError(f"the model's chat template cannot be used: {shown}; allowed: {allowed}")


def rendered(
    template: str, special_tokens: dict[str, Any], conversations: Sequence[Messages], allowed: str
) -> list[str]:
    """The text of each conversation, from a process with limits for all. Raises ChatTemplateError."""
    request = json.dumps({
        "template": template, "special_tokens": special_tokens, "conversations": conversations, "cpu_s": CPU_S,
    })  # fmt: skip
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, encoding="utf-8", errors="replace", timeout=WALL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise unusable(f"it takes more than {WALL_S} s", allowed) from error
    if done.returncode < 0:  # by a signal, as the limit of the CPU's time sends
        raise unusable(f"it takes more than {CPU_S} s of CPU time", allowed)
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        last = done.stderr.strip().splitlines()[-1:] or ["its process ended without an answer"]
        raise unusable(last[0], allowed) from error
    if "error" in answer:
        raise unusable(answer["error"], allowed)
    texts: list[str] = answer["texts"]
    return texts


def main() -> None:
    """Reads a request from stdin and writes its answer to stdout."""
    from transformers.utils.chat_template_utils import render_jinja_template

    request = json.load(sys.stdin)
    conversations = request["conversations"]
    used_s = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + 1 + request["cpu_s"], used_s + 2 + request["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        texts, _ = render_jinja_template(
            conversations, chat_template=request["template"], add_generation_prompt=True, **request["special_tokens"]
        )
        added = max(
            len(text) - sum(len(message["content"]) for message in messages)
            for text, messages in zip(texts, conversations, strict=True)
        )
        answer = {"texts": texts} if added <= MAX_CHARACTERS else {"error": f"it makes {added} characters"}
    except MemoryError:
        answer = {"error": f"it takes more than {MEMORY_BYTES >> 30} GiB of memory"}
    except Exception as error:  # noqa: BLE001 - a template raises whatever it likes
        answer = {"error": f"{type(error).__name__}: {str(error)[:MAX_REASON]}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
