"""Words and sentences of our own, and words and sentences of a text."""

from __future__ import annotations

import itertools
import random
import re

ADJECTIVES = tuple(
    "able ample azure bald basic blunt bold brave brief bright brisk broad calm chief civil clean clear clever close "
    "coarse cold crisp crude curly daily damp dark dear deep dense dim dry dull dusty early eager easy empty equal "
    "exact faint fair famous fancy fast fierce final fine firm flat fluid foggy fond frail frank free fresh gentle "
    "giant glad golden grand grave great green happy hard harsh heavy hollow honest humble icy ideal idle jolly keen "
    "kind large late lean light lively local lone long loose loud loyal lucky mellow merry mild modest narrow neat "
    "noble odd pale".split()
)
NOUNS = tuple(
    "acorn anchor apple apron arrow badge barn barrel basket beach bell bench berry blanket boat bottle bowl branch "
    "bread brick bridge brook broom bucket button cabin candle canoe canyon carpet castle cedar chair chapel cherry "
    "clock cloud coast coin cottage cradle crater desert dragon drum eagle engine falcon feather fence fiddle field "
    "flute forest fountain garden glacier glove goat grove hammer harbor hat hill horse island jacket jar kettle "
    "ladder lake lantern leaf lemon library lion mantle maple marble market meadow mirror mountain needle oak orchard "
    "otter oven paddle palace parcel".split()
)
NOISE = (
    "The rain falls on the roof.",
    "A dog sleeps by the door.",
    "The road goes on and on.",
    "Wind moves the leaves.",
    "Evening comes, and morning follows.",
)


def pairs(generator: random.Random, count: int) -> list[str]:
    """Different words such as calm-river, drawn from all pairs of an adjective and a noun; numbered where these end."""
    total = len(ADJECTIVES) * len(NOUNS)
    return [_pair(one % total, one // total) for one in generator.sample(range(total * -(-count // total)), count)]


def _pair(index: int, copy: int) -> str:
    word = f"{ADJECTIVES[index // len(NOUNS)]}-{NOUNS[index % len(NOUNS)]}"
    return f"{word}-{copy + 1}" if copy else word


def sentences_of(text: str) -> tuple[str, ...]:
    """The sentences of a prose text, its white space made single blanks."""
    parts = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return tuple(part for part in parts if part)


def words_of(text: str) -> tuple[str, ...]:
    """The different words of four letters or more in a text, in alphabetic order, then our own."""
    found = sorted(set(re.findall(r"\b[a-z]{4,12}\b", text)))
    return tuple(dict.fromkeys([*found, *ADJECTIVES, *NOUNS]))


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
