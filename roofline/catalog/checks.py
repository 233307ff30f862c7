"""Dataclass fields that carry their own check: `width: int = whole(1, 100)`, then `check_fields` once made.

Every error is one line that names the field and what is allowed.
"""

import math
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any


class InvalidField(ValueError):
    """A field of a model shape or of a hardware description is out of range or of the wrong type."""


def check_fields(instance: Any, owner: str) -> None:
    """Run the check of every field of a dataclass instance; raises InvalidField at the first bad one."""
    for item in fields(instance):
        value, check = getattr(instance, item.name), item.metadata.get("check")
        problem = check(value) if check else None
        if problem:
            raise InvalidField(f"{owner}: {item.name} must be {problem}, not {brief(value)}")


def whole(low: int, high: int, default: Any = MISSING) -> Any:
    """A field that holds an int (not a bool, not a float) in low..high; default None also allows None."""

    def check(value: object) -> str | None:
        fine = (type(value) is int and low <= value <= high) or (value is None and default is None)
        return None if fine else f"a whole number from {low} to {high}"

    return _checked(check, default)


def positive(high: float, default: Any = MISSING) -> Any:
    """A field that holds a finite real number in (0, high]."""

    def check(value: object) -> str | None:
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        fine = real and 0 < value <= high and math.isfinite(value)  # type: ignore[operator,arg-type]
        return None if fine else f"a number above 0 and up to {high:g}"

    return _checked(check, default)


def flag(default: Any = MISSING) -> Any:
    """A field that holds a bool."""
    return _checked(lambda value: None if isinstance(value, bool) else "true or false", default)


def text(default: Any = MISSING) -> Any:
    """A field that holds a string, empty only if that is its default."""
    return _checked(
        lambda value: None if isinstance(value, str) and (value or default == "") else "a non-empty text",
        default,
    )


def one_of(allowed: tuple[str, ...], default: Any = MISSING) -> Any:
    """A field that holds one of the allowed strings."""
    return _checked(lambda value: None if value in allowed else f"one of {', '.join(allowed)}", default)


def brief(value: object) -> str:
    """`value` for an error message: one line of at most 60 characters."""
    # repr() of an int with thousands of digits raises ValueError by itself.
    shown = "a huge number" if isinstance(value, int) and abs(value) > 10**50 else repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _checked(check: Callable[[object], str | None], default: Any) -> Any:
    return field(default=default, metadata={"check": check})
