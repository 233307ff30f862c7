"""Drafts read the pages that the last verified token attended to most (Cha et al. 2025)."""

from __future__ import annotations

from ridgeplan.planner.axes import draft_selection as selections
from ridgeplan.runtime.drafting.policies.verified import VerifiedPolicy
from ridgeplan.runtime.kv.cache import Cache


class SpecExtend(VerifiedPolicy):
    """By the last verification query: which one is accepted last is not known before its scores are written."""

    def __init__(self, selection: selections.SpecExtend, cache: Cache) -> None:
        self.page = selection.page
        super().__init__(selection, cache)
