"""The planner's speed: cold (a new process), warm, and in plans per second."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ridgeplan.planner import preset, recommend, resolve, sweep, workload_for
from ridgeplan.planner.search_space import families
from ridgeplan.validate.progress import Progress, silent

MODEL, GPU, CONTEXT = "meta-llama/Llama-3.1-8B", "h200", 120_000
COMMAND = ("-P", "-c", "from ridgeplan.dashboards.cli import main; main()")
# Of a sweep: contexts, gammas and acceptances.
GRID = (np.linspace(4096, 1 << 20, 2048), np.arange(1, 16), np.linspace(0.5, 0.99, 64))


@dataclass(frozen=True)
class PlannerSpeed:
    """Medians. searched_plans: plans that one search predicts in full; swept_plans_per_s: points of a compiled grid.

    cold_s includes the interpreter's start and all imports; first_s is a process's first question after its imports.
    """

    cold_s: float
    first_s: float
    warm_s: float
    searched_plans: int
    swept_plans_per_s: float

    @property
    def searched_plans_per_s(self) -> float:
        """Plans evaluated per second of a warm question's whole time."""
        return self.searched_plans / self.warm_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "searched_plans_per_s": self.searched_plans_per_s}


def measure_planner(runs: int = 5, on_progress: Progress = silent) -> PlannerSpeed:
    """Times `recommend` for an 8B model on an H200 at 120,000 tokens: `runs` processes, and warm calls."""
    on_progress("a new process", 0, 3)
    cold_s = statistics.median(seconds(_in_a_process) for _ in range(runs))
    on_progress("questions", 1, 3)
    first_s = seconds(_question)
    warm_s = statistics.median(seconds(_question) for _ in range(5 * runs))
    on_progress("a sweep", 2, 3)
    return PlannerSpeed(cold_s, first_s, warm_s, _searched_plans(), _swept_plans_per_s(runs))


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _in_a_process() -> None:
    question = ("recommend", MODEL, "--gpu", GPU, "--ctx", str(CONTEXT))
    subprocess.run([sys.executable, *COMMAND, *question], check=True, stdout=subprocess.DEVNULL)


def _question() -> None:
    recommend(MODEL, GPU, CONTEXT)


def _searched_plans() -> int:
    shape, profile = resolve(MODEL, GPU)
    workload = workload_for(shape, profile, CONTEXT, 1024, 1, yarn=False)
    return sum(family.size for family in families(workload, offload=False))


def _swept_plans_per_s(runs: int) -> float:
    """Time per token over context, gamma and acceptance, compiled once."""
    shape, profile = resolve(MODEL, GPU)
    plan = preset("quantspec", workload_for(shape, profile, CONTEXT, 1024, 1, yarn=False))
    compiled = sweep(plan, shape, profile, "tpot_s", ("context", "gamma", "acceptance"))
    context, gamma, acceptance = np.ix_(*GRID)

    def once() -> object:
        return compiled(context=context, gamma=gamma, acceptance=acceptance)

    once()
    return math.prod(map(len, GRID)) / statistics.median(seconds(once) for _ in range(runs))
