"""Statistics of a generation: tokens, rounds, acceptance, and times of its phases."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ridgeplan.roofline.execution import RoundKind, RoundShape, round_shape
from ridgeplan.runtime.memory import PeakMemory
from ridgeplan.runtime.speculation.speculator import RowResult


class Stopwatch:
    """Collects durations by name. On CUDA it records events, which are read once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: defaultdict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._durations: defaultdict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Times the body."""
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._spans[name].append((begin, end))
        else:
            start = time.perf_counter()
            yield
            self._durations[name].append(time.perf_counter() - start)

    @contextlib.contextmanager
    def measure_wall(self, name: str) -> Iterator[None]:
        """Wall time of the body, for one that waits for the device itself."""
        start = time.perf_counter()
        yield
        self._durations[name].append(time.perf_counter() - start)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds durations that were measured elsewhere."""
        for name, duration in seconds.items():
            self._durations[name].append(duration)

    def seconds(self, name: str) -> list[float]:
        """All durations under a name, in order; waits for the device."""
        if name in self._spans:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) / 1e3 for begin, end in self._spans[name]]
        return list(self._durations[name])


@dataclass(frozen=True)
class Statistics:
    """Figures of one generation; a figure without data is 0.0, an unknown memory peak is None.

    gamma: the most drafts of a round. rounds_at[g]: rounds of up to g drafts, of whichever tiers; rounds_of: the same
    by shape, which tells self-drafts, proposals and cascades apart. drafted: drafts for unfinished sequences.
    prompt_tokens: per sequence. rounds: forward passes of the target after prefill; sequence_rounds: their sum over
    unfinished sequences. generated: tokens delivered; decoded: tokens that rounds kept, some of them past a stop token.
    verified_at[j], accepted_at[j]: how often draft j of whichever tier was compared with the target, and accepted.
    draft_s, propose_s, verify_s: medians of a pass of the self-draft, of the proposals that a verification takes, of
    that; flush_s, decode_s, prefill_s: sums, of rounds the longer of the host's wait and the device's time.
    idle_s: sum of the device's waits between rounds, 0 on a CPU.
    capture_s: time spent capturing CUDA graphs, 0 if an earlier generation's graph was reused. first_use_s: what an
    engine's first generation took before its prefill to compile or load kernels and start libraries, 0 on a CPU.
    host_layers: on the host in the end. moved_at: tokens of the longest sequence when each layer left for it, of those
    that did so meanwhile. offload_s: sum of the time that this took. wanted_loads, loads: tokens or pages that steps
    chose of layers on the host, and those that had to be loaded, summed over layers and heads.
    reused_tokens: of the prompt, those that the cache held from the last generation.
    draft_passes: of the self-draft, summed over unfinished sequences. proposal_rounds: rounds of a sequence before
    which the drafter had proposals, used or not; proposals_compared, proposals_matched: those that could be compared
    with the round's tokens, and that equalled them.
    peak_memory_bytes, peak_device_bytes, outside_bytes: allocated, device and outside of `memory.PeakMemory`.
    """

    gamma: int
    prompt_tokens: tuple[int, ...]
    rounds: int
    sequence_rounds: int
    generated: int
    decoded: int
    verified_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    flushes: int
    prefill_s: float
    draft_s: float
    verify_s: float
    flush_s: float
    decode_s: float
    idle_s: float
    capture_s: float
    peak_memory_bytes: int | None
    peak_device_bytes: int | None = None
    outside_bytes: int | None = None
    rounds_at: tuple[int, ...] = ()
    rounds_of: tuple[tuple[RoundShape, int], ...] = ()
    drafted: int = 0
    host_layers: int = 0
    moved_at: tuple[int, ...] = ()
    offload_s: float = 0.0
    wanted_loads: int = 0
    loads: int = 0
    reused_tokens: int = 0
    draft_passes: int = 0
    proposal_rounds: int = 0
    proposals_compared: int = 0
    proposals_matched: int = 0
    first_use_s: float = 0.0
    propose_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of a sequence's rounds before which the drafter had proposals."""
        return _ratio(self.proposal_rounds, self.sequence_rounds)

    @property
    def proposal_acceptance(self) -> float:
        """Share of the drafter's proposals that the text then had, given that it had all before them."""
        return _ratio(self.proposals_matched, self.proposals_compared)

    @property
    def drafts_per_pass(self) -> float:
        """Tokens that a pass of the self-draft drafts: more than 1 where it accepts proposals."""
        return _ratio(self.drafted, self.draft_passes)

    @property
    def moved_layers(self) -> int:
        """Layers that left for the host while tokens were generated."""
        return len(self.moved_at)

    @property
    def overlap(self) -> float:
        """Share of the tokens that steps chose that were on the device already (SpeContext, Fig 6b)."""
        return 1 - self.loads / self.wanted_loads if self.wanted_loads else 0.0

    @property
    def num_draft_tokens_verified(self) -> int:
        """Drafts that were compared with the target: those whose predecessors in the round were all accepted."""
        return sum(self.verified_at)

    @property
    def accepted(self) -> int:
        """Drafts that the target agreed with."""
        return sum(self.accepted_at)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a sequence gains in a round, 1 to gamma + 1."""
        return _ratio(self.decoded, self.sequence_rounds)

    @property
    def acceptance(self) -> float:
        """Acceptance of a draft, given that all earlier ones of its round were accepted (Leviathan et al. 2023)."""
        return _ratio(self.accepted, self.num_draft_tokens_verified)

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """The conditional acceptance of each position of a round."""
        return tuple(_ratio(a, j) for a, j in zip(self.accepted_at, self.verified_at, strict=True))

    @property
    def accepted_share(self) -> float:
        """Accepted over drafted tokens, QuantSpec's acceptance rate (QuantSpec-6)."""
        return _ratio(self.accepted, self.drafted)

    @property
    def tpot_ms(self) -> float:
        """Time per output token of a sequence: of rounds, and of layers that leave between them, not of captures."""
        return 1e3 * _ratio(_ratio(self.decode_s + self.offload_s, self.rounds), self.tokens_per_round)

    @property
    def ttft_ms(self) -> float:
        """Time until every sequence has its first token, once kernels were used: without `first_use_s`."""
        return 1e3 * self.prefill_s


class StatsCollector:
    """Counts the rounds of a generation, on the host."""

    def __init__(self, gamma: int, prompt_tokens: tuple[int, ...]) -> None:
        """gamma: the most drafts of a round. prompt_tokens: of each sequence."""
        self._gamma, self._prompt_tokens = gamma, prompt_tokens
        self._shapes: list[RoundShape] = []  # of the rounds, in order
        self._sequence_rounds = self._decoded = self._drafted = self._draft_passes = 0
        self._proposal_rounds = self._proposals_compared = self._proposals_matched = 0
        self._verified_at, self._accepted_at = [0] * gamma, [0] * gamma

    def add(self, kind: RoundKind, rows: list[RowResult]) -> None:
        """Adds a round; rows that kept nothing were inactive."""
        active, shape = sum(bool(row.tokens) for row in rows), round_shape(kind)
        self._shapes.append(shape)
        self._sequence_rounds += active
        self._drafted += sum(row.drafted for row in rows) if shape.depth else shape.gamma * active
        self._draft_passes += shape.passes * active
        self._proposal_rounds += sum(row.proposals > 0 for row in rows)
        self._proposals_compared += sum(row.proposals_compared for row in rows)
        self._proposals_matched += sum(row.proposals_matched for row in rows)
        self._decoded += sum(len(row.tokens) for row in rows)
        for position in range(self._gamma):
            self._accepted_at[position] += sum(row.accepted > position for row in rows)
            self._verified_at[position] += sum(row.verified > position for row in rows)

    def statistics(self, stopwatch: Stopwatch, peak: PeakMemory, **counts: Any) -> Statistics:
        """The figures so far. counts: those fields of `Statistics` that rounds do not tell."""
        # A round that failed was not added.
        drafts_s = list(zip(stopwatch.seconds("draft"), self._shapes, strict=False))
        return Statistics(
            gamma=self._gamma,
            prompt_tokens=self._prompt_tokens,
            rounds=len(self._shapes),
            sequence_rounds=self._sequence_rounds,
            decoded=self._decoded,
            verified_at=tuple(self._verified_at),
            accepted_at=tuple(self._accepted_at),
            prefill_s=sum(stopwatch.seconds("prefill")),
            draft_s=_median([seconds / shape.passes for seconds, shape in drafts_s if shape.passes]),
            propose_s=_median([seconds for seconds, shape in drafts_s if shape.proposes_to_target]),
            verify_s=_median(stopwatch.seconds("verify")),
            flush_s=sum(stopwatch.seconds("flush")),
            decode_s=sum(stopwatch.seconds("round")),
            idle_s=sum(stopwatch.seconds("idle")),
            offload_s=sum(stopwatch.seconds("offload")),
            capture_s=sum(stopwatch.seconds("capture")),
            first_use_s=sum(stopwatch.seconds("first use")),
            peak_memory_bytes=peak.allocated,
            peak_device_bytes=peak.device,
            outside_bytes=peak.outside,
            rounds_at=tuple(map([shape.gamma for shape in self._shapes].count, range(self._gamma + 1))),
            rounds_of=tuple(sorted(Counter(self._shapes).items())),
            drafted=self._drafted,
            draft_passes=self._draft_passes,
            proposal_rounds=self._proposal_rounds,
            proposals_compared=self._proposals_compared,
            proposals_matched=self._proposals_matched,
            **counts,
        )


def _ratio(part: float, total: float) -> float:
    return part / total if total else 0.0


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
