"""Silence for transformers' progress bars while a model is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Progress bars are off inside the body, and as before after it."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
