"""Token selections that a plan can name for its drafts or its target, each with its hyperparameters.

Drafts read a share of the tokens; a target reads a budget (`TargetAttention` in plan.py), by the same policies.
Not here: what a policy costs (planner/policies/selection) and what it does (runtime/drafting/policies).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ridgeplan.roofline.catalog.validation import Checked, flag, number, one_of, whole
from ridgeplan.roofline.execution import MAX_TOKENS


class PlanError(ValueError):
    """A malformed or contradictory plan; the message names the value and what is allowed."""


class PlanPart(Checked):
    """Raises PlanError for values that are not allowed."""

    error = PlanError


MIN_RATIO = 1e-6  # one token in a million
SPARSE_RATIO = 0.07  # SpecAttn, appendix: near-optimal for all its designs
SINKS = 4  # StreamingLLM, section 3.2: four initial tokens suffice
MAX_KEPT = 4096  # sinks or recent tokens
PAGES = (16, 32)  # tokens; they divide every group


def _name(name: str) -> Any:
    return one_of((name,), default=name)


@dataclass(frozen=True, kw_only=True)
class DraftSelection(PlanPart):
    """Base of the policies. name: the policy's own. ratio: share of the cached tokens that a draft may read."""

    name: str
    ratio: float

    per_query: ClassVar[bool] = False  # chosen anew by every draft's query, else once a round
    ahead: ClassVar[bool] = False  # chosen before a pass begins, for all of its layers
    needs_codes: ClassVar[bool] = False  # in the cache, whether drafts read them or not
    attention_class: ClassVar[str | None] = None  # of kernels of its own that attend to what it chooses

    @property
    def min_tokens(self) -> int:
        """Tokens that a draft reads at least, if the cache has as many."""
        return 0

    def share_of(self, tokens: float, ratio: Any) -> Any:
        """The share of a cache of `tokens` that a draft reads with `ratio`, one or an array, instead of its own."""
        return np.minimum(np.maximum(ratio, self.min_tokens / tokens), 1.0)


@dataclass(frozen=True, kw_only=True)
class AllTokens(DraftSelection):
    """Every token (QuantSpec, section 4.1)."""

    name: str = _name("all")
    ratio: float = number(1, 1, default=1.0)


@dataclass(frozen=True, kw_only=True)
class SparseSelection(DraftSelection):
    """A share `ratio` of the cached tokens, at least `floor` of them (SpecAttn, section 3.3).

    Always among them are the first `sinks` tokens and the latest. Where old tokens are read as codes, the latest are
    those in full precision; elsewhere they are the last `recent` ones.
    """

    ratio: float = number(MIN_RATIO, 1, default=SPARSE_RATIO)
    floor: int = whole(0, MAX_TOKENS, default=256)
    sinks: int = whole(0, MAX_KEPT, default=SINKS)
    recent: int = whole(1, MAX_KEPT, default=128)

    @property
    def min_tokens(self) -> int:
        """See `DraftSelection`."""
        return self.floor


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(SparseSelection):
    """The sinks and the latest tokens (Xiao et al. 2024)."""

    name: str = _name("streamingllm")

    ahead: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class SnapKV(SparseSelection):
    """The tokens that the prompt's last `window` queries attend to most (Li et al. 2024, section 4).

    Scores are max-pooled over `pool` tokens, so that what surrounds a token stays with it.
    """

    name: str = _name("snapkv")
    window: int = whole(1, 256, default=32)
    pool: int = one_of((1, 3, 5, 7, 9, 11, 13), default=7)


@dataclass(frozen=True, kw_only=True)
class Quest(SparseSelection):
    """Pages whose keys may score highest, by the minimum and maximum of each channel (Tang et al. 2024)."""

    name: str = _name("quest")
    page: int = one_of(PAGES, default=16)

    per_query: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class SpecExtend(SparseSelection):
    """Pages that the last verified token attended to most, by the mean of their scores (Cha et al. 2025)."""

    name: str = _name("specextend")
    page: int = one_of((1, *PAGES), default=32)


@dataclass(frozen=True, kw_only=True)
class SpecAttn(SparseSelection):
    """The tokens that the last verification attended to most.

    rows: the verification's first and last query (Eq 3), or all of them (Eq 2). score: logits, or their probabilities
    exp(logit - lse). per_kv_head: a set for each KV head; in the paper a layer's heads share one.
    """

    name: str = _name("specattn")
    rows: str = one_of(("ends", "all"), default="ends")
    score: str = one_of(("probabilities", "logits"), default="probabilities")
    per_kv_head: bool = flag(False)


@dataclass(frozen=True, kw_only=True)
class Progressive(SparseSelection):
    """The tokens that each draft's query scores highest by 2-bit keys, for each KV head; not published.

    The 2-bit keys are the upper bits of the cache's codes.
    """

    name: str = _name("progressive")

    per_query: ClassVar[bool] = True
    needs_codes: ClassVar[bool] = True
    attention_class: ClassVar[str | None] = "progressive_attention"


@dataclass(frozen=True, kw_only=True)
class Oracle(SparseSelection):
    """The tokens that each draft's query scores highest by the keys that it reads: a bound for the other policies."""

    name: str = _name("oracle")

    per_query: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class RetrievalHead(SparseSelection):
    """The tokens that SpeContext's retrieval head scores highest (section 4.3).

    level: "head" for a set for each KV head of the target, "batch" for one that they share (Fig 5). by_layer: whether
    each layer has sets of its own, by a head that was trained so; in the paper all layers share them.
    """

    name: str = _name("retrieval-head")
    level: str = one_of(("head", "batch"), default="head")
    by_layer: bool = flag(False)

    per_query: ClassVar[bool] = True
    ahead: ClassVar[bool] = True

    def _contradiction(self) -> str | None:
        if self.by_layer and self.level == "batch":
            return "by_layer is true with level 'batch'; allowed: level 'head'"
        return super()._contradiction()


@dataclass(frozen=True, kw_only=True)
class ClusterKV(SparseSelection):
    """Clusters of `cluster` keys on average, by their centroids (Liu et al. 2024, sections 3.2 and 3.3)."""

    name: str = _name("clusterkv")
    cluster: int = whole(2, 1024, default=80)

    per_query: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class ShadowKV(SparseSelection):
    """Chunks of keys by their means, and the `outliers` chunks that these describe worst (Sun et al. 2024)."""

    name: str = _name("shadowkv")
    chunk: int = one_of((8, *PAGES), default=8)
    outliers: int = whole(0, MAX_KEPT, default=48)

    per_query: ClassVar[bool] = True


# By name; plans list them in this order.
DRAFT_SELECTIONS: dict[str, type[DraftSelection]] = {
    kind().name: kind
    for kind in (
        AllTokens,
        StreamingLLM,
        SnapKV,
        Quest,
        SpecExtend,
        SpecAttn,
        Progressive,
        Oracle,
        RetrievalHead,
        ClusterKV,
        ShadowKV,
    )
}
# Those that a target may read by. What only a verification of all tokens can score is none of them.
TARGET_SELECTIONS: dict[str, type[DraftSelection]] = {
    kind().name: kind
    for kind in (AllTokens, StreamingLLM, Quest, Progressive, Oracle, RetrievalHead, ClusterKV, ShadowKV)
}


def draft_selection(name: str, **hyperparameters: Any) -> DraftSelection:
    """The policy of this name. Raises PlanError for an unknown name, and for hyperparameters that are not allowed."""
    if name not in DRAFT_SELECTIONS:
        raise PlanError(f"draft selection is {name!r}; allowed: {', '.join(DRAFT_SELECTIONS)}")
    return DRAFT_SELECTIONS[name](**hyperparameters)
