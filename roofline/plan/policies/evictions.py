"""Eviction policies: the tokens of a prompt that stay in the cache after prefill, and each layer's share of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import ClassVar

from ridgeplan.roofline.catalog.validation import number, one_of, whole
from ridgeplan.roofline.plan.plan import Eviction, Plan, Workload
from ridgeplan.roofline.plan.policies.dense import quantspec
from ridgeplan.roofline.plan.policy import EVICTION_BUDGET, MAX_KEPT, SINKS, Preset, TokenEviction, policy
from ridgeplan.roofline.strategy import UNLIMITED_TOKENS


def layer_budgets(plan: Plan, layers: int) -> tuple[int, ...]:
    """The most prompt tokens that each layer keeps; empty without eviction.

    A budget of the whole context is every layer's.
    """
    context, eviction = plan.workload.context, plan.eviction.method
    if eviction is None:
        return ()
    budget = plan.eviction.tokens(context)
    if budget >= context:
        return (context,) * layers
    return aligned_budgets(eviction.budgets(budget, layers), budget, plan.kv.step)


def aligned_budgets(budgets: Sequence[int], budget: int, group: int) -> tuple[int, ...]:
    """Budgets moved to the nearest that differ from `budget` by whole groups.

    Rows then reach the end of a group in all layers at once, and a round never has to end for one layer alone. A budget
    that would become 0 or less is the smallest positive one.
    """
    moved = (budget + round((each - budget) / group) * group for each in budgets)
    return tuple(each if each > 0 else (budget - 1) % group + 1 for each in moved)


def rounding_text(plan: Plan, layers: int) -> str | None:
    """What rounding to whole groups makes of the layers' budgets; None where they are the policy's own."""
    method, rounded = plan.eviction.method, layer_budgets(plan, layers)
    exact = method.budgets(plan.eviction.tokens(plan.workload.context), layers) if method else ()
    if rounded in (exact, (plan.workload.context,) * layers):
        return None
    kept = f"{rounded[0]} to {rounded[-1]}" if len(set(rounded)) > 1 else f"all {rounded[0]}"
    mean, budget = round(fmean(rounded)), round(fmean(exact))
    more = f", on average {mean} instead of {budget}" if mean != budget else ""
    groups = f"on {plan.kv.format.value} KV they differ by whole groups of {plan.kv.step}"
    return f"{plan.eviction.policy}'s layers keep {kept} tokens instead of {exact[0]} to {exact[-1]}{more}: {groups}"


def kept_tokens(tokens: int, budgets: Sequence[int], group: int) -> tuple[int, ...]:
    """Tokens of a prompt of `tokens` that each layer keeps: at least 1, and as many as others up to whole groups.

    budgets: as `aligned_budgets` makes them. A layer keeps at most its budget, or a group if the budget is smaller.
    """
    longest = min(tokens, max(budgets))
    evicted = (-(-max(longest - budget, 0) // group) * group for budget in budgets)
    kept = (longest - each for each in evicted)
    return tuple(each if each > 0 else each + group for each in kept)


def eviction_preset(name: str) -> Preset:
    """Plain decoding on up to EVICTION_BUDGET tokens of the prompt."""

    def preset(workload: Workload) -> Plan:
        return Plan(workload, eviction=Eviction(name, min(EVICTION_BUDGET, workload.context)))

    return preset


class _NamedPreset(TokenEviction):
    """An eviction with a preset of its own name."""

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """Plain decoding on what the policy keeps."""
        return {cls.name: eviction_preset(cls.name)}


# Published settings that differ from the defaults, by what a model's name holds (Table 10).
PSEUDO_TOKENS = {"qwen": {"prefix": 2, "suffix": 30}}


@policy
class DapQEviction(_NamedPreset):
    """Pseudo queries of `prefix` + `suffix` tokens score a prompt (section 5.1; Table 10: 8 + 24, and 2 + 30 for Qwen).

    content: the prompt's first and last tokens ("ends"), tokens drawn from the prompt ("sampled"), a span of it
    ("span"), tokens drawn from the vocabulary ("vocabulary"), or a few of these repeated ("fixed"; Figs 2a and 4a).
    seed: of what is drawn. insert: the share of the prompt after which they stand and which they see; 1 is right after
    it. offset: positions that they stand further back there (Fig 4c). heads: how the scores of a KV head's query heads
    are joined. recent: latest tokens that always stay; Eq 5 protects none. pooling: tokens over which the largest score
    is taken; 1 is off, as Eq 4 says nothing of it (docs/papers.md).
    """

    prefix: int = whole(0, 1024, default=4)
    suffix: int = whole(1, 1024, default=28)
    content: str = one_of(("ends", "sampled", "span", "vocabulary", "fixed"), default="ends")
    seed: int = whole(0, 2**31 - 1, default=0)
    insert: float = number(0, 1, default=1.0)
    offset: int = whole(0, MAX_KEPT, default=0)
    heads: str = one_of(("mean", "maximum"), default="mean")
    recent: int = whole(0, MAX_KEPT, default=0)
    pooling: int = whole(1, 255, default=1)

    name: ClassVar[str] = "dapq"
    chunked: ClassVar[bool] = True
    ruler: ClassVar[float | None] = 77.56

    @property
    def scored_queries(self) -> float:
        """Those of the appended tokens."""
        return self.appended_tokens

    @property
    def appended_tokens(self) -> int:
        """The pseudo tokens."""
        return self.prefix + self.suffix

    @classmethod
    def presets(cls) -> Mapping[str, Preset]:
        """DapQ, with 2 + 30 pseudo tokens for Qwen (Table 10), and QuantSpec on what DapQ keeps (not published)."""

        def dapq(workload: Workload) -> Plan:
            plan, model = eviction_preset(cls.name)(workload), workload.model.lower()
            settings = next((each for name, each in PSEUDO_TOKENS.items() if name in model), {})
            return replace(plan, eviction=replace(plan.eviction, settings=settings))

        def dapq_quantspec(workload: Workload) -> Plan:
            return replace(quantspec(workload), eviction=dapq(workload).eviction)

        return {"dapq": dapq, "dapq-quantspec": dapq_quantspec}


@policy
class SnapKVEviction(_NamedPreset):
    """The tokens that the prompt's last queries attend to most (Li et al. 2024).

    window: the prompt's last tokens, which count towards the budget. pooling: tokens over which the largest score is
    taken, 1 for none. The defaults are the paper's for LongBench.
    """

    window: int = whole(1, 4096, default=32)
    pooling: int = whole(1, 255, default=7)

    name: ClassVar[str] = "snapkv"
    chunked: ClassVar[bool] = True
    ruler: ClassVar[float | None] = 69.94

    @property
    def scored_queries(self) -> float:
        """Those of the window."""
        return self.window


@policy
class H2OEviction(_NamedPreset):
    """The tokens that the whole prompt attends to most (Zhang et al. 2023).

    In chunks, tokens that stay keep their scores, to which each chunk adds its attention; chunks of 1 token are the
    authors' algorithm, which evicts at every step. recent_share: the part of the budget that the latest tokens have
    (section 5: half).
    """

    recent_share: float = number(0, 1, default=0.5)

    name: ClassVar[str] = "h2o"
    chunked: ClassVar[bool] = True
    ruler: ClassVar[float | None] = 52.54

    @property
    def scored_queries(self) -> float:
        """All of the prompt's."""
        return UNLIMITED_TOKENS


@policy
class PyramidKVEviction(SnapKVEviction):
    """SnapKV with budgets that fall from layer to layer (Cai et al. 2024).

    steepness: the last layer keeps the window and 1/steepness of the average rest (the paper's beta, of 20).
    """

    steepness: float = number(1, 1000, default=20.0)

    name: ClassVar[str] = "pyramidkv"
    ruler: ClassVar[float | None] = 68.67

    def budgets(self, budget: int, layers: int) -> tuple[int, ...]:
        """An arithmetic sequence from the first layer to the last (section 4.2), `budget` on average."""
        rest = max(budget - self.window, 0)
        step = 2 * (rest - rest / self.steepness) / max(layers - 1, 1)
        middle = (layers - 1) / 2
        return tuple(max(1, round(budget + step * (middle - layer))) for layer in range(layers))


@policy
class StreamingLLMEviction(_NamedPreset):
    """The first `sinks` tokens and the latest (Xiao et al. 2024, section 3.2)."""

    sinks: int = whole(0, MAX_KEPT, default=SINKS)

    name: ClassVar[str] = "streamingllm"
    chunked: ClassVar[bool] = True
    supports_mla: ClassVar[bool] = True
    ruler: ClassVar[float | None] = 16.35


@policy
class LaCacheEviction(_NamedPreset):
    """Ladders of spans that move from layer to layer (Shi et al. 2025).

    sinks: first tokens, which always stay. recent_share: the latest tokens' part of the budget. ladders: how many times
    the ladder of spans repeats between them.
    """

    sinks: int = whole(0, MAX_KEPT, default=SINKS)
    recent_share: float = number(0, 1, default=0.5)
    ladders: int = whole(1, 4096, default=4)

    name: ClassVar[str] = "lacache"
    chunked: ClassVar[bool] = True
    ruler: ClassVar[float | None] = 14.89


@policy
class ExpectedAttentionEviction(_NamedPreset):
    """The tokens that coming queries are expected to attend to most (Devoto et al. 2025).

    future: coming positions that the rotation is averaged over. sinks: first tokens, which always stay and whose
    queries do not count. The defaults are those of the authors' library.
    """

    future: int = whole(1, 65536, default=512)
    sinks: int = whole(0, MAX_KEPT, default=SINKS)

    name: ClassVar[str] = "expected-attention"
    chunked: ClassVar[bool] = True

    @property
    def scored_queries(self) -> float:
        """Two products with a head's covariance: at 128 channels as much work as the scores of 256 queries."""
        return 256


@policy
class RandomEviction(TokenEviction):
    """Random tokens, as a bound from below. seed: of the choice, which differs by layer and KV head."""

    seed: int = whole(0, 2**31 - 1, default=0)

    name: ClassVar[str] = "random"


@policy
class OracleEviction(TokenEviction):
    """The tokens that the coming tokens attend to most, as a bound. coming: how many of them it asks, at most."""

    coming: int = whole(1, 65536, default=128)

    name: ClassVar[str] = "oracle"

    @property
    def scored_queries(self) -> float:
        """Those of the coming tokens."""
        return self.coming

    @property
    def appended_tokens(self) -> int:
        """The coming tokens."""
        return self.coming
