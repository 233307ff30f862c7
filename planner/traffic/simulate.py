"""Continuous batching, step by step, of the requests that one replica serves.

The scheduler is vLLM's (V1, first come first served). A step decodes every sequence whose prompt is done, and gives
what remains of its token budget to prompts, in chunks. A request is admitted when the blocks of its whole prompt are
free. By default vLLM schedules a step while the one before runs, so a request that arrives meanwhile waits for both.
The host then launches the step, and only after that reads the tokens of the one before, which are seen no earlier.
When sequences grow beyond the KV cache, the latest admitted one is preempted: it returns to the head of the queue, and
its prompt and output so far are computed again.

Between two events the batch does not change, so that all steps until the next event are simulated at once, at the time
of the middle one. Events are arrivals, ends of prompts and of outputs, and a full KV cache. A run of steps also ends
when contexts have grown by `1 / GROWTH_DIVISOR`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import numpy as np

from ridgeplan.planner.traffic.prefix_cache import PrefixCache
from ridgeplan.planner.traffic.requests import Requests

GROWTH_DIVISOR, MIN_RUN_STEPS = 32, 32
Chunk = tuple[int, int]  # tokens of a prompt in a step, and its tokens before them


class StepTimes(Protocol):
    """Seconds of steps of `batch` sequences that hold `tokens` tokens together."""

    def decode_s(self, batch: int, tokens: float) -> float:
        """A step that decodes alone; 0 for a batch of 0."""

    def mixed_s(self, batch: int, tokens: float, chunks: Sequence[Chunk]) -> float:
        """A step that also processes chunks of prompts."""


@dataclass(frozen=True)
class Server:
    """A replica: its step times and its scheduler.

    kv_tokens: that the KV cache holds. sequence_tokens: what a sequence takes of them beside its own tokens, such as
    the unused part of its last block. batched_tokens: budget of a step. decode_queries: tokens of the budget that a
    decoding sequence takes. max_chunks: prompts of a step. stages: of a pipeline, which the last chunk of a prompt
    passes in turn. ahead: steps are scheduled while the one before runs. host_s: seconds of the host before a step's
    first kernel; launch_s: until the last one of a step with prompts, whose kernels are launched one by one.
    """

    steps: StepTimes
    kv_tokens: float
    sequence_tokens: float
    batched_tokens: int
    max_num_seqs: int
    decode_queries: int = 1
    max_chunks: int = 1 << 30
    stages: int = 1
    ahead: bool = False
    host_s: float = 0.0
    launch_s: float = 0.0

    def fits(self, requests: Requests) -> np.ndarray:
        """Which requests the KV cache can hold until their end, alone: [requests]."""
        needed = requests.prompt_tokens + requests.output_tokens + self.decode_queries
        return np.asarray(needed + self.sequence_tokens <= self.kv_tokens)


@dataclass(frozen=True)
class Served:
    """When requests were served, [requests], and the totals of a replica, up to the last request's end.

    first_s, finish_s: times of the first and of the last token. prompt_s, decode_s: step time by what it is spent on;
    in a mixed step, decoding takes what it would alone. kv_token_s: the integral of the tokens held.
    """

    first_s: np.ndarray
    finish_s: np.ndarray
    end_s: float
    prompt_s: float
    decode_s: float
    prompt_tokens: int  # processed, those of preempted sequences again
    cached_tokens: int  # found in the prefix cache
    decoded_rounds: int
    emitted_tokens: int
    preemptions: int
    kv_token_s: float
    kv_peak_tokens: float
    kv_left_tokens: float  # held after the last request, which is 0


def simulate(requests: Requests, server: Server) -> Served:
    """Serves all requests, which must fit the KV cache (`Server.fits`)."""
    return _Replica(requests, server).run()


class _Replica:
    """The state of one simulation."""

    def __init__(self, requests: Requests, server: Server) -> None:
        count = len(requests)
        self.server, self.count = server, count
        self.arrival_s: list[float] = requests.arrival_s.tolist()
        self.prompt: list[int] = requests.prompt_tokens.tolist()
        self.output: list[int] = requests.output_tokens.tolist()
        self.rounds: list[int] = requests.rounds.tolist()
        self.cached: list[int] = requests.cached_tokens.tolist()
        self.cache = PrefixCache(requests.hash_ids, requests.hash_tokens) if requests.hash_ids else None
        self.first_s, self.finish_s = [math.nan] * count, [math.nan] * count
        self.delay_s = [0.0] * count  # of a request's tokens, until its prompt has passed a pipeline
        # Of each request: tokens emitted, KV tokens held alone, its end in rounds, and where it began to decode.
        self.emitted, self.private_kv = [0] * count, [0.0] * count
        self.end_round, self.start_round = [-1] * count, [0] * count
        self.start_context, self.tokens_per_round = [0] * count, [0.0] * count
        self.arrived = 0  # requests that left the queue of arrivals
        self.returned: deque[int] = deque()  # preempted ones, which come first
        self.admitted: dict[int, None] = {}  # in the order of admission
        self.partial: list[int] = []  # a prompt that is not done: request, tokens done, tokens in all
        self.ends: list[tuple[int, int]] = []  # heap of (end in rounds, request)
        self.now_s, self.round, self.batch = 0.0, 0, 0
        self.scheduled_s = 0.0  # when the next step was decided on
        self.unread: list[tuple[list[float], int]] = []  # times of the last step's tokens: a list, and a place in it
        self.context = 0.0  # tokens of all decoding sequences
        self.growth = 0.0  # tokens that they emit in a round
        self.kv = 0.0  # tokens that the cache holds
        self.prompt_s = self.decode_s = self.kv_token_s = self.kv_peak = 0.0
        self.prompt_tokens = self.cached_tokens = self.decoded_rounds = self.preemptions = self.finished = 0
        self.total_emitted = 0

    def run(self) -> Served:
        """Simulates until every request is served."""
        while self.finished < self.count:
            preempted = False
            while self.batch and self.kv + self.growth > self.server.kv_tokens:
                self._preempt()
                preempted = True
            chunks = [] if preempted else self._schedule()
            if chunks:
                self._mixed_step(chunks)
            elif self.batch:
                self._decode_steps()
            elif not preempted:
                self.now_s = max(self.now_s, self.arrival_s[self.arrived])
                self.unread.clear()
        return Served(
            first_s=np.array(self.first_s), finish_s=np.array(self.finish_s), end_s=self.now_s, prompt_s=self.prompt_s,
            decode_s=self.decode_s, prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens,
            decoded_rounds=self.decoded_rounds, emitted_tokens=self.total_emitted, preemptions=self.preemptions,
            kv_token_s=self.kv_token_s, kv_peak_tokens=self.kv_peak, kv_left_tokens=self.kv,
        )  # fmt: skip

    def _schedule(self) -> list[tuple[int, int, int, bool]]:
        """The prompts of the next step: request, tokens, tokens before them, and whether the prompt is done then."""
        server = self.server
        chunks: list[tuple[int, int, int, bool]] = []
        if not (server.ahead and (self.batch or self.partial)):
            self.scheduled_s = self.now_s
        budget = server.batched_tokens - self.batch * server.decode_queries
        while budget > 0 and len(chunks) < server.max_chunks and (self.partial or self._admit_next()):
            index, done, target = self.partial
            tokens = min(target - done, budget)
            budget -= tokens
            complete = done + tokens == target
            chunks.append((index, tokens, done, complete))
            self.partial = [] if complete else [index, done + tokens, target]
        return chunks

    def _admit_next(self) -> bool:
        """Admits the next request, whose prompt is then the partial one. Returns False where none waits or fits."""
        if self.returned:
            index = self.returned[0]
        elif self.arrived < self.count and self.arrival_s[self.arrived] <= self.scheduled_s:
            index = self.arrived
        else:
            return False
        target = self.prompt[index] + self.emitted[index]
        if len(self.admitted) >= self.server.max_num_seqs or not self._admit(index, target):
            return False
        if self.returned:
            self.returned.popleft()
        else:
            self.arrived += 1
        self.cached_tokens += self.cached[index]
        self.partial = [index, self.cached[index], target]
        return True

    def _admit(self, index: int, target: int) -> bool:
        """Takes the KV cache for `target` tokens, or returns False where they do not fit."""
        room, private, held = self.server.kv_tokens - self.kv - self.growth, target + self.server.sequence_tokens, 0
        if self.cache is not None:
            self.cached[index], held = self.cache.match(index, target)
        if private - held > room:
            return False
        taken = private - held
        if self.cache is not None:
            private -= self.cache.acquire(index, self.server.kv_tokens - self.kv - taken)
        self.private_kv[index] = private
        self.kv += taken
        self.admitted[index] = None
        return True

    def _release(self, index: int, grown: float) -> None:
        """Returns the KV cache of a sequence that has emitted `grown` tokens while it decoded."""
        del self.admitted[index]
        self.kv -= self.private_kv[index] + grown
        if self.cache is not None:
            self.kv -= self.cache.release(index)
        if not self.admitted:
            self.kv = 0.0 if abs(self.kv) < 1e-3 else self.kv  # what rounding of tokens per round has left

    def _preempt(self) -> None:
        """Returns the latest admitted request to the head of the queue, to be computed again."""
        index = next(reversed(self.admitted))
        grown = 0.0
        if self.partial and self.partial[0] == index:
            self.partial = []
        else:
            grown = self._stop_decoding(index)
            self.end_round[index] = -1
            self.emitted[index] += int(grown + 1e-6)
            self.total_emitted += int(grown + 1e-6)
        self._release(index, grown)
        self.returned.appendleft(index)
        self.preemptions += 1

    def _stop_decoding(self, index: int) -> float:
        """Takes a sequence out of the batch; returns the tokens that it has emitted while it decoded."""
        rate = self.tokens_per_round[index]
        grown = rate * (self.round - self.start_round[index])
        self.batch -= 1
        self.context = self.context - self.start_context[index] - grown if self.batch else 0.0
        self.growth = self.growth - rate if self.batch else 0.0
        return grown

    def _finish(self, index: int) -> None:
        self._emit(self.finish_s, index)
        self.finished += 1

    def _emit(self, times: list[float], index: int) -> None:
        times[index] = self.now_s + self.delay_s[index]
        self.unread.append((times, index))

    def _advance(self, rounds: int, step_s: float, launch_s: float) -> float:
        """All decoding sequences run some rounds; those that are done leave. Returns the seconds that passed.

        launch_s: of the host, for the first round. The next step is scheduled after that, and when the step before the
        last one has ended.
        """
        before_s, launched_s = self.now_s, self.scheduled_s + launch_s
        for times, index in self.unread:
            times[index] = max(times[index], launched_s)
        self.unread.clear()
        self.now_s = max(max(before_s, self.scheduled_s + self.server.host_s) + rounds * step_s, launched_s)
        self.scheduled_s = max(before_s, launched_s) if rounds == 1 else self.now_s - step_s
        seconds = self.now_s - before_s
        self.kv_token_s += seconds * (self.kv + rounds * self.growth / 2)
        self.round += rounds
        self.decoded_rounds += rounds * self.batch
        self.context += rounds * self.growth
        self.kv += rounds * self.growth
        if self.kv > self.kv_peak:
            self.kv_peak = self.kv
        ends = self.ends
        while ends and ends[0][0] <= self.round:
            end, index = heappop(ends)
            if self.end_round[index] != end:
                continue  # preempted meanwhile
            self.end_round[index] = -1
            self.total_emitted += self.output[index] - self.emitted[index]
            self._release(index, self._stop_decoding(index))
            self._finish(index)
        return seconds

    def _mixed_step(self, chunks: list[tuple[int, int, int, bool]]) -> None:
        """A step that decodes and processes prompts; those that are done emit a token and begin to decode."""
        sizes = [(tokens, done) for _, tokens, done, _ in chunks]
        seconds = self.server.steps.mixed_s(self.batch, self.context, sizes)
        decode_s = self.server.steps.decode_s(self.batch, self.context)
        self.decode_s += decode_s
        self.prompt_s += self._advance(1, seconds, self.server.launch_s) - decode_s
        for index, tokens, done, complete in chunks:
            self.prompt_tokens += tokens
            if complete:
                self.delay_s[index] = (self.server.stages - 1) * (seconds - decode_s)
                self._begin_decoding(index, done + tokens)

    def _begin_decoding(self, index: int, context: int) -> None:
        """The token that ends a prompt; the sequence joins the batch unless that was its last."""
        if not self.emitted[index]:
            self._emit(self.first_s, index)
        self.emitted[index] += 1
        self.total_emitted += 1
        left = self.output[index] - self.emitted[index]
        if not left:
            self._release(index, 0.0)
            self._finish(index)
            return
        rate = (self.output[index] - 1) / self.rounds[index]
        end = self.round + math.ceil(left / rate - 1e-9)
        self.tokens_per_round[index], self.start_round[index], self.start_context[index] = rate, self.round, context
        self.end_round[index] = end
        heappush(self.ends, (end, index))
        self.batch += 1
        self.context += context
        self.growth += rate

    def _decode_steps(self) -> None:
        """All steps until the next event."""
        ends, server = self.ends, self.server
        while self.end_round[ends[0][1]] != ends[0][0]:
            heappop(ends)
        steps = ends[0][0] - self.round
        steps = min(steps, MIN_RUN_STEPS + int(self.context / (GROWTH_DIVISOR * self.growth)))
        room = server.kv_tokens - self.kv
        if steps * self.growth > room:
            steps = max(int(room / self.growth), 1)
        step_s = server.steps.decode_s(self.batch, self.context + self.growth * (steps - 1) / 2)
        if self.arrived < self.count and not self.returned and len(self.admitted) < server.max_num_seqs:
            arrival_s = self.arrival_s[self.arrived]
            started_s = max(self.now_s, self.scheduled_s + server.host_s)
            until = max(math.ceil((arrival_s - started_s) / step_s), 0) + server.ahead
            if arrival_s > self.scheduled_s and until < steps:
                steps = until
                step_s = server.steps.decode_s(self.batch, self.context + self.growth * (steps - 1) / 2)
        self.decode_s += self._advance(steps, step_s, server.host_s)
