"""Turns on one GPU: serving engines start together, which is mostly the host's work, and are measured one at a time.

The environment variable GPU_TURNS names a file that the processes lock; without it nothing waits. A shell takes the
same turns with `flock --shared FILE` for what is not timed and `flock FILE` for what is.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def gpu_turn(*, timed: bool) -> Iterator[None]:
    """A turn that is the only one if `timed`, else shared with all others that are not timed."""
    path = os.environ.get("GPU_TURNS")
    if path is None:
        yield
        return
    with Path(path).open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX if timed else fcntl.LOCK_SH)
        yield
