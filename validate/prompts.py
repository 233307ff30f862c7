"""Texts to run plans on: prose that ships with Python, or a user's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LIKELY_CHARACTERS_PER_TOKEN = 6  # English prose; more are read if a tokenizer's tokens are longer


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
    whole = sample_text() if text is None else text
    taken = tokens * LIKELY_CHARACTERS_PER_TOKEN
    ids = list(tokenizer.encode(whole[:taken]))
    while len(ids) <= tokens and taken < len(whole):  # one extra, as the last token may be cut
        taken *= 2
        ids = list(tokenizer.encode(whole[:taken]))
    if len(ids) < tokens:
        raise PromptError(f"the text has {len(ids)} tokens; needed: {tokens}")
    return ids[:tokens]


def prompt_batch(tokenizer: Any, tokens: int, batch: int, text: str | None = None) -> list[list[int]]:
    """`batch` prompts of `tokens` token ids, from positions spread over `text`, by default the sample text.

    Raises PromptError when the text is too short for that many different prompts.
    """
    ids = list(tokenizer.encode(sample_text() if text is None else text))
    last = len(ids) - tokens
    if last < batch - 1:
        raise PromptError(f"the text has {len(ids)} tokens; needed: {tokens + batch - 1}, for {batch} of {tokens}")
    starts = [last * index // max(batch - 1, 1) for index in range(batch)]
    return [ids[start : start + tokens] for start in starts]


def read_prompt(path: str | Path) -> str:
    """The text of a UTF-8 file. Raises PromptError naming the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"cannot read text file {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"file {str(path)!r} is not UTF-8 text: byte {error.start} is wrong") from error
    if not text.strip():
        raise PromptError(f"text file {str(path)!r} is empty; allowed: text of one character or more")
    return text
