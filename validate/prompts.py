"""Texts to run plans on: prose that ships with Python, or a user's file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from ridgeplan.roofline.plan.plan import MAX_TOKENS

LIKELY_CHARACTERS_PER_TOKEN = 6  # English prose; more are read if a tokenizer's tokens are longer
MAX_CHARACTERS = LIKELY_CHARACTERS_PER_TOKEN * MAX_TOKENS  # what the longest context may hold


class PromptError(ValueError):
    """A text file that is missing, empty or not text, or a text that is too short."""


def sample_text() -> str:
    """About 465 kB of English prose: the topics of Python's own help."""
    from pydoc_data.topics import topics

    return "\n".join(text for _, text in sorted(topics.items()))


def prompt_tokens(tokenizer: Any, tokens: int, text: str | None = None) -> list[int]:
    """Exactly `tokens` token ids from the start of `text`, by default the sample text.

    Raises PromptError when the text is shorter than that.
    """
    ids = first_tokens(tokenizer, tokens, sample_text() if text is None else text)
    if len(ids) < tokens:
        raise PromptError(f"the text has {len(ids)} tokens; needed: {tokens}")
    return ids


def first_tokens(tokenizer: Any, tokens: int, text: str) -> list[int]:
    """Up to `tokens` token ids from the start of `text`, of which no more is encoded than they take."""
    taken = tokens * LIKELY_CHARACTERS_PER_TOKEN
    ids = _encoded(tokenizer, text[:taken])
    while len(ids) <= tokens and taken < len(text):  # the last token may be cut, so one more is wanted
        taken *= 2
        ids = _encoded(tokenizer, text[:taken])
    return ids[:tokens]


def prompt_batch(tokenizer: Any, tokens: int, batch: int, text: str | None = None) -> list[list[int]]:
    """`batch` prompts of `tokens` token ids, from positions spread over `text`, by default the sample text.

    Each begins with the token that begins texts, if the tokenizer writes one: Gemma predicts badly without it. Raises
    PromptError when the text is too short for that many different prompts.
    """
    ids = _encoded(tokenizer, sample_text() if text is None else text)
    last = len(ids) - tokens
    if last < batch - 1:
        parts = f"{batch} part{'s' * (batch > 1)} of {tokens}"
        raise PromptError(f"the text has {len(ids)} tokens; needed: {tokens + batch - 1}, for {parts}")
    starts = [last * index // max(batch - 1, 1) for index in range(batch)]
    begin = ids[:1] if ids[0] == getattr(tokenizer, "bos_token_id", None) else []
    return [[*begin, *ids[start + len(begin) : start + tokens]] for start in starts]


def random_batch(vocab: int, tokens: int, batch: int) -> list[list[int]]:
    """`batch` prompts of `tokens` random token ids below `vocab`, always the same: a text that nothing predicts."""
    generator = random.Random(0)
    return [generator.choices(range(vocab), k=tokens) for _ in range(batch)]


def read_prompt(path: str | Path) -> str:
    """The text of a UTF-8 file. Raises PromptError naming the file."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise PromptError(f"cannot read text file {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"file {str(path)!r} is not UTF-8 text: byte {error.start} is wrong") from error
    if len(text) > MAX_CHARACTERS:
        raise PromptError(f"text file {str(path)!r} is too long; allowed: up to {MAX_CHARACTERS} characters")
    if not text.strip():
        raise PromptError(f"text file {str(path)!r} is empty; allowed: text of one character or more")
    return text


def _encoded(tokenizer: Any, text: str) -> list[int]:
    from ridgeplan.runtime.text import encoded  # transformers takes seconds

    return encoded(tokenizer, text)
