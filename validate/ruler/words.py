"""Words and sentences of our own, and words and sentences of a text."""

from __future__ import annotations

import itertools
import random
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple


class OwnWords(NamedTuple):
    """Our words, words.toml."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    noise: tuple[str, ...]


@cache
def own_words() -> OwnWords:
    """Adjectives and nouns, of which keys are made, and sentences without content."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return OwnWords(tuple(tables["adjectives"].split()), tuple(tables["nouns"].split()), tuple(tables["noise"]))


def noise(count: int) -> list[str]:
    """`count` sentences without content, the same few again and again."""
    return cycled(own_words().noise, count)


def pairs(generator: random.Random, count: int) -> list[str]:
    """Different words such as calm-river, drawn from all pairs of an adjective and a noun; numbered where these end."""
    total = len(own_words().adjectives) * len(own_words().nouns)
    return [_pair(*divmod(one, total)) for one in generator.sample(range(total * -(-count // total)), count)]


def _pair(copy: int, index: int) -> str:
    adjectives, nouns, _ = own_words()
    word = f"{adjectives[index // len(nouns)]}-{nouns[index % len(nouns)]}"
    return f"{word}-{copy + 1}" if copy else word


def sentences_of(text: str) -> tuple[str, ...]:
    """The sentences of a prose text, its white space made single blanks."""
    parts = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return tuple(part for part in parts if part)


def words_of(text: str) -> tuple[str, ...]:
    """The different words of four letters or more in a text, in alphabetic order, then our own."""
    found = sorted(set(re.findall(r"\b[a-z]{4,12}\b", text)))
    return tuple(dict.fromkeys([*found, *own_words().adjectives, *own_words().nouns]))


def cycled(items: tuple[str, ...], count: int) -> list[str]:
    """The first `count` items, from the start again where they end."""
    return list(itertools.islice(itertools.cycle(items), count))


def scattered(parts: list[str], inserted: list[str], generator: random.Random) -> list[str]:
    """`parts` with `inserted` between them, in order, at random places."""
    places = sorted(generator.choices(range(len(parts) + 1), k=len(inserted)))
    merged, taken = [], 0
    for place, one in zip(places, inserted, strict=True):
        merged += [*parts[taken:place], one]
        taken = place
    return merged + parts[taken:]
