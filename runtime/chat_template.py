"""Renders the chat template of a model, which is a program from its file, in a process of its own with limits.

jinja's sandbox keeps a template from reading files, but not from running for hours or filling the memory.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

CPU_S, WALL_S = 5, 120  # of rendering; of the whole process, which imports transformers
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 16  # that a template adds to a message; system prompts take a few thousand
MAX_REASON = 200
ROLES = ("system", "user", "assistant")
Messages = Sequence[Mapping[str, str]]  # each with a role and its content


class ChatTemplateError(ValueError):
    """A chat template that is missing, too slow, too large, wrong, or changes messages."""


def chat_text(tokenizer: Any, messages: Messages, process: TemplateProcess | None = None) -> str:
    """A conversation as the model reads it, up to the opening of the next answer.

    messages: `{"role": "system" | "user" | "assistant", "content": text}`, the last one not the assistant's. process:
    of several calls, which starting it for each would slow by half a second. Raises ChatTemplateError, one line.
    """
    from ridgeplan.roofline.catalog.validation import brief  # not at the top: the process runs this file alone

    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ChatTemplateError(f"message {index} is {brief(message)}; allowed: a role and a content")
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            allowed = f"a text, of the role {', '.join(ROLES)}"
            raise ChatTemplateError(f"message {index} is {brief(message)}; allowed: {allowed}")
    if not messages or messages[-1]["role"] == "assistant":
        raise ChatTemplateError("there is nothing to answer; allowed: messages of which the last is the user's")
    require_template(tokenizer.chat_template)
    allowed = "prompts that are plain text"
    render = rendered if process is None else process.rendered
    return render(*template_of(tokenizer, allowed), [list(messages)], allowed)[0]


def require_template(template: object) -> None:
    """Raises ChatTemplateError where there is no chat template."""
    if not template:
        raise ChatTemplateError("the model has no chat template; allowed: prompts that are plain text")


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
    with closing(TemplateProcess()) as process:
        return process.rendered(template, special_tokens, conversations, allowed)


class TemplateProcess:
    """A process that renders templates, with limits for each request. It starts with the first one, and anew after one
    that failed; it ends with this object at the latest.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def rendered(
        self, template: str, special_tokens: dict[str, Any], conversations: Sequence[Messages], allowed: str
    ) -> list[str]:
        """As the function `rendered`."""
        request = json.dumps({
            "template": template, "special_tokens": special_tokens, "conversations": conversations, "cpu_s": CPU_S,
        })  # fmt: skip
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        timer = threading.Timer(WALL_S, process.kill)
        timer.start()
        with suppress(BrokenPipeError):
            process.stdin.write(f"{request}\n")
            process.stdin.flush()
        line = process.stdout.readline()
        late = timer.finished.is_set()
        timer.cancel()
        if not line:
            self._process = None
            raise unusable(_end_of(process, late=late), allowed)
        answer = json.loads(line)
        if "error" in answer:
            raise unusable(answer["error"], allowed)
        texts: list[str] = answer["texts"]
        return texts

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _end_of(process: subprocess.Popen[str], *, late: bool) -> str:
    """Why a process ended without an answer."""
    _, errors = process.communicate()
    if late:
        return f"it takes more than {WALL_S} s"
    if process.returncode < 0:  # by a signal, as the limit of the CPU's time sends
        return f"it takes more than {CPU_S} s of CPU time"
    return (errors.strip().splitlines()[-1:] or ["its process ended without an answer"])[0]


def main() -> None:
    """Reads requests from stdin, a line each, and writes their answers to stdout."""
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in sys.stdin:
        request = json.loads(line)
        conversations = request["conversations"]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + request["cpu_s"], hard))
        try:
            texts, _ = render_jinja_template(
                conversations, chat_template=request["template"], add_generation_prompt=True,
                **request["special_tokens"],
            )  # fmt: skip
            added = max(
                len(text) - sum(len(message["content"]) for message in messages)
                for text, messages in zip(texts, conversations, strict=True)
            )
            answer = {"texts": texts} if added <= MAX_CHARACTERS else {"error": f"it makes {added} characters"}
        except MemoryError:
            answer = {"error": f"it takes more than {MEMORY_BYTES >> 30} GiB of memory"}
        except Exception as error:  # noqa: BLE001 - a template raises whatever it likes
            answer = {"error": f"{type(error).__name__}: {str(error)[:MAX_REASON]}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
