"""The planner's speed: cold (a new process), warm, and in plans per second."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from ridgeplan.planner import preset, recommend, resolve, sweep, workload_for
from ridgeplan.planner.quantities import values
from ridgeplan.planner.queries.maps import plan_map
from ridgeplan.planner.queries.sweep import grid_sweep
from ridgeplan.planner.question import ask
from ridgeplan.planner.search import families
from ridgeplan.runtime.progress import OnProgress, silent

MODEL, GPU, CONTEXT = "meta-llama/Llama-3.1-8B", "h200", 120_000
QUESTION = ("plan", MODEL, "--gpu", GPU, "--ctx", str(CONTEXT))
COMMAND = ("-P", "-c", "from ridgeplan.dashboards.cli import main; main()")
# Of a sweep: contexts, gammas and acceptances.
GRID = (np.linspace(4096, 1 << 20, 2048), np.arange(1, 16), np.linspace(0.5, 0.99, 64))


@dataclass(frozen=True)
class PlannerSpeed:
    """Medians. searched_plans: plans that one search predicts in full; swept_plans_per_s: points of a compiled grid.

    cold_s includes the interpreter's start and all imports; first_s is a process's first question after its imports.
    help_s: a process that lists the verbs. map_s: best plans of 64 contexts x 16 batches. grid_s: 1,000 questions on
    several GPUs and at several qualities.
    """

    help_s: float
    cold_s: float
    first_s: float
    warm_s: float
    map_s: float
    grid_s: float
    searched_plans: int
    swept_plans_per_s: float

    @property
    def searched_plans_per_s(self) -> float:
        """Plans evaluated per second of a warm question's whole time."""
        return self.searched_plans / self.warm_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "searched_plans_per_s": self.searched_plans_per_s}


def measure_planner(runs: int = 5, on_progress: OnProgress = silent) -> PlannerSpeed:
    """Times `recommend` for an 8B model on an H200 at 120,000 tokens: `runs` processes, and warm calls."""
    on_progress("new processes", 0, 4)
    help_s, cold_s = (statistics.median(seconds(partial(_in_a_process, words)) for _ in range(runs))
                      for words in (("--help",), QUESTION))  # fmt: skip
    on_progress("questions", 1, 4)
    first_s = seconds(_question)
    warm_s = statistics.median(seconds(_question) for _ in range(5 * runs))
    on_progress("grids", 2, 4)
    map_s, grid_s = (statistics.median(seconds(action) for _ in range(runs)) for action in (_map, _grid))
    on_progress("a sweep", 3, 4)
    return PlannerSpeed(help_s, cold_s, first_s, warm_s, map_s, grid_s, _searched_plans(), _swept_plans_per_s(runs))


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _in_a_process(words: Sequence[str]) -> None:
    subprocess.run([sys.executable, *COMMAND, *words], check=True, stdout=subprocess.DEVNULL)


def _map() -> None:
    question = ask(MODEL, GPU, CONTEXT)
    contexts = np.geomspace(1024, question.shape.max_context, 64).astype(int).tolist()
    plan_map(question, contexts, range(1, 17))


def _grid() -> None:
    """5 GPUs x 2 qualities x 10 contexts x 10 batches."""
    sizes = {"ctx": values("4k..128k:10"), "batch": range(1, 11)}
    turns = {"gpu": ("h200", "h100", "b200", "a100", "l40s"), "quality": ("near-lossless", "lossy")}
    grid_sweep(MODEL, GPU, {**turns, **sizes})


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
