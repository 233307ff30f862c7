"""Drafts read the tokens that the last verification attended to most (SpecAttn, equations 2 and 3)."""

from __future__ import annotations

from ridgeplan.planner.axes import draft_selection as selections
from ridgeplan.runtime.drafting.policies.verified import VerifiedPolicy
from ridgeplan.runtime.kv.cache import Cache


class SpecAttn(VerifiedPolicy):
    """By the first and the last verification query (Eq 3), or by all (Eq 2); a set per layer or per KV head."""

    selection: selections.SpecAttn

    def __init__(self, selection: selections.SpecAttn, cache: Cache) -> None:
        super().__init__(selection, cache)
        self.rows = "all" if selection.rows == "all" else "ends"
        self.what = "logits" if selection.score == "logits" else "probabilities"
        self.shared = not selection.per_kv_head
