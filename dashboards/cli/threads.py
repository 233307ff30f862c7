"""How many threads torch computes with on a CPU: no more than other programs leave cores free.

A product of matrices waits for its last thread: one on a busy core slows every product many times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from ridgeplan.dashboards.cli.output import echo

STATISTICS = Path("/proc/stat")
SAMPLE_S = 0.3
CHOSEN_BY_USER = "OMP_NUM_THREADS"


def limit_threads() -> int | None:
    """Leaves busy cores of a CPU to other programs, with a note on stderr. Returns the threads; None for torch's own.

    A user's OMP_NUM_THREADS stays, and so does a machine with a GPU, whose threads hardly compute.
    """
    import torch

    if CHOSEN_BY_USER in os.environ or torch.cuda.is_available() or not STATISTICS.exists():
        return None
    cores = os.sched_getaffinity(0)
    before = STATISTICS.read_text()
    time.sleep(SAMPLE_S)
    busy = busy_cores(before, STATISTICS.read_text(), cores)
    threads = max(1, len(cores) - busy)
    if threads >= torch.get_num_threads():
        return None
    torch.set_num_threads(threads)
    verb, plural = "is" if busy == 1 else "are", "s" * (threads != 1)
    echo(f"note: {busy} of {len(cores)} cores {verb} busy: computing with {threads} thread{plural}", err=True)
    return threads


def busy_cores(before: str, after: str, cores: Collection[int]) -> int:
    """How many of the logical cores were busy between two states of /proc/stat (proc_stat(5)), rounded."""
    first, last = _core_times(before), _core_times(after)
    spent = [[end - begin for begin, end in zip(first[core], last[core], strict=True)] for core in cores]
    idle = [ticks[3] + ticks[4] for ticks in spent]  # the latter waits for disks
    return round(sum(1 - rest / sum(ticks) for ticks, rest in zip(spent, idle, strict=True) if any(ticks)))


def _core_times(statistics: str) -> dict[int, list[int]]:
    """Ticks of each core by state, without those of guests, which count as the user's, too."""
    lines = [line.split() for line in statistics.splitlines() if line.startswith("cpu") and line[3].isdigit()]
    return {int(name[3:]): list(map(int, ticks[:8])) for name, *ticks in lines}
