"""Tracing and counting: chains of variables, common words, frequent words (RULER, sections 3.2 and 3.3)."""

from __future__ import annotations

import random
import string

from ridgeplan.validate.ruler.task import Material, Sample, Task
from ridgeplan.validate.ruler.words import noise, pairs, scattered

HOPS = 4
COMMON_WORDS, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
CODED_LETTERS, FREQUENT_WORDS, ZIPF_EXPONENT, BLANK = 6, 3, 2, "..."
CODED_WORDS = 2000
FEWEST_CODED = 40  # with which the most frequent words differ in number
VARIABLE_EXAMPLE = (
    "Assignments: VAR KQZ = 71508. A cart rolls by. VAR MWF = VAR KQZ. VAR TBX = VAR MWF.\n"
    "Question: which variables hold 71508? Answer: KQZ MWF TBX\n\n"
)
COMMON_EXAMPLE = (
    "List: 1. pearl 2. tunnel 3. pearl 4. violin 5. tunnel 6. pearl\nThe 2 most common words: 1. pearl 2. tunnel\n\n"
)


def variables(_: Material, size: int, generator: random.Random) -> Sample:
    """A value passes through a chain of five variables, whose assignments stand among `size` sentences."""
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(generator.choices(string.ascii_uppercase, k=5))
        names += [] if name in names else [name]
    value = str(generator.randrange(10**4, 10**5))
    held = [value, *(f"VAR {name}" for name in names[:-1])]
    chain = [f"VAR {name} = {source}." for name, source in zip(names, held, strict=True)]
    text = " ".join(scattered(noise(size), chain, generator))
    return Sample(
        "Some variables get a value, and others are set to them, in a long text. Follow the assignments.\n\n"
        f"{VARIABLE_EXAMPLE}Assignments: {text}\nQuestion: which {HOPS + 1} variables hold {value}?",
        "Answer:",
        tuple(names),
    )


def common_words(material: Material, size: int, generator: random.Random) -> Sample:
    """A numbered list in which ten words stand 30 times each, and `size` others 3 times each."""
    words = [*generator.sample(material.words, len(material.words)), *pairs(generator, size)]
    chosen = words[: size + COMMON_WORDS]
    common, others = chosen[:COMMON_WORDS], chosen[COMMON_WORDS:]
    listed = common * COMMON_TIMES + others * OTHER_TIMES
    generator.shuffle(listed)
    text = " ".join(f"{number}. {word}" for number, word in enumerate(listed, start=1))
    return Sample(
        "Below is a numbered list of words, some of which stand in it more often than others. Remember those.\n\n"
        f"{COMMON_EXAMPLE}List: {text}\nWhich are the {COMMON_WORDS} most common words?",
        f"The {COMMON_WORDS} most common words:",
        tuple(common),
    )


def frequent_words(_: Material, size: int, generator: random.Random) -> Sample:
    """About `size` coded words, the k-th of which is as frequent as k ** -2; blanks are the most frequent."""
    words = list(dict.fromkeys(_coded(generator) for _ in range(CODED_WORDS)))
    words[0] = BLANK
    total = sum(rank**-ZIPF_EXPONENT for rank in range(1, len(words) + 1))
    counts = (int((size + FEWEST_CODED) * rank**-ZIPF_EXPONENT / total) for rank in range(1, len(words) + 1))
    text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    generator.shuffle(text)
    return Sample(
        f"Read the coded text below and count how often each coded word is in it. Blanks, {BLANK}, do not count.\n\n"
        f"{' '.join(text)}\n\nWhich are the {FREQUENT_WORDS} most frequent coded words?",
        f"The {FREQUENT_WORDS} most frequent coded words are",
        tuple(words[1 : FREQUENT_WORDS + 1]),
    )


def _coded(generator: random.Random) -> str:
    return "".join(generator.choices(string.ascii_lowercase, k=CODED_LETTERS))


COUNTING_TASKS = (Task("vt", variables, 30), Task("cwe", common_words, 120), Task("fwe", frequent_words, 50))
