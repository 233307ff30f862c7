"""RULER's 13 tasks by name (Hsieh et al. 2024), those of needles and of counting, and their prompts."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

from ridgeplan.validate.quality.chat_template import ChatFrame, chat_frame
from ridgeplan.validate.quality.ruler_questions import QUESTION_TASKS
from ridgeplan.validate.quality.ruler_samples import (
    Material,
    RulerSample,
    Task,
    TaskError,
    cycled,
    noise,
    pairs,
    sample_that_fits,
    scattered,
    sentences_of,
    words_of,
)

ANSWER_TOKENS = 128
DEPTHS = 40  # places in the haystack that needles may stand at, evenly spread

Draw = Callable[[random.Random, int], list[str]]  # that many different keys or values


@dataclass(frozen=True)
class Needles:
    """What is hidden. keys: needles with different keys; values: per key; queried: keys that the question names.

    haystack: "noise" repeats a few sentences, "text" is prose, "needles" are further needles.
    """

    haystack: str
    draw_keys: Draw
    draw_values: Draw
    kind: str
    keys: int = 1
    values: int = 1
    queried: int = 1

    def sample(self, material: Material, size: int, generator: random.Random) -> RulerSample:
        """A haystack of `size` sentences, or of as many other needles, with the needles in it."""
        keys = self.draw_keys(generator, self.keys)
        values = self.draw_values(generator, self.keys * self.values)
        owners = [key for key in keys for _ in range(self.values)]
        needles = [self._needle(key, value) for key, value in zip(owners, values, strict=True)]
        text = " ".join(_hidden(self._hay(material, size, generator, set(keys)), needles, generator))
        queried = keys[: self.queried]
        answers = [value for key, value in zip(owners, values, strict=True) if key in queried]
        named = _listed(queried)
        return RulerSample(
            f"Below is a long text. Some secret {self.kind}s are stated in it. Read it and remember them, as you will "
            f"be asked for them.\n\n{text}\n\nWhich secret {self.kind}s does the text state for {named}?",
            f"The secret {self.kind}s that the text states for {named} are",
            tuple(answers),
        )

    def _needle(self, key: str, value: str) -> str:
        return f"One of the secret {self.kind}s for {key} is {value}."

    def _hay(self, material: Material, size: int, generator: random.Random, taken: set[str]) -> list[str]:
        if self.haystack == "noise":
            return noise(size)
        if self.haystack == "text":
            return cycled(material.sentences, size)
        keys = [key for key in self.draw_keys(generator, size + len(taken)) if key not in taken][:size]
        values = self.draw_values(generator, size)
        return [self._needle(key, value) for key, value in zip(keys, values, strict=True)]


def numbers(generator: random.Random, count: int) -> list[str]:
    """Different numbers of seven digits."""
    return [str(number) for number in generator.sample(range(10**6, 10**7), count)]


def identifiers(generator: random.Random, count: int) -> list[str]:
    """UUIDs, version 4."""
    return [str(uuid.UUID(int=generator.getrandbits(128), version=4)) for _ in range(count)]


def _hidden(hay: list[str], needles: list[str], generator: random.Random) -> list[str]:
    """The needles between the sentences, at different ones of `DEPTHS` depths, in random order."""
    depths = generator.sample(range(DEPTHS), len(needles))
    merged = list(hay)
    for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
        merged.insert(round(depth / (DEPTHS - 1) * len(hay)), needle)
    return merged


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _task(name: str, needles: Needles) -> Task:
    return Task(name, needles.sample, ANSWER_TOKENS)


IN_TEXT = partial(Needles, "text", pairs)
NEEDLE_TASKS = (
    _task("niah_single_1", Needles("noise", pairs, numbers, "number")),
    _task("niah_single_2", IN_TEXT(numbers, "number")),
    _task("niah_single_3", IN_TEXT(identifiers, "identifier")),
    _task("niah_multikey_1", IN_TEXT(numbers, "number", keys=4)),
    _task("niah_multikey_2", Needles("needles", pairs, numbers, "number")),
    _task("niah_multikey_3", Needles("needles", identifiers, identifiers, "identifier")),
    _task("niah_multivalue", IN_TEXT(numbers, "number", values=4)),
    _task("niah_multiquery", IN_TEXT(numbers, "number", keys=4, queried=4)),
)


HOPS = 4
COMMON_WORDS, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
CODED_LETTERS, FREQUENT_WORDS, ZIPF_EXPONENT, BLANK = 6, 3, 2, "..."
CODED_WORDS = 2000
MIN_CODED = 40  # with which the most frequent words differ in number
VARIABLE_EXAMPLE = (
    "Assignments: VAR KQZ = 71508. A cart rolls by. VAR MWF = VAR KQZ. VAR TBX = VAR MWF.\n"
    "Question: which variables hold 71508? Answer: KQZ MWF TBX\n\n"
)
COMMON_EXAMPLE = (
    "List: 1. pearl 2. tunnel 3. pearl 4. violin 5. tunnel 6. pearl\nThe 2 most common words: 1. pearl 2. tunnel\n\n"
)


def variables(_: Material, size: int, generator: random.Random) -> RulerSample:
    """A value passes through a chain of five variables, whose assignments stand among `size` sentences."""
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(generator.choices(string.ascii_uppercase, k=5))
        names += [] if name in names else [name]
    value = str(generator.randrange(10**4, 10**5))
    held = [value, *(f"VAR {name}" for name in names[:-1])]
    chain = [f"VAR {name} = {source}." for name, source in zip(names, held, strict=True)]
    text = " ".join(scattered(noise(size), chain, generator))
    return RulerSample(
        "Some variables get a value, and others are set to them, in a long text. Follow the assignments.\n\n"
        f"{VARIABLE_EXAMPLE}Assignments: {text}\nQuestion: which {HOPS + 1} variables hold {value}?",
        "Answer:",
        tuple(names),
    )


def common_words(material: Material, size: int, generator: random.Random) -> RulerSample:
    """A numbered list in which ten words stand 30 times each, and `size` others 3 times each."""
    words = [*generator.sample(material.words, len(material.words)), *pairs(generator, size)]
    chosen = words[: size + COMMON_WORDS]
    common, others = chosen[:COMMON_WORDS], chosen[COMMON_WORDS:]
    listed = common * COMMON_TIMES + others * OTHER_TIMES
    generator.shuffle(listed)
    text = " ".join(f"{number}. {word}" for number, word in enumerate(listed, start=1))
    return RulerSample(
        "Below is a numbered list of words, some of which stand in it more often than others. Remember those.\n\n"
        f"{COMMON_EXAMPLE}List: {text}\nWhich are the {COMMON_WORDS} most common words?",
        f"The {COMMON_WORDS} most common words:",
        tuple(common),
    )


def frequent_words(_: Material, size: int, generator: random.Random) -> RulerSample:
    """About `size` coded words, the k-th of which is as frequent as k ** -2; blanks are the most frequent."""
    words = list(dict.fromkeys(_coded(generator) for _ in range(CODED_WORDS)))
    words[0] = BLANK
    total = sum(rank**-ZIPF_EXPONENT for rank in range(1, len(words) + 1))
    counts = (int((size + MIN_CODED) * rank**-ZIPF_EXPONENT / total) for rank in range(1, len(words) + 1))
    text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    generator.shuffle(text)
    return RulerSample(
        f"Read the coded text below and count how often each coded word is in it. Blanks, {BLANK}, do not count.\n\n"
        f"{' '.join(text)}\n\nWhich are the {FREQUENT_WORDS} most frequent coded words?",
        f"The {FREQUENT_WORDS} most frequent coded words are",
        tuple(words[1 : FREQUENT_WORDS + 1]),
    )


def _coded(generator: random.Random) -> str:
    return "".join(generator.choices(string.ascii_lowercase, k=CODED_LETTERS))


COUNTING_TASKS = (Task("vt", variables, 30), Task("cwe", common_words, 120), Task("fwe", frequent_words, 50))


TASKS: dict[str, Task] = {task.name: task for task in (*NEEDLE_TASKS, *COUNTING_TASKS, *QUESTION_TASKS)}


def chosen_tasks(names: Iterable[str]) -> tuple[Task, ...]:
    """The tasks of these names. Raises TaskError for another name."""
    for name in names:
        if name not in TASKS:
            raise TaskError(f"task is {name!r}; allowed: {', '.join(TASKS)}")
    return tuple(TASKS[name] for name in dict.fromkeys(names))


def material(text: str, questions: dict[str, Any] | None = None) -> Material:
    """Haystack and words of a text, and the question sets that are there."""
    return Material(sentences_of(text), words_of(text), questions or {})


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the answers that are wanted."""

    ids: list[int]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts of tasks for a model: with its chat template, where its tokenizer has one."""

    tokenizer: Any
    material: Material

    @cached_property
    def frame(self) -> ChatFrame | None:
        """What the chat template puts around messages; None without one. Raises ChatTemplateError."""
        return chat_frame(self.tokenizer)

    def prompts(self, task: Task, tokens: int, count: int, seed: int) -> list[Prompt]:
        """The first `count` samples of a task, whose prompts fill `tokens` tokens as far as whole parts do.

        Raises TaskError where the smallest sample is longer, and ChatTemplateError where the chat template treats one
        of the messages in another way than the frame.
        """
        samples = [self._sample(task, tokens, index, seed) for index in range(count)]
        if self.frame is not None:
            self.frame.check([sample.prompt for sample in samples])
        return [Prompt(self.ids(sample), sample.answers) for sample in samples]

    def _sample(self, task: Task, tokens: int, index: int, seed: int) -> RulerSample:
        name, ids = f"{task.name} {tokens} {index} {seed}", cache(self.ids)
        return sample_that_fits(task, self.material, name, lambda candidate: len(ids(candidate)), tokens)

    def ids(self, sample: RulerSample) -> list[int]:
        """Token ids of a sample: the user's message, and the opening of the answer."""
        if self.frame is None:
            return list(self.tokenizer.encode(f"{sample.prompt}\n{sample.opening}"))
        text = self.frame.around(sample.prompt) + sample.opening
        return list(self.tokenizer.encode(text, add_special_tokens=False))
