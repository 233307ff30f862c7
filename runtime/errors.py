"""Errors of the runtime, and failures of third-party readers turned into them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path

from tqdm.std import tqdm
from transformers.utils import logging

from ridgeplan.roofline.catalog.validation import brief


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
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
        allowed = f"{low} or more" if high is None else f"from {low} to {high}"
        raise WorkloadError(f"{name} is {brief(value)}; allowed: a whole number {allowed}")


@contextlib.contextmanager
def failures_as(what: str) -> Iterator[None]:
    """Any failure inside the body is a ModelError that begins with `what`, and all that is said of it."""
    try:
        with quiet_transformers():
            yield
    except BaseException as error:  # a damaged file makes readers fail in any way
        panic = type(error).__name__ == "PanicException"  # from Rust code: it is no Exception and cannot be imported
        if not (panic or isinstance(error, Exception)):
            raise
        raise ModelError(f"{what}: {one_line(error)}") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' progress bars and reports inside the body. The bar of its GGUF reader has no switch."""
    bars, verbosity, begin_bar = logging.is_progress_bar_enabled(), logging.get_verbosity(), tqdm.__init__
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tqdm.__init__ = partialmethod(begin_bar, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = begin_bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_rust() -> Iterator[None]:
    """Sends descriptor 2 nowhere inside the body: Rust code, such as tokenizers, writes its panics there by itself."""
    try:
        saved = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
