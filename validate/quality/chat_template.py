"""What a model's chat template puts around a user's message.

A template is rendered around a marker, whose place messages then take. As its cost and its text may depend on the
message, each message that a model gets is rendered, too, within the limits of `ridgeplan.runtime.chat_template`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeplan.runtime.chat_template import rendered, template_of, unusable

ALLOWED = "--tasks none"
MARKER = "ridgeplan's message"
PROBE = "a \"quoted\" 'message'\nof two lines: <b> & {{ braces }} {% raw %} \\n \u00e9"  # as prompts may look


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
    template, special_tokens = template_of(tokenizer, ALLOWED)
    return ChatFrame(*_framed(template, special_tokens, [PROBE]), template, special_tokens)


def _framed(template: str, special_tokens: dict[str, Any], messages: Sequence[str]) -> tuple[str, str]:
    """What the template puts before and after each message. Raises ChatTemplateError unless that is the same for all.

    The marker is rendered with them: a template may print the date, which changes during a long run.
    """
    conversations = [[{"role": "user", "content": message}] for message in (MARKER, *messages)]
    marked, *others = rendered(template, special_tokens, conversations, ALLOWED)
    before, marker, after = marked.partition(MARKER)
    if not marker or others != [before + message + after for message in messages]:
        raise unusable("it does not hold a user's message once and as it is", ALLOWED)
    return before, after
