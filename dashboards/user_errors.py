"""Which errors are a user's to mend: those are shown as one line, every other one is a defect and must show whole."""

from __future__ import annotations


class FileProblem(ValueError):
    """A file that a user named cannot be read or written."""


def about_input(error: ValueError) -> bool:
    """Whether the message is for the user, as those of the package's own errors are."""
    return type(error).__module__.startswith("ridgeplan.")
