"""Text from tokens as they arrive, and stop words in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ridgeplan.runtime.errors import WorkloadError, failures_as, quiet_rust


def encoded(tokenizer: Any, text: str, *, special_tokens: bool = True) -> list[int]:
    """Token ids of a text. Raises ModelError for a tokenizer that fails on it.

    special_tokens: whether the tokenizer adds those that begin a text; a chat template has written them itself.
    """
    options = {} if special_tokens else {"add_special_tokens": False}
    with failures_as("the model's tokenizer cannot encode the text"), quiet_rust():
        return list(tokenizer.encode(text, **options))


def text_decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Turns token ids into text, without special tokens."""
    return partial(tokenizer.decode, skip_special_tokens=True)


def stop_tokens(tokenizer: Any, folder: str | Path) -> tuple[int, ...]:
    """The tokens that end a text: the tokenizer's, and those of generation_config.json, such as the end of a turn.

    folder: of the model. Raises ModelError for a damaged file.
    """
    path, ids = Path(folder, "generation_config.json"), [tokenizer.eos_token_id]
    if path.is_file():
        with failures_as(f"cannot read {str(path)!r}"):
            more = json.loads(path.read_bytes()).get("eos_token_id")
            ids += more if isinstance(more, list) else [more]
    return tuple(sorted({token for token in ids if type(token) is int and token >= 0}))


def text_pieces(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The text of tokens as they arrive. Tokens that end inside a character are held back."""
    # The tokens of the last piece, because some tokenizers join it with the next, and then the tokens held back.
    window: list[int] = []
    last = 0
    for token in tokens:
        window.append(token)
        text = decode(window)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(decode(window[:last])) :]
            window, last = window[last:], len(window) - last
    yield decode(window)[len(decode(window[:last])) :]


def require_stop_words(stop: Sequence[str]) -> None:
    """Raises WorkloadError unless `stop` is a sequence of texts of one character or more."""
    if isinstance(stop, str) or not all(isinstance(word, str) and word for word in stop):
        raise WorkloadError("stop is not allowed; allowed: several texts of one character or more")


def before_stop(pieces: Iterable[str], stop: Sequence[str]) -> Generator[str, None, bool]:
    """The text up to the first stop word, which is left out; returns whether there was one.

    Text that may begin a stop word is held back.
    """
    held = ""
    for piece in pieces:
        held += piece
        stops = [place for word in stop if (place := held.find(word)) >= 0]
        if stops:
            yield held[: min(stops)]
            return True
        ready = len(held) - max((_begun(held, word) for word in stop), default=0)
        yield held[:ready]
        held = held[ready:]
    yield held
    return False


def _begun(text: str, word: str) -> int:
    """Characters at the end of `text` that begin `word`."""
    longest = min(len(text), len(word) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(word[:count])), 0)


class TextStream:
    """The text of tokens as they arrive, up to a stop word. Iterating over it, once, gives its pieces.

    tokens, text: those that arrived so far. finish_reason: at the end, "stop" after a stop token or a stop word, and
    "length" where the tokens ended without one; before it None.
    """

    def __init__(self, tokens: Iterable[int], tokenizer: Any, stop: Sequence[str], stop_token_ids: Collection[int]):
        self._arriving, self._decode = tokens, text_decoder(tokenizer)
        self._stop, self._stop_token_ids = stop, stop_token_ids
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None

    def __iter__(self) -> Iterator[str]:
        for piece in self._until_end():
            self.text += piece
            yield piece

    def _until_end(self) -> Iterator[str]:
        stopped = yield from before_stop(text_pieces(self._recorded(), self._decode), self._stop)
        ended = bool(self.tokens) and self.tokens[-1] in self._stop_token_ids
        self.finish_reason = "stop" if stopped or ended else "length"

    def _recorded(self) -> Iterator[int]:
        for token in self._arriving:
            self.tokens.append(token)
            yield token
