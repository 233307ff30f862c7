"""How long work tells its caller of its progress."""

from collections.abc import Callable

OnProgress = Callable[[str, int, int], None]  # called with what is done now, parts done, and their total


def silent(what: str, done: int, total: int) -> None:
    """Ignores progress."""
