"""Drafts in an engine: a second model beside the target, as engines have no drafts on the target's own cache.

The nearest to a plan's self-drafts is the same model once more with 8-bit weights, or a 4-bit copy that the user names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance import Acceptance
from ridgeplan.planner.acceptance.drafters import ProposalAcceptance
from ridgeplan.planner.engines.formats import DTYPES, ServingEngine
from ridgeplan.planner.engines.rates import EngineProfile
from ridgeplan.planner.export.schema import Schema
from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.drafters import pass_tokens
from ridgeplan.roofline.engine import EngineStep, eagle3_draft_seconds
from ridgeplan.roofline.execution import MAX_SUFFIX_TOKENS
from ridgeplan.roofline.round import tokens_per_round

METHODS = ("draft_model", "eagle3", "mtp", "ngram", "suffix", "dflash", "dspark")
BLOCKS = ("dflash", "dspark")
HEADS = ("eagle3", "mtp", *BLOCKS)
LOOKUPS = ("ngram", "suffix")  # which need no draft model, as layers for multi-token prediction need none

MIN_GAIN = 0.03  # for which a second copy of the model, or a gamma by batch, is worth its cost


@dataclass(frozen=True)
class DraftModel:
    """The draft model in the engine. model: its id or path. quantization: "" for the checkpoint's own format.

    shape: None if it is unknown, as for an EAGLE-3 head. schedule: gamma by batch, as (first, last, gamma). hit: share
    of the passes with proposals. min_match: fewest tokens of a suffix that is looked up. deepest: the largest gamma
    with a known acceptance; 0 for the plan's. longest: sequence for which it drafts; 0 for any. limit: that of its
    configuration; 0 if it is not known.
    """

    model: str
    method: str
    quantization: str
    kv: str
    gamma: int
    accepted: Acceptance | ProposalAcceptance
    shape: ModelShape | None
    schedule: tuple[tuple[int, int, int], ...] = ()
    hit: float = 1.0
    min_match: int = 2
    deepest: int = 0
    longest: int = 0
    limit: int = 0
    end: int = 1  # of the band of `accepted`: 0 low, 1 best, 2 high

    def acceptance(self, gamma: int) -> float:
        """The conditional acceptance of a round's drafts."""
        return self.accepted.at(gamma)[self.end]

    @property
    def weight_bits(self) -> float:
        """Bits per weight of its linear layers."""
        return 8 if self.quantization else 16

    def gamma_at(self, batch: int) -> int:
        """Drafts of a round at a batch."""
        return next((gamma for first, last, gamma in self.schedule if first <= batch <= last), self.gamma)

    @property
    def scheduled(self) -> bool:
        """Whether gamma depends on the batch."""
        return len(self.schedule) > 1


@dataclass(frozen=True)
class EngineRounds:
    """Times of an engine's rounds with these drafts. host_s: seconds in which a target pass reads from the host."""

    profile: EngineProfile
    shape: ModelShape
    hardware: Hardware
    target: EngineStep
    host_s: float
    drafts: DraftModel

    def tpot_s(self, batch: Term, gamma: int) -> Term:
        """Seconds per token of a sequence at a batch, or at each of an array; gamma 0 is plain decoding."""
        verified = replace(self.target, batch=batch, queries=gamma + 1)
        verify_s = self.profile.rates.step_s(self.shape, self.hardware, verified) + self.host_s
        if not gamma:
            return verify_s
        tokens = float(pass_tokens(self.drafts.hit, self.drafts.acceptance(gamma), gamma))
        if self.drafts.method in LOOKUPS:
            return verify_s / tokens
        if self.drafts.method == "eagle3":
            return (self.tpot_s(batch, 0) + gamma * eagle3_draft_seconds(batch, self.target.context)) / tokens
        dtype, rates = DTYPES[self.drafts.kv], self.profile.rates
        draft = replace(
            self.target, batch=batch, weight_bits=self.drafts.weight_bits, kv_bits=dtype.bits,
            kv=rates.kv_rate(dtype.kind),
        )  # fmt: skip
        draft_s = rates.step_s(self.drafts.shape or self.shape, self.hardware, draft)
        return (gamma * draft_s + verify_s) / float(tokens_per_round(self.drafts.acceptance(gamma), gamma))

    def best_gammas(self, max_batch: int) -> list[int]:
        """The gamma at each of the batches 1, 2, ... `max_batch`: never more than at a smaller one.

        At the last one it is the fastest up to the plan's. Smaller ones have those with the least sum of times over the
        fastest, as times jump where the engine's graphs and waves end; or all the same, where that is nearly as fast.
        """
        batches = np.arange(1.0, max_batch + 1)
        gammas = range(max(self.drafts.gamma, self.drafts.deepest) + 1)
        times = np.array([self.tpot_s(batches, gamma) for gamma in gammas])
        last = int(np.argmin(times[: self.drafts.gamma + 1, -1]))
        excess = times / times.min(axis=0)
        sums, before = excess[:, 0], []
        for costs in excess.T[1:]:
            # The best way to gamma g comes from the best one to g or more at the batch before.
            best = [gamma + int(np.argmin(sums[gamma:])) for gamma in gammas]
            before.append(best)
            sums = costs + sums[best]
        chosen = [last]
        for best in reversed(before):
            chosen.append(best[chosen[-1]])
        chosen.reverse()
        gains = times[last] / times[chosen, np.arange(max_batch)] - 1
        return chosen if gains.max() >= MIN_GAIN else [last] * max_batch


def ranges(gammas: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of equal gammas at the batches 1, 2, ...: (first batch, last batch, gamma)."""
    first = 1
    for gamma, run in groupby(gammas):
        last = first + len(list(run)) - 1
        yield first, last, gamma
        first = last + 1


def arguments(
    engine: ServingEngine, schema: Schema, drafts: DraftModel, tensor_parallel: int
) -> Iterator[tuple[str, Any]]:
    """The engine's arguments for speculation."""
    yield from (_vllm if engine.name == "vllm" else _sglang)(schema, drafts, tensor_parallel)


def _vllm(schema: Schema, drafts: DraftModel, tensor_parallel: int) -> Iterator[tuple[str, Any]]:
    config: dict[str, Any] = {"method": drafts.method, "num_speculative_tokens": drafts.gamma}
    if drafts.method == "ngram":
        config |= {"prompt_lookup_min": drafts.min_match, "prompt_lookup_max": MAX_SUFFIX_TOKENS}
    if drafts.model:
        config |= {"model": drafts.model, "draft_tensor_parallel_size": tensor_parallel}
    if drafts.method not in (*LOOKUPS, *BLOCKS):
        config["draft_sample_method"] = "probabilistic"  # greedy drafts are accepted less often at a temperature
    if drafts.longest:
        config["max_model_len"] = drafts.longest
    if drafts.quantization:
        config["quantization"] = drafts.quantization
    if drafts.kv != "auto" and drafts.method not in LOOKUPS:
        config["kv_cache_dtype"] = drafts.kv
    if drafts.scheduled:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in drafts.schedule]
    name = "--speculative-config"
    yield name, {field: value for field, value in config.items() if schema.has_field(name, field)}


def _sglang(schema: Schema, drafts: DraftModel, tensor_parallel: int) -> Iterator[tuple[str, Any]]:
    if drafts.method in LOOKUPS:
        yield "--speculative-algorithm", "NGRAM"
        yield "--speculative-num-draft-tokens", drafts.gamma + 1
        return
    names = {"draft_model": "STANDALONE", "mtp": "NEXTN"}
    yield "--speculative-algorithm", names.get(drafts.method, drafts.method.upper())
    if drafts.model:
        yield "--speculative-draft-model-path", drafts.model
    if drafts.method in BLOCKS:
        return  # the drafter's configuration has its block
    yield "--speculative-num-steps", drafts.gamma
    yield "--speculative-eagle-topk", 1
    yield "--speculative-num-draft-tokens", drafts.gamma + 1
    if drafts.quantization:
        yield "--speculative-draft-model-quantization", drafts.quantization
    if schema.allows("--speculative-draft-kv-cache-dtype", drafts.kv):
        yield "--speculative-draft-kv-cache-dtype", drafts.kv
