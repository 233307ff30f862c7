"""Step times and KV capacity of a replica, tabulated from the predictions of an engine or of this package's runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ridgeplan.planner.feasibility import NothingFits, fewest_gpus, more_gpus
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.quantities import size_text
from ridgeplan.planner.question import Question
from ridgeplan.planner.traffic.simulate import Chunk, Server, StepTimes
from ridgeplan.roofline.engine import HOST_S, PAGE_TOKENS, SAMPLED_KINDS, launch_seconds, of_sequences
from ridgeplan.roofline.evaluate import TimedOp, chunk_attention, prefill_seconds
from ridgeplan.roofline.memory import resident_memory
from ridgeplan.roofline.passes import Op
from ridgeplan.roofline.plan.plan import Plan, require
from ridgeplan.roofline.plan.presets import preset_name
from ridgeplan.roofline.round import round_at, round_rates
from ridgeplan.roofline.strategy import Strategy

CONTEXT_CELLS, CHUNK_CELLS = 128, 64
RUNTIME_MAX_NUM_SEQS = 256
# vLLM: EngineArgs._set_default_max_num_seqs_and_batched_tokens_args, of an API server.
LARGE_GPU_BYTES, LARGE_MAX_NUM_SEQS, MAX_NUM_SEQS = 70 * 2**30, 1024, 256


@dataclass(frozen=True)
class Grid:
    """Seconds on an even grid, [rows][columns], between whose columns is interpolated. cell: tokens of a column."""

    seconds: list[list[float]]
    cell: float

    def at(self, row: int, tokens: float) -> float:
        """The seconds in a row at a number of tokens, at most those of the last column."""
        place = tokens / self.cell
        column, cells = int(place), self.seconds[row]
        if column >= len(cells) - 1:
            return cells[-1]
        low = cells[column]
        return low + (place - column) * (cells[column + 1] - low)


def _grid(seconds: np.ndarray, cell: float) -> Grid:
    return Grid(seconds.tolist(), cell)


@dataclass(frozen=True)
class EngineSteps:
    """Steps of an engine whose passes process prompts beside decodes: products of all rows together, then attention.

    batch_s: of decodes, all but attention, by batch. attention: of decodes, by batch and mean context. Of one pass of a
    stage, row_s: all but attention and the head, by rows; head_s: by sampled rows; chunks: a prompt's attention, by
    tokens in cells of `chunk_cell` and by the tokens before them. mixed_attention: what `attention` is multiplied by
    beside prompts. stages: of a pipeline, in which as many batches are at a time, one of them with the chunks.
    """

    batch_s: list[float]
    row_s: list[float]
    head_s: list[float]
    attention: Grid
    chunks: Grid
    chunk_cell: float
    mixed_attention: float
    stages: int = 1

    def decode_s(self, batch: int, tokens: float) -> float:
        """Seconds of a step that decodes alone."""
        if not batch:
            return 0.0
        return self.batch_s[batch] + self.attention.at(batch, tokens / batch)

    def mixed_s(self, batch: int, tokens: float, chunks: Sequence[Chunk]) -> float:
        """Seconds of a step that also processes chunks of prompts, of which each has a row of logits."""
        rows, stages = batch, self.stages
        seconds = self.mixed_attention * self.attention.at(batch, tokens / batch) if batch else 0.0
        if stages > 1:
            rows = -(-batch // stages)
            seconds = seconds / stages + (stages - 1) / stages * self.decode_s(batch, tokens)
        sampled = rows + len(chunks)
        for size, before in chunks:
            rows += size
            place = size / self.chunk_cell
            row = int(place)
            low = self.chunks.at(row, before)
            seconds += low + (place - row) * (self.chunks.at(row + 1, before) - low)
        return seconds + self.row_s[rows] + self.head_s[sampled]


@dataclass(frozen=True)
class RuntimeSteps:
    """Rounds of this package's runtime, by batch and mean context; whole prompts are processed between rounds.

    prompts: a row for each count of cells of cached tokens would need a prefix cache, which the runtime does not have,
    so there is one row.
    """

    rounds: Grid
    prompts: Grid

    def decode_s(self, batch: int, tokens: float) -> float:
        """Seconds of a round; 0 for a batch of 0."""
        return self.rounds.at(batch, tokens / batch) if batch else 0.0

    def mixed_s(self, batch: int, tokens: float, chunks: Sequence[Chunk]) -> float:
        """Seconds of a round and of prompts."""
        return self.decode_s(batch, tokens) + sum(self.prompts.at(0, size) for size, _ in chunks)


@dataclass(frozen=True)
class KVSizes:
    """Bytes of a plan's memory: fixed, of each sequence, and of each token."""

    fixed: float
    sequence: float
    token: float


@dataclass(frozen=True)
class Replica:
    """A plan on a GPU, or on a data-parallel rank of several, whose requests have up to `max_tokens` tokens.

    acceptance: of its drafts.
    """

    plan: Plan
    question: Question
    max_tokens: int
    acceptance: float = 1.0

    @cached_property
    def _strategy(self) -> Strategy:
        return strategy_of(self.plan, self.question.shape, self.question.machine, self.acceptance)

    def server(self, batched_tokens: int | None = None, max_num_seqs: int | None = None) -> Server:
        """The replica's server: step times, KV capacity, and a scheduler with the backend's defaults.

        Raises NothingFits where weights leave no space for a KV cache, and PlanError for a plan that evicts.
        """
        question, engine = self.question, self.question.engine
        require(not self.plan.eviction.active, f"{preset_name(self.plan)} evicts; allowed: plans that keep all tokens")
        sizes = self.kv_sizes
        room = question.memory_limit_bytes - sizes.fixed
        if room < sizes.sequence + PAGE_TOKENS * sizes.token:
            needed, limit = size_text(sizes.fixed), size_text(question.memory_limit_bytes)
            gpu, name = question.profile.hardware.name, question.shape.name
            gpus = fewest_gpus(question, preset_name(self.plan))
            hint = f"; allowed: {more_gpus(gpus, gpu).text}" if gpus else ""
            raise NothingFits(f"{name} does not fit {gpu}: {needed} of {limit} without any KV cache{hint}")
        queries = 1 + self.plan.speculation.gamma
        if engine is not None:
            large = engine.hardware.memory_bytes >= LARGE_GPU_BYTES
            batched_tokens = batched_tokens or engine.rates.reserve.batched_tokens
            seqs = min(max_num_seqs or (LARGE_MAX_NUM_SEQS if large else MAX_NUM_SEQS), batched_tokens // queries)
            steps: StepTimes = self._engine_steps(batched_tokens, seqs)
            max_chunks = Server.max_chunks
        else:
            seqs, batched_tokens, max_chunks = max_num_seqs or RUNTIME_MAX_NUM_SEQS, 1 << 40, 1
            steps = self._runtime_steps(seqs)
        # The last block of a sequence is half full on average.
        sequence_tokens = sizes.sequence / sizes.token + (PAGE_TOKENS - 1) / 2
        stages = question.workload.parallel.pipeline
        capacity = room / sizes.token, sequence_tokens
        server = Server(steps, *capacity, batched_tokens, seqs, queries, max_chunks, stages)
        if engine is None:
            return server
        return replace(server, ahead=True, host_s=HOST_S, launch_s=launch_seconds(question.shape))

    @cached_property
    def kv_sizes(self) -> KVSizes:
        """Bytes by differences of the memory model, at full pages and beyond any sliding window."""
        shape, machine = self.question.shape, self.question.machine
        long = PAGE_TOKENS * -(-max(self.max_tokens, 2 * (shape.window_tokens or 0), 4096) // PAGE_TOKENS)
        contexts, batches = np.array([long, 2 * long, long, 2 * long]), np.array([1, 1, 2, 2])
        strategy = self._strategy.with_terms(context=contexts, batch=batches, new_tokens=0)
        peaks = np.broadcast_to(np.asarray(resident_memory(shape, machine, strategy).peak, dtype=float), (4,))
        token = float((peaks[3] - peaks[2]) - (peaks[1] - peaks[0])) / long
        require(
            token > 0, f"the KV cache of {preset_name(self.plan)} does not grow; allowed: plans that keep all tokens"
        )
        sequence = max(float(peaks[2] - peaks[0]) - token * long, 0.0)
        return KVSizes(float(peaks[0]) - sequence - token * long, sequence, token)

    @property
    def context_cell(self) -> float:
        """Tokens between two contexts of the tables."""
        return self.max_tokens / CONTEXT_CELLS

    def _contexts(self) -> np.ndarray:
        return np.maximum(np.arange(CONTEXT_CELLS + 1) * self.context_cell, 1.0)

    def _engine_steps(self, batched_tokens: int, max_num_seqs: int) -> EngineSteps:
        shape, machine, rates = self.question.shape, self.question.machine, self.question.machine.engine
        assert rates is not None
        step = rates.step_of(self._strategy, self._strategy.context)

        def seconds(
            batch: np.ndarray, part: Callable[[Op], bool], timed_by: Callable[..., list[TimedOp]] = rates.stage_timed,
            context: np.ndarray | int = 1,
        ) -> np.ndarray:  # fmt: skip
            timed = timed_by(shape, machine, replace(step, batch=batch, context=context))
            total = sum(op_s for op, op_s in timed if part(op))
            return np.asarray(np.broadcast_to(np.asarray(total, dtype=float), batch.shape))

        rows = np.arange(1, batched_tokens + 1)
        row_s = seconds(rows, lambda op: not of_sequences(op) and op.kind not in SAMPLED_KINDS)
        head_s = seconds(np.arange(1, 2 * max_num_seqs + 1), lambda op: op.kind in SAMPLED_KINDS)
        batch_s = seconds(np.arange(1, max_num_seqs + 1), lambda op: not of_sequences(op), rates.timed)
        batches, contexts = np.meshgrid(np.arange(1, max_num_seqs + 1), self._contexts(), indexing="ij")
        attention = seconds(batches.ravel(), of_sequences, rates.timed, contexts.ravel())
        attention = np.vstack([np.zeros(len(contexts[0])), attention.reshape(batches.shape)])
        return EngineSteps(
            batch_s=[0.0, *batch_s.tolist()],
            row_s=[0.0, *row_s.tolist()],
            head_s=[0.0, *head_s.tolist()],
            attention=_grid(attention, self.context_cell),
            chunks=_grid(self._chunk_attention(batched_tokens), self.context_cell),
            chunk_cell=batched_tokens / CHUNK_CELLS,
            mixed_attention=float(step.mixed_attention),
            stages=shape.parallel.pipeline,
        )

    def _chunk_attention(self, batched_tokens: int) -> np.ndarray:
        """Seconds of a prompt's attention, [chunk cells][cells of tokens before the chunk]; none for no tokens."""
        shape, machine = self.question.shape, self.question.machine
        sizes = np.arange(1, CHUNK_CELLS + 2) * (batched_tokens / CHUNK_CELLS)
        tokens, before = np.meshgrid(sizes, np.arange(CONTEXT_CELLS + 1) * self.context_cell, indexing="ij")
        seconds = sum(
            op_s for _, op_s in chunk_attention(shape, machine, self._strategy, tokens.ravel(), before.ravel())
        )
        grid = np.broadcast_to(np.asarray(seconds, dtype=float), tokens.size).reshape(tokens.shape)
        return np.vstack([np.zeros(tokens.shape[1]), grid])

    def _runtime_steps(self, max_num_seqs: int) -> RuntimeSteps:
        shape, machine = self.question.shape, self.question.machine
        rates = rates_of(self.plan, shape, machine)
        batches, contexts = np.meshgrid(np.arange(1, max_num_seqs + 1), self._contexts(), indexing="ij")
        strategy = self._strategy.with_terms(batch=batches.ravel(), context=contexts.ravel())
        passes = round_rates(shape, machine, strategy, rates)
        rounds = np.asarray(round_at(shape, machine, strategy, passes, contexts.ravel()).total_s, dtype=float)
        rounds = np.vstack([np.zeros(CONTEXT_CELLS + 1), rounds.reshape(batches.shape)])
        one_prompt = self._strategy.with_terms(batch=1, context=self._contexts())
        prompt_s = np.asarray(prefill_seconds(shape, machine, one_prompt, rates.target.linear), dtype=float)
        return RuntimeSteps(_grid(rounds, self.context_cell), _grid(prompt_s[None], self.context_cell))
