"""How long-running measurements report on themselves."""

from __future__ import annotations

from collections.abc import Callable

# Called with what is measured next, how many parts are done, and how many there are.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Shows no progress."""
