"""Progress callbacks of long-running measurements."""

from __future__ import annotations

from collections.abc import Callable

# Called with the name of the next part, the number of finished parts, and their total.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Ignores progress."""
