"""The base of a plan's parts."""

from __future__ import annotations

from ridgeplan.roofline.catalog.checks import Checked


class PlanError(ValueError):
    """A malformed or contradictory plan; the message names the value and what is allowed."""


class PlanPart(Checked):
    """Raises PlanError for values that are not allowed."""

    error = PlanError
