"""Turns of several benchmarks on one GPU: what is timed runs without others, all else runs together.

GPU_TURNS, of the environment, names a file that they lock. A process that waits for its turn holds a second lock, the
gate, so that those who come later do not pass it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def gpu_turn(*, timed: bool) -> Iterator[None]:
    """A turn on the GPU: the only one if `timed`, else shared with all others that are not timed."""
    path = os.environ.get("GPU_TURNS")
    if path is None:
        yield
        return
    with Path(path).open("a", encoding="utf-8") as turn:
        with Path(f"{path}.gate").open("a", encoding="utf-8") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(turn, fcntl.LOCK_EX if timed else fcntl.LOCK_SH)
        yield
