"""A task of RULER: what makes a sample of a given size, and how an answer is scored."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GROWTH = 8  # of a sample whose tokens are not known well enough yet


class TaskError(ValueError):
    """A task that is not known, or that does not fit a context."""


@dataclass(frozen=True)
class Sample:
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
Make = Callable[[Material, int, random.Random], Sample]


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
        found = [answer.lower() in output.lower() for answer in answers]
        return float(any(found)) if self.any_answer else sum(found) / len(found)


def sample_that_fits(task: Task, material: Material, seed: str, count: Callable[[Sample], int], most: int) -> Sample:
    """The largest sample of `seed` that is at most `most` tokens long by `count`. Raises TaskError if none is.

    Tokens grow almost linearly with size, so sizes are extrapolated until one does not fit, then interpolated.
    """

    def measured(size: int) -> tuple[int, int]:
        return size, count(task.make(material, size, random.Random(seed)))

    first = fits = measured(1)
    if first[1] > most:
        raise TaskError(f"{task.name} takes {first[1]} tokens at least; allowed by the context: {most}")
    beyond: tuple[int, int] | None = None
    while beyond is None or beyond[0] - fits[0] > 1:
        size = min(_where(first, fits, most) + 1, GROWTH * fits[0]) if beyond is None else _where(fits, beyond, most)
        found = measured(max(size, fits[0] + 1))
        if found[1] <= most:
            fits = found
        else:
            beyond = found
    return task.make(material, fits[0], random.Random(seed))


def _where(one: tuple[int, int], other: tuple[int, int], tokens: int) -> int:
    """The size at which the line through two sizes with their tokens reaches `tokens`; far away for a level line."""
    size, found = one
    return size + (other[0] - size or tokens) * (tokens - found) // max(1, other[1] - found)
