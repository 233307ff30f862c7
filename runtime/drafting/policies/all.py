"""Drafts read every token, as upper codes where the plan says so (QuantSpec, section 4.1)."""

from __future__ import annotations

from ridgeplan.runtime.drafting.policies.base import DraftPolicy


class AllTokens(DraftPolicy):
    """The whole cache; nothing is chosen."""
