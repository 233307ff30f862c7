"""Eviction policies: hyperparameters, budgets, quality and presets of each method that evicts tokens after prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeplan.roofline.catalog.validation import number, whole
from ridgeplan.roofline.plan.plan import EvictionPolicy, Plan, Workload
from ridgeplan.roofline.plan.policies.base import EvictionSettings, TokenEviction, evicting
from ridgeplan.roofline.plan.policies.selections import quantspec
from ridgeplan.roofline.strategy import UNLIMITED_TOKENS


def aligned_budgets(budgets: Sequence[int], budget: int, group: int) -> tuple[int, ...]:
    """Budgets moved to the nearest that differ from `budget` by whole groups.

    Rows then reach the end of a group in all layers at once, and a round never has to end for one layer alone. A budget
    that would become 0 or less is the smallest positive one.
    """
    moved = (budget + round((each - budget) / group) * group for each in budgets)
    return tuple(each if each > 0 else (budget - 1) % group + 1 for each in moved)


def kept_tokens(tokens: int, budgets: Sequence[int], group: int) -> tuple[int, ...]:
    """Tokens of a prompt of `tokens` that each layer keeps: at least 1, and as many as others up to whole groups.

    budgets: as `aligned_budgets` makes them. A layer keeps at most its budget, or a group where the budget is smaller.
    """
    longest = min(tokens, max(budgets))
    evicted = (-(-max(longest - budget, 0) // group) * group for budget in budgets)
    kept = (longest - each for each in evicted)
    return tuple(each if each > 0 else each + group for each in kept)


dapq = evicting(EvictionPolicy.DAPQ)


def dapq_quantspec(workload: Workload) -> Plan:
    """DapQ evicts after prefill, and QuantSpec decodes the rest; not published."""
    return replace(quantspec(workload), eviction=dapq(workload).eviction)


@dataclass(frozen=True)
class DapQSettings(EvictionSettings):
    """Pseudo tokens: the prompt's first `prefix` and last `suffix` tokens (section 5.1; Table 10 also has 8 + 24).

    recent: latest tokens that always stay; Eq 5 protects none. pooling: tokens over which the largest score is taken;
    1 is off, as Eq 4 says nothing of it (docs/papers.md).
    """

    prefix: int = whole(0, 1024, default=4)
    suffix: int = whole(1, 1024, default=28)
    recent: int = whole(0, 4096, default=0)
    pooling: int = whole(1, 255, default=1)

    @property
    def scored_queries(self) -> float:
        return self.appended_tokens

    @property
    def appended_tokens(self) -> int:
        return self.prefix + self.suffix


DAPQ = TokenEviction(
    name="dapq",
    settings=DapQSettings,
    executable=True,
    chunked=True,
    ruler=77.56,
    presets={"dapq": dapq, "dapq-quantspec": dapq_quantspec},
)


@dataclass(frozen=True)
class SnapKVSettings(EvictionSettings):
    """window: the prompt's last tokens, which count towards the budget. pooling: tokens over which the largest score
    is taken, 1 for none. The defaults are the paper's for LongBench.
    """

    window: int = whole(1, 4096, default=32)
    pooling: int = whole(1, 255, default=7)

    @property
    def scored_queries(self) -> float:
        return self.window


SNAPKV = TokenEviction(
    name="snapkv",
    settings=SnapKVSettings,
    executable=True,
    chunked=True,
    ruler=69.94,
    presets={"snapkv": evicting(EvictionPolicy.SNAPKV)},
)


@dataclass(frozen=True)
class H2OSettings(EvictionSettings):
    """recent_share: the part of the budget that the latest tokens have (section 5: half)."""

    recent_share: float = number(0, 1, default=0.5)

    @property
    def scored_queries(self) -> float:
        return UNLIMITED_TOKENS


H2O = TokenEviction(
    name="h2o",
    settings=H2OSettings,
    executable=True,
    ruler=52.54,
    presets={"h2o": evicting(EvictionPolicy.H2O)},
)


@dataclass(frozen=True)
class PyramidKVSettings(SnapKVSettings):
    """steepness: the last layer keeps the window and 1/steepness of the average rest (the paper's beta, of 20)."""

    steepness: float = number(1, 1000, default=20.0)

    def budgets(self, budget: int, layers: int) -> tuple[int, ...]:
        """An arithmetic sequence from the first layer to the last (section 4.2), `budget` on average."""
        rest = max(budget - self.window, 0)
        step = 2 * (rest - rest / self.steepness) / max(layers - 1, 1)
        middle = (layers - 1) / 2
        return tuple(max(1, round(budget + step * (middle - layer))) for layer in range(layers))


PYRAMIDKV = TokenEviction(
    name="pyramidkv",
    settings=PyramidKVSettings,
    executable=True,
    chunked=True,
    ruler=68.67,
    presets={"pyramidkv": evicting(EvictionPolicy.PYRAMIDKV)},
)


@dataclass(frozen=True)
class StreamingLLMSettings(EvictionSettings):
    """sinks: the first tokens, which always stay (section 3.2)."""

    sinks: int = whole(0, 4096, default=4)


STREAMINGLLM = TokenEviction(
    name="streamingllm",
    settings=StreamingLLMSettings,
    executable=True,
    chunked=True,
    ruler=16.35,
    presets={"streamingllm": evicting(EvictionPolicy.STREAMING)},
)


@dataclass(frozen=True)
class LaCacheSettings(EvictionSettings):
    """sinks: first tokens that always stay. recent_share: the latest tokens' part of the budget. ladders: how many
    times the ladder of spans repeats between them.
    """

    sinks: int = whole(0, 4096, default=4)
    recent_share: float = number(0, 1, default=0.5)
    ladders: int = whole(1, 4096, default=4)


LACACHE = TokenEviction(
    name="lacache",
    settings=LaCacheSettings,
    executable=True,
    chunked=True,
    ruler=14.89,
    presets={"lacache": evicting(EvictionPolicy.LACACHE)},
)


@dataclass(frozen=True)
class ExpectedAttentionSettings(EvictionSettings):
    """future: coming positions that the rotation is averaged over. sinks: first tokens, which always stay and whose
    queries do not count. The defaults are those of the authors' library.
    """

    future: int = whole(1, 65536, default=512)
    sinks: int = whole(0, 4096, default=4)

    @property
    def scored_queries(self) -> float:
        """Two products with a head's covariance: at 128 channels as much work as the scores of 256 queries."""
        return 256


EXPECTED_ATTENTION = TokenEviction(
    name="expected-attention",
    settings=ExpectedAttentionSettings,
    executable=True,
    chunked=True,
    presets={"expected-attention": evicting(EvictionPolicy.EXPECTED_ATTENTION)},
)


@dataclass(frozen=True)
class RandomSettings(EvictionSettings):
    """seed: of the choice, which differs by layer and KV head."""

    seed: int = whole(0, 2**31 - 1, default=0)


RANDOM = TokenEviction(name="random", settings=RandomSettings, executable=True)


@dataclass(frozen=True)
class OracleSettings(EvictionSettings):
    """coming: how many of the coming tokens it asks, at most."""

    coming: int = whole(1, 65536, default=128)

    @property
    def scored_queries(self) -> float:
        return self.coming

    @property
    def appended_tokens(self) -> int:
        return self.coming


ORACLE = TokenEviction(name="oracle", settings=OracleSettings, executable=True)
