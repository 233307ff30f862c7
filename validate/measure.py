"""Measurement of generations, alone or in turns, by segments whose spread reveals other work on the machine.

Another process slows some segments and not others. The median is the time of a quiet machine as long as most segments
are quiet, and the spread tells whether they are. Generations that run in turns are slowed alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ridgeplan.roofline.plan.plan import Workload

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine, SamplingParams, Statistics


SEGMENTS = 10  # of a generation that is long enough
MIN_FOR_SPREAD = 4  # with fewer, quartiles say nothing
# A quiet machine's segments differ by a few percent; their context grows by less than a tenth in a measurement.
BUSY_SPREAD = 0.2


@dataclass(frozen=True)
class Segment:
    """Consecutive rounds of a generation, and the seconds that they took together."""

    seconds: float
    rounds: int

    @property
    def round_s(self) -> float:
        """Seconds of one of its rounds."""
        return self.seconds / self.rounds


def median_round_s(segments: Sequence[Segment]) -> float:
    """Seconds of a round: the median over the segments. Raises StatisticsError without any."""
    return statistics.median(segment.round_s for segment in segments)


def spread_of(values: Sequence[float]) -> float | None:
    """Interquartile range over the median; None for too few values to tell."""
    if len(values) < MIN_FOR_SPREAD:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def widest(spreads: Iterable[float | None]) -> float | None:
    """The largest known spread; None if none is known."""
    return max((spread for spread in spreads if spread is not None), default=None)


def is_busy(spread: float | None) -> bool:
    """Whether a spread shows that other work slowed the machine. An unknown spread does not."""
    return spread is not None and spread > BUSY_SPREAD


def segment_tokens(new_tokens: int) -> int:
    """Tokens of each sequence in a segment of a generation of `new_tokens`."""
    return max(1, math.ceil(new_tokens / SEGMENTS))


WARM_TOKENS = 512
Prompts = Sequence[Sequence[int]]
Advanced = Callable[[int], None]  # called with the tokens delivered so far


@dataclass(frozen=True)
class Measured:
    """One generation: its actual workload (means over the batch), statistics, and new tokens if kept.

    segments: those whose times count. driver_bytes: memory of the GPU in use when it was prefilled, as its driver
    reports it, other processes included.
    """

    context: int
    new_tokens: int
    batch: int
    statistics: Statistics
    tokens: tuple[tuple[int, ...], ...] = ()
    segments: tuple[Segment, ...] = ()
    driver_bytes: int | None = None

    @property
    def round_parts_s(self) -> list[tuple[str, float]]:
        """The parts of a mean round, in order: its drafts and its verification, medians, and what is left."""
        stats = self.statistics
        gamma = round(sum(gamma * count for gamma, count in enumerate(stats.rounds_at)) / max(stats.rounds, 1))
        parts = [(f"draft {index + 1} of {gamma}", stats.draft_s) for index in range(gamma)]
        parts.append(("verification", stats.verify_s))
        rest_s = stats.decode_s / max(stats.rounds, 1) - sum(seconds for _, seconds in parts)
        return [*parts, ("rest", rest_s)] if rest_s > 0 else parts

    @property
    def tpot_ms(self) -> float:
        """Time per output token of a sequence: the segments' median round over its tokens, else the mean round.

        Where gamma adapts, rounds and their tokens differ together, so it is the mean round as well.
        """
        if not self.segments or self._adaptive:
            return self.statistics.tpot_ms
        return 1e3 * median_round_s(self.segments) / self.statistics.tokens_per_round

    @property
    def spread(self) -> float | None:
        """Interquartile range of the segments' rounds over their median; None if there are too few, or gamma adapts."""
        return None if self._adaptive else spread_of([segment.round_s for segment in self.segments])

    @property
    def _adaptive(self) -> bool:
        """Whether rounds had different gammas."""
        return sum(map(bool, self.statistics.rounds_at)) > 1

    def workload(self, planned: Workload) -> Workload:
        """The planned workload with the actual lengths."""
        return replace(planned, context=self.context, new_tokens=self.new_tokens, batch=self.batch)


def measure(
    engine: Engine,
    prompts: Prompts,
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    *,
    on_progress: Advanced | None = None,
    filled: bool = False,
) -> Measured:
    """Generates, greedily without `sampling`, and returns the measurement.

    Stop tokens are ignored, so that all sequences have the same length. filled: as for `Run`.
    """
    run = Run(engine, prompts, max_new_tokens, sampling, on_progress, filled=filled)
    take_turns([run])
    return run.measured(exclusive=True)


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


class Run:
    """A generation that advances segment by segment. Prefill and the first round are not part of any segment.

    others_bytes: weights of other formats that other runs hold, which the peak on a GPU leaves out. filled: whether the
    engine's cache holds the prompts (`Engine.prefill_with`), and it has generated as many sequences before.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        on_progress: Advanced | None = None,
        others_bytes: int = 0,
        filled: bool = False,
    ) -> None:
        sampling = None if sampling is None else replace(sampling, stop_token_ids=())
        if engine.device.type == "cuda" and not filled:
            # Compiles kernels and captures graphs, which no figure should include; neither depends on the prompt's
            # length.
            short = [prompt[:WARM_TOKENS] for prompt in prompts]
            engine.generate(short, min(2, max_new_tokens), sampling)
        self.engine = engine
        self.ended = False
        self._segment_tokens = len(prompts) * segment_tokens(max_new_tokens)
        self._on_progress = on_progress
        self._steps = engine.stream_batch(prompts, max_new_tokens, sampling)
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._segments: list[Segment] = []
        self._round(), self._round()  # the prefill's tokens, and the first round, which allocates its workspace
        peak = engine.peak_memory_bytes
        self._peak_bytes = None if peak is None else peak - others_bytes
        self._driver_bytes = _driver_bytes(engine)

    def advance(self) -> None:
        """Runs one segment; `ended` says whether it was the last."""
        self._wait()
        start, before, rounds = time.perf_counter(), self._delivered, 0
        while self._delivered - before < self._segment_tokens and self._round():
            rounds += 1
        self._wait()
        if rounds:
            self._segments.append(Segment(time.perf_counter() - start, rounds))

    def measured(self, *, exclusive: bool, freed_bytes: int = 0) -> Measured:
        """The finished generation. exclusive: whether nothing else ran on the device between its rounds.

        freed_bytes: what runs that had begun before this one held beside their targets' weights, known once they are
        freed. The peak leaves it out.

        If not, the engine's own peak and times include the others', and those of the segments replace them. The last
        segment does not count if there are others: its last round was launched in the one before (GraphRounds).
        """
        timed = tuple(self._segments[:-1] or self._segments)
        result = replace(last_run(self.engine), tokens=tuple(map(tuple, self._tokens)), segments=timed)
        if not exclusive:
            result = replace(result, statistics=self._without_others(result.statistics, freed_bytes))
        return replace(result, driver_bytes=self._driver_bytes)

    def _without_others(self, statistics: Statistics, freed_bytes: int) -> Statistics:
        """The engine's statistics without what other runs did between its rounds; its waits are not known then."""
        rounds = sum(segment.rounds for segment in self._segments)
        mean_s = sum(segment.seconds for segment in self._segments) / rounds if rounds else 0.0
        peak = None if self._peak_bytes is None else self._peak_bytes - freed_bytes
        return replace(statistics, decode_s=mean_s * statistics.rounds, idle_s=0.0, peak_memory_bytes=peak)

    def _round(self) -> bool:
        """Takes the next round's tokens; False after the last one."""
        gained = next(self._steps, None)
        if gained is None:
            self.ended = True
            return False
        for tokens, more in zip(self._tokens, gained, strict=True):
            tokens.extend(more)
        if self._on_progress is not None:
            self._on_progress(self._delivered)
        return True

    @property
    def _delivered(self) -> int:
        return sum(map(len, self._tokens))

    def _wait(self) -> None:
        """Until the device has finished the round that is in flight, so that each segment pays for its own."""
        if self.engine.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.engine.device)


def take_turns(runs: Sequence[Run]) -> None:
    """Runs all to their ends, a segment of each in turn."""
    while running := [run for run in runs if not run.ended]:
        for run in running:
            run.advance()


def _driver_bytes(engine: Engine) -> int | None:
    """Memory in use as the GPU's driver reports it; None on a CPU."""
    if engine.device.type != "cuda":
        return None
    import torch

    free, total = torch.cuda.mem_get_info(engine.device)
    return total - free


ROUNDING = 1e-3  # by which a sum of float32 probabilities over a large vocabulary may pass 1


def clamp_share(share: float, low: float = 0.0) -> float:
    """A measured share in low..1, which rounding may have taken slightly outside of 0..1.

    Anything further outside, and NaN, is returned as it is, so that the row it is saved in refuses it.
    """
    return min(1.0, max(low, share)) if -ROUNDING <= share <= 1 + ROUNDING else share
