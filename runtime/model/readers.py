"""Other packages' readers of untrusted files: kept quiet, and whatever goes wrong in them becomes one line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging

from ridgeplan.runtime.errors import ModelError, one_line


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
    """Silences transformers' progress bars and reports inside the body."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
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
