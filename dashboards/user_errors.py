"""Errors caused by user input are shown as one line; all others keep their traceback."""

from __future__ import annotations


class FileProblem(ValueError):
    """A file that a user named cannot be read or written."""


def about_input(error: ValueError) -> bool:
    """Whether an error is caused by user input, as the package's own errors are."""
    return type(error).__module__.startswith("ridgeplan.")
