"""Errors of the runtime: each message is one line that names the value and what is allowed."""


class ModelError(ValueError):
    """A model that cannot be found, read or executed."""


class WorkloadError(ValueError):
    """A request that the engine's plan, model or vocabulary does not allow."""


class UnsupportedPlan(ValueError):
    """A plan with values that this version can estimate but not execute."""
