"""The eight needle tasks: find the values of some keys in a haystack (RULER, section 3.1 and Table 2)."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ridgeplan.validate.ruler.task import Material, Sample, Task
from ridgeplan.validate.ruler.words import cycled, noise, pairs

ANSWER_TOKENS = 128
DEPTHS = 40  # places in the haystack that needles may stand at, evenly spread

Draw = Callable[[random.Random, int], list[str]]  # that many different keys or values


@dataclass(frozen=True)
class Needles:
    """What is hidden. keys: needles with different keys; values: of each key; asked: keys that are asked for.

    haystack: "noise" repeats a few sentences, "text" is prose, "needles" are further needles.
    """

    haystack: str
    draw_keys: Draw
    draw_values: Draw
    kind: str
    keys: int = 1
    values: int = 1
    asked: int = 1

    def sample(self, material: Material, size: int, generator: random.Random) -> Sample:
        """A haystack of `size` sentences, or of as many other needles, with the needles in it."""
        keys = self.draw_keys(generator, self.keys)
        values = self.draw_values(generator, self.keys * self.values)
        owners = [key for key in keys for _ in range(self.values)]
        needles = [self._needle(key, value) for key, value in zip(owners, values, strict=True)]
        text = " ".join(_hidden(self._hay(material, size, generator, set(keys)), needles, generator))
        asked = keys[: self.asked]
        wanted = [value for key, value in zip(owners, values, strict=True) if key in asked]
        named = _listed(asked)
        return Sample(
            f"Below is a long text. Some secret {self.kind}s are stated in it. Read it and remember them, as you will "
            f"be asked for them.\n\n{text}\n\nWhich secret {self.kind}s does the text state for {named}?",
            f"The secret {self.kind}s that the text states for {named} are",
            tuple(wanted),
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
    return [str(one) for one in generator.sample(range(10**6, 10**7), count)]


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
    _task("niah_multiquery", IN_TEXT(numbers, "number", keys=4, asked=4)),
)
