"""The loop of one generation: rounds until every sequence has ended, with layers that leave for the host meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgeplan.roofline.execution import RoundKind
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.memory import PeakMemory
from ridgeplan.runtime.offload.layer_mover import LayerMover
from ridgeplan.runtime.request import Request, SequenceState
from ridgeplan.runtime.sampling import require_finite
from ridgeplan.runtime.speculation.gamma_control import GammaSchedule
from ridgeplan.runtime.speculation.rounds import Rounds
from ridgeplan.runtime.speculation.speculator import NOTHING, RowResult, Speculator
from ridgeplan.runtime.statistics import Statistics, StatsCollector, Stopwatch


@dataclass(eq=False)
class DecodeLoop:
    """What one generation goes on with, after prefill.

    prepare: makes the rounds for the layers that are on the device by then. mover: moves layers that may leave.
    """

    request: Request
    speculator: Speculator
    schedule: GammaSchedule
    mover: LayerMover | None
    prepare: Callable[[Speculator, Stopwatch], Rounds]
    stopwatch: Stopwatch
    reused_tokens: int = 0  # of the prompt, from the last generation's cache
    rows: list[SequenceState] = field(init=False)
    collector: StatsCollector = field(init=False)

    def __post_init__(self) -> None:
        request, stops = self.request, frozenset(self.request.sampling.stop_token_ids)
        self.rows = [SequenceState(len(prompt), request.max_new_tokens, stops) for prompt in request.prompts]
        prompt_tokens = tuple(map(len, request.prompts))
        self.collector = StatsCollector(self.speculator.cache.config.gamma, prompt_tokens)

    def steps(self, first: Tensor) -> Iterator[list[list[int]]]:
        """New tokens of every sequence: the one that prefill drew, of `first` [rows], then those of each round."""
        rounds = self._started(first)
        yield self._extend([[token] for token in first.tolist()])
        while not all(row.done for row in self.rows):
            if not rounds.in_flight and not self._has_room(rounds):
                rounds = self._offloaded(rounds)
            kind, results = self._round(rounds)
            self.schedule.add(kind, results)
            self.collector.add(kind, results)
            for row, result in zip(self.rows, results, strict=True):
                row.cached += len(result.tokens)
            yield self._extend([result.tokens for result in results])

    def statistics(self, peak: PeakMemory) -> Statistics:
        """Figures of the generation so far."""
        cache = self.speculator.cache
        wanted_loads, loads = cache.loads()
        return self.collector.statistics(
            self.stopwatch,
            peak,
            generated=sum(len(row.tokens) for row in self.rows),
            flushes=sum(_flushes(row, cache.config) for row in self.rows),
            host_layers=cache.layers - cache.first_on_host,
            moved_at=tuple(self.mover.moved_at) if self.mover is not None else (),
            wanted_loads=wanted_loads,
            loads=loads,
            reused_tokens=self.reused_tokens,
        )

    def cached_tokens(self) -> tuple[int, ...]:
        """Tokens of the text that the cache holds, of a generation of one sequence; empty for several."""
        if len(self.rows) != 1:
            return ()
        (prompt,), (row,) = self.request.prompts, self.rows
        return (*prompt, *row.tokens)[: row.stored]

    @torch.inference_mode()
    def _started(self, first: Tensor) -> Rounds:
        """The rounds that go on after the first tokens."""
        # Prefill already draws the first token, and the last one never enters the cache.
        self.speculator.cache.limit(self.request.max_new_tokens - 1)
        rounds = self.prepare(self.speculator, self.stopwatch)
        rounds.start(first)
        return rounds

    def _has_room(self, rounds: Rounds) -> bool:
        """Whether one more round fits, whatever those in flight add, with the layers that are on the device."""
        in_flight = rounds.in_flight * (self.speculator.cache.config.gamma + 1)
        return self.mover is None or self.mover.has_room(max(row.stored for row in self.rows) + in_flight)

    @torch.inference_mode()
    def _offloaded(self, rounds: Rounds) -> Rounds:
        """Moves layers to the host until a round fits; returns the rounds that go on with the others."""
        assert self.mover is not None, "layers leave"
        pending = rounds.pending.clone()
        with self.stopwatch.measure("offload"):
            self.mover.offload([row.stored for row in self.rows])
        following = self.prepare(self.speculator, self.stopwatch)
        following.start(pending)
        return following

    @torch.inference_mode()
    def _round(self, rounds: Rounds) -> tuple[RoundKind, list[RowResult]]:
        """Launches as many rounds as may be in flight and waits for the oldest: its kind, and its result by row.

        Finished rows return nothing. None is launched that the layers on the device might not have room for.
        """
        rows, began_s = self.rows, time.perf_counter()
        # A round adds at least one token per row, so a row needs at most `left` more rounds.
        while (
            rounds.in_flight < rounds.depth
            and any(row.left > rounds.in_flight for row in rows)
            and self._has_room(rounds)
        ):
            rounds.launch(self.schedule.next())
        result = rounds.collect()
        # The device goes on while the host is elsewhere, so that the host's wait alone may be too short.
        device_s = sum(seconds for part, seconds in result.seconds.items() if part != "idle")
        self.stopwatch.add({**result.seconds, "round": max(time.perf_counter() - began_s, device_s)})
        results = [NOTHING if row.done else new for row, new in zip(rows, result.rows, strict=True)]
        require_finite([new.finite for new in results])
        return result.kind, results

    def _extend(self, tokens: list[list[int]]) -> list[list[int]]:
        """Appends each sequence's tokens and returns them; a sequence that hit a stop token also ends in the cache."""
        gained = []
        for index, (row, more) in enumerate(zip(self.rows, tokens, strict=True)):
            running = not row.done
            gained.append(row.extend(more))
            if running and row.stopped:
                self.speculator.cache.stop(index)
        return gained


def _flushes(row: SequenceState, cache: KVCacheConfig) -> int:
    """Groups of a sequence that were quantized during decoding, in the layers that hold the most tokens."""
    stored = cache.stored(row.prompt_tokens)
    return cache.quantized_groups(stored + row.cached) - cache.quantized_groups(stored)
