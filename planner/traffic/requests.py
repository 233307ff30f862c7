"""Requests of a simulation: when they arrive, how long their prompts and outputs are, and how many rounds they take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ridgeplan.planner import quantities
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.plan import MAX_TOKENS, require

RATE_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
MAX_VARIATION = 10.0
LENGTHS = "a number of tokens, lognormal:MEAN, lognormal:MEAN:CV or uniform:MIN..MAX, such as lognormal:8k"


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens with a mean and a coefficient of variation (CV); a constant where it is 0."""

    text: str
    kind: str
    mean: float
    variation: float = 0.0

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Lengths of 1 or more tokens: [count]."""
        if self.kind == "lognormal":
            variance = math.log1p(self.variation**2)
            drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        elif self.kind == "uniform":
            half = math.sqrt(3) * self.variation * self.mean
            drawn = rng.uniform(self.mean - half - 0.5, self.mean + half + 0.5, count)
        else:
            drawn = np.full(count, self.mean)
        return np.clip(np.rint(drawn), 1, MAX_TOKENS).astype(np.int64)


def parse_lengths(text: str) -> Lengths:
    """A distribution: "8k", "lognormal:8k" (CV 1), "lognormal:8k:2" or "uniform:1k..8k". Raises PlanError."""
    kind, colon, rest = text.partition(":")
    if not colon:
        return Lengths(text, "constant", _tokens(text))
    require(kind in ("lognormal", "uniform"), f"{brief(text)} is not a distribution of lengths; allowed: {LENGTHS}")
    if kind == "uniform":
        low, dots, high = rest.partition("..")
        require(bool(dots), f"{brief(text)} has no range; allowed: uniform:MIN..MAX, such as uniform:1k..8k")
        first, last = _tokens(low), _tokens(high)
        require(first <= last, f"{brief(text)} is not a range; allowed: from a smaller number of tokens")
        mean = (first + last) / 2
        return Lengths(text, kind, mean, (last - first) / 2 / math.sqrt(3) / mean)
    mean_text, _, variation = rest.partition(":")
    return Lengths(text, kind, _tokens(mean_text), _variation(variation or "1", text))


def _tokens(text: str) -> int:
    number = quantities.tokens(text)
    require(1 <= number <= MAX_TOKENS, f"{brief(text)} is out of range; allowed: 1 to {MAX_TOKENS} tokens")
    return number


def _variation(text: str, owner: str) -> float:
    try:
        variation = float(text)
    except ValueError:
        variation = math.nan
    allowed = f"allowed: above 0 up to {MAX_VARIATION:g}"
    require(0 < variation <= MAX_VARIATION, f"the CV of {brief(owner)} is {brief(text)}; {allowed}")
    return variation


def parse_rates(text: str) -> tuple[float, ...]:
    """Requests per second: "4/s", "240/min", "4", or several with commas, ascending. Raises PlanError."""
    return tuple(sorted({_rate(piece.strip(), text.rpartition("/")[2] if "/" in text else "s") for piece in
                         text.split(",")}))  # fmt: skip


def _rate(text: str, default_unit: str) -> float:
    """One rate. The unit of the last of several holds for those without one: "1,2,4/s"."""
    number, slash, unit = text.partition("/")
    unit = (unit if slash else default_unit).strip().lower()
    try:
        rate = float(number) / RATE_UNITS[unit]
    except (ValueError, KeyError):
        rate = math.nan
    require(0 < rate < 1e6, f"{brief(text)} is not a rate of requests; allowed: one such as 4/s, 240/min or 1,2,4/s")
    return rate


@dataclass(frozen=True)
class Requests:
    """Requests in the order of their arrival, one entry each: [requests].

    output_tokens: 1 or more, the first of which ends the prompt's pass. rounds: decode rounds for the others; as many
    as there are others, where each round yields one token. cached_tokens: of the prompt, held by the prefix cache.
    hash_ids: instead of these, the ids of the prompt's blocks of `hash_tokens` tokens each, equal for equal prefixes.
    """

    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    rounds: np.ndarray
    cached_tokens: np.ndarray
    hash_ids: Sequence[Sequence[int]] = field(default=())
    hash_tokens: int = 0

    @classmethod
    def of(cls, arrival_s: np.ndarray, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> Requests:
        """Requests without cached prefixes, whose rounds yield one token each."""
        nothing = np.zeros(len(arrival_s), dtype=np.int64)
        return cls(arrival_s, prompt_tokens, output_tokens, output_tokens - 1, nothing)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate(self) -> float:
        """Requests per second; 0 for a single one."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span_s if span_s > 0 else 0.0

    def selected(self, index: np.ndarray | slice) -> Requests:
        """Some of the requests, at their own times."""
        columns = ("arrival_s", "prompt_tokens", "output_tokens", "rounds", "cached_tokens")
        ids = [self.hash_ids[place] for place in np.arange(len(self))[index]] if self.hash_ids else ()
        return replace(self, **{name: getattr(self, name)[index] for name in columns}, hash_ids=ids)

    def at_rate(self, rate: float) -> Requests:
        """The same requests with their arrivals compressed or stretched to a mean rate."""
        return replace(self, arrival_s=self.arrival_s * (self.rate / rate)) if self.rate else self

    def with_prefix_share(self, share: float, block_tokens: int) -> Requests:
        """With a share of every prompt in the prefix cache, in full blocks; the last token is always computed."""
        full = (self.prompt_tokens - 1) // block_tokens
        cached = np.minimum(np.floor(share * self.prompt_tokens / block_tokens), full) * block_tokens
        return replace(self, cached_tokens=cached.astype(np.int64))

    def prompts_alone(self) -> Requests:
        """The same prompts, which end with their first token."""
        unit = np.ones(len(self), dtype=np.int64)
        return replace(self, output_tokens=unit, rounds=unit - 1)

    def handed_over(self, arrival_s: np.ndarray) -> Requests:
        """The requests' other tokens, where the KV cache of prompts arrives then; outputs have two tokens or more.

        The first token is all of a prompt that is not cached.
        """
        outputs = self.output_tokens - 1
        rounds = np.where(outputs > 1, np.maximum(self.rounds - 1, 1), 0)
        return Requests(arrival_s, self.prompt_tokens + 1, outputs, rounds, self.prompt_tokens)

    def with_drafts(self, gamma: int, acceptance: float, rng: np.random.Generator) -> Requests:
        """With rounds that draft gamma tokens each, of conditional acceptance `acceptance`."""
        return replace(self, rounds=draw_rounds(self.output_tokens - 1, gamma, acceptance, rng)) if gamma else self


def generate_requests(
    rate: float, count: int, prompts: Lengths, outputs: Lengths, max_tokens: int, burstiness: float,
    rng: np.random.Generator,
) -> Requests:  # fmt: skip
    """Requests whose gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier.

    Lengths are clipped so that no sequence exceeds `max_tokens` tokens.
    """
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    output_tokens = np.minimum(outputs.draw(count, rng), max_tokens - 1)
    prompt_tokens = np.minimum(prompts.draw(count, rng), max_tokens - output_tokens)
    return Requests.of(np.cumsum(gaps) - gaps[0], prompt_tokens, output_tokens)


def draw_rounds(tokens: np.ndarray, gamma: int, acceptance: float, rng: np.random.Generator) -> np.ndarray:
    """Rounds until sequences have `tokens` tokens, where a round yields 1 to gamma + 1 of them: [sequences].

    The number of accepted drafts is geometric, cut at gamma (Leviathan et al. 2023, Eq 1), and drawn for each round. As
    many rounds as cannot reach the end yet are drawn at once, by how many of them yield each number of tokens.
    """
    sizes = np.arange(1, gamma + 2)
    shares = acceptance ** (sizes - 1) * np.where(sizes <= gamma, 1 - acceptance, 1.0)
    left, rounds = tokens.astype(np.int64), np.zeros(len(tokens), dtype=np.int64)
    while (open_rows := np.flatnonzero(left > 0)).size:
        drawn = np.maximum(left[open_rows] // (gamma + 1), 1)
        left[open_rows] -= rng.multinomial(drawn, shares) @ sizes
        rounds[open_rows] += drawn
    return rounds
