"""The three steps of tuning (SpecAttn, section 3.4): the ratio where acceptance stabilizes, gamma, the ratio again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ridgeplan.roofline.speculation import flush_capped, tokens_at

STABLE = 0.97  # of the most tokens per round: with more tokens read, acceptance rises no further


@dataclass(frozen=True)
class Candidate:
    """A ratio and gamma, with the tokens per round that were measured and the times that are predicted."""

    ratio: float
    gamma: int
    tokens_per_round: float
    round_ms: float

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token of a sequence."""
        return self.round_ms / self.tokens_per_round


@dataclass(frozen=True)
class Step:
    """What one step compared, and the index of what it chose."""

    name: str
    candidates: tuple[Candidate, ...]
    index: int

    @property
    def chosen(self) -> Candidate:
        """The step's choice."""
        return self.candidates[self.index]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [{**asdict(one), "tpot_ms": one.tpot_ms} for one in self.candidates]
        return {"name": self.name, "candidates": rows, "chosen": rows[self.index]}


@dataclass(frozen=True)
class Landscape:
    """What is known of a plan at every ratio.

    acceptance_at: conditional acceptance by position, by ratio. round_s: seconds of a round, by ratio and gamma.
    group: tokens between flushes, at which rounds end; None where the target reads no codes.
    """

    acceptance_at: Mapping[float, Sequence[float]]
    round_s: Callable[[float, int], float]
    group: int | None = None

    def candidate(self, ratio: float, gamma: int) -> Candidate:
        """One point."""
        tokens = tokens_at(self.acceptance_at[ratio], gamma)
        capped = tokens if self.group is None else float(flush_capped(tokens, self.group))
        return Candidate(ratio, gamma, capped, 1e3 * self.round_s(ratio, gamma))


def tune_steps(known: Landscape, gammas: Sequence[int]) -> tuple[Step, ...]:
    """Three steps, the last of which has the result; without the two for the ratio where there is but one."""
    ratios, largest = sorted(known.acceptance_at), max(gammas)
    first = _stable([known.candidate(ratio, largest) for ratio in ratios])
    second = _fastest("gamma", (known.candidate(first.chosen.ratio, gamma) for gamma in gammas))
    if len(ratios) == 1:
        return (second,)
    third = _fastest("ratio again", (known.candidate(ratio, second.chosen.gamma) for ratio in ratios))
    return first, second, third


def _stable(candidates: Sequence[Candidate]) -> Step:
    """The smallest ratio with nearly the most tokens per round."""
    most = max(one.tokens_per_round for one in candidates)
    index = next(at for at, one in enumerate(candidates) if one.tokens_per_round >= STABLE * most)
    return Step("ratio", tuple(candidates), index)


def _fastest(name: str, candidates: Iterable[Candidate]) -> Step:
    found = tuple(candidates)
    return Step(name, found, min(range(len(found)), key=lambda index: found[index].tpot_ms))
