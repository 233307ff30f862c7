"""A task of RULER: samples of a given size, the words that they are made of, and how an answer is scored."""

from __future__ import annotations

import itertools
import random
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

GROWTH = 8  # of a sample whose tokens are not known well enough yet


class TaskError(ValueError):
    """A task that is not known, or that does not fit a context."""


@dataclass(frozen=True)
class RulerSample:
    """A prompt, how its answer begins, and the texts that a right answer contains."""

    prompt: str
    opening: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Material:
    """What samples are made of. sentences: of the haystack, in order. words: different ones, lower case.

    documents, questions: of the question tasks by name, empty without their data.
    """

    sentences: tuple[str, ...]
    words: tuple[str, ...]
    questions: dict[str, QuestionSet]


@dataclass(frozen=True)
class QuestionSet:
    """Documents, and questions about some of them: text, answers, and indices of the documents that hold these."""

    documents: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...]


# Makes a sample of `size` parts (sentences, needles, words or documents) with a generator of random numbers.
Make = Callable[[Material, int, random.Random], RulerSample]


@dataclass(frozen=True)
class Task:
    """A task: its name, how samples are made, the most tokens of an answer, and how many of the answers are wanted.

    any_answer: one of the answers is enough (RULER's string match part); otherwise each counts its share (match all).
    data: the question set that it needs.
    """

    name: str
    make: Make
    new_tokens: int
    any_answer: bool = False
    data: str | None = None

    def score(self, output: str, answers: Sequence[str]) -> float:
        """From 0 to 1: the share of the answers that the output contains, in any case of letters."""
        contained = [answer.lower() in output.lower() for answer in answers]
        return float(any(contained)) if self.any_answer else sum(contained) / len(contained)


def sample_that_fits(
    task: Task, material: Material, seed: str, count: Callable[[RulerSample], int], max_tokens: int
) -> RulerSample:
    """The largest sample of `seed` that is at most `max_tokens` tokens long by `count`. Raises TaskError if none is.

    Tokens grow almost linearly with size, so the next size is where the line through the last two reaches `max_tokens`.
    """

    def measured(size: int) -> tuple[int, int]:
        return size, count(task.make(material, size, random.Random(seed)))

    last = before = fits = measured(1)
    if fits[1] > max_tokens:
        raise TaskError(f"{task.name} takes {fits[1]} tokens at least; allowed by the context: {max_tokens}")
    beyond: int | None = None  # the smallest size that does not fit, as far as is known
    while beyond is None or beyond - fits[0] > 1:
        largest = GROWTH * fits[0] if beyond is None else beyond - 1
        size = _where(min(before, last), max(before, last), max_tokens) + (beyond is None)
        before, last = last, measured(min(max(size, fits[0] + 1), largest))
        if last[1] <= max_tokens:
            fits = last
        else:
            beyond = last[0]
    return task.make(material, fits[0], random.Random(seed))


def _where(first: tuple[int, int], second: tuple[int, int], tokens: int) -> int:
    """The size at which the line through two sizes with their tokens reaches `tokens`; far away for a level line."""
    size, first_tokens = first
    return size + (second[0] - size or tokens) * (tokens - first_tokens) // max(1, second[1] - first_tokens)


class WordList(NamedTuple):
    """The words of ruler_words.toml."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    noise: tuple[str, ...]


@cache
def word_list() -> WordList:
    """Adjectives and nouns, of which keys are made, and sentences without content."""
    tables = tomllib.loads(Path(__file__).with_name("ruler_words.toml").read_text(encoding="utf-8"))
    return WordList(tuple(tables["adjectives"].split()), tuple(tables["nouns"].split()), tuple(tables["noise"]))


def noise(count: int) -> list[str]:
    """`count` sentences without content, the same few again and again."""
    return cycled(word_list().noise, count)


def pairs(generator: random.Random, count: int) -> list[str]:
    """Different words such as calm-river, drawn from all pairs of an adjective and a noun; numbered where these end."""
    total = len(word_list().adjectives) * len(word_list().nouns)
    return [_pair(*divmod(number, total)) for number in generator.sample(range(total * -(-count // total)), count)]


def _pair(copy: int, index: int) -> str:
    adjectives, nouns, _ = word_list()
    word = f"{adjectives[index // len(nouns)]}-{nouns[index % len(nouns)]}"
    return f"{word}-{copy + 1}" if copy else word


def sentences_of(text: str) -> tuple[str, ...]:
    """The sentences of a prose text, with single blanks for all white space."""
    parts = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return tuple(part for part in parts if part)


def words_of(text: str) -> tuple[str, ...]:
    """The different words of four letters or more in a text, in alphabetic order, then those of `word_list`."""
    words = sorted(set(re.findall(r"\b[a-z]{4,12}\b", text)))
    return tuple(dict.fromkeys([*words, *word_list().adjectives, *word_list().nouns]))


def cycled(items: tuple[str, ...], count: int) -> list[str]:
    """The first `count` items, from the start again where they end."""
    return list(itertools.islice(itertools.cycle(items), count))


def scattered(parts: list[str], inserted: list[str], generator: random.Random) -> list[str]:
    """`parts` with `inserted` between them, in order, at random places."""
    places = sorted(generator.choices(range(len(parts) + 1), k=len(inserted)))
    merged, taken = [], 0
    for place, part in zip(places, inserted, strict=True):
        merged += [*parts[taken:place], part]
        taken = place
    return merged + parts[taken:]
