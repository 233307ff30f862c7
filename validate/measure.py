"""Measurement of a generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ridgeplan.planner.plan import Workload

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine, SamplingParams, Statistics

WARM_TOKENS = 512


@dataclass(frozen=True)
class Measured:
    """One generation: its actual workload (means over the batch), statistics, and new tokens if kept."""

    context: int
    new_tokens: int
    batch: int
    statistics: Statistics
    tokens: tuple[tuple[int, ...], ...] = ()

    def workload(self, planned: Workload) -> Workload:
        """The planned workload with the actual lengths."""
        return replace(planned, context=self.context, new_tokens=self.new_tokens, batch=self.batch)


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> Measured:
    """Generates, greedily without `sampling`, and returns the measurement.

    Stop tokens are ignored, so that all sequences have the same length.
    """
    sampling = None if sampling is None else replace(sampling, stop_token_ids=())
    if engine.device.type == "cuda":
        # Compiles kernels and captures graphs, which no figure should include; neither depends on the prompt's length.
        short = [prompt[:WARM_TOKENS] for prompt in prompts]
        engine.generate(short, min(2, max_new_tokens), sampling)
    generation = engine.generate(prompts, max_new_tokens, sampling, on_progress=on_progress)
    return replace(last_run(engine), tokens=tuple(map(tuple, generation.tokens)))


def last_run(engine: Engine) -> Measured:
    """The engine's last generation. Raises WorkloadError before there is one."""
    statistics = engine.statistics
    batch = len(statistics.prompt_tokens)
    return Measured(
        context=round(sum(statistics.prompt_tokens) / batch),
        new_tokens=max(1, round(statistics.generated / batch)),
        batch=batch,
        statistics=statistics,
    )
