"""Errors of the runtime: each message is one line that names the value and what is allowed."""

from ridgeplan.roofline.catalog.mistakes import brief


class ModelError(ValueError):
    """A model that cannot be found, read or executed."""


class WorkloadError(ValueError):
    """A request that the engine's plan, model or vocabulary does not allow."""


class UnsupportedPlan(ValueError):
    """A plan with values that this version can estimate but not execute."""


LONGEST_REASON = 200  # characters


def one_line(error: BaseException) -> str:
    """The start of an error's message on one line, or its type if it has none."""
    return " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__


def require_whole(name: str, value: object, low: int, high: int | None) -> None:
    """Raises WorkloadError unless `value` is a whole number from `low` to `high`, or of `low` or more."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        allowed = f"{low} or more" if high is None else f"from {low} to {high}"
        raise WorkloadError(f"{name} is {brief(value)}; allowed: a whole number {allowed}")
