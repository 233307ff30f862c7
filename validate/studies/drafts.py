"""How often sparse drafts are accepted, teacher-forced with the runtime's own policies: by policy, ratio and position.

A text goes through the model in rounds of eight tokens, as in speculative decoding of which every draft is the text's
own next token. Each draft's tokens are selected and read by its policy's own code. A position's acceptance is
sum(min(p, q)) of the target's and the draft's distributions at temperature 1 (Leviathan et al. 2023, section 3.3).
The target reads a full-precision cache; drafts read it too, or an INT4 shadow of it.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeplan.planner.axes.draft_selection import AllTokens, DraftSelection, SparseSelection, draft_selection
from ridgeplan.planner.plan import DraftCodes, KVCache, KVFormat, Plan, Speculation
from ridgeplan.runtime import WorkloadError, load
from ridgeplan.runtime.drafting.policies import DraftPolicy, draft_policy
from ridgeplan.runtime.drafting.policies.ranked import RankedPolicy
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata import AttentionMetadata
from ridgeplan.runtime.model.prefill import PromptObservers, prefill
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.validate.acceptance import Passage, draft_weights_of, named_shape
from ridgeplan.validate.progress import Progress, silent
from ridgeplan.validate.prompts import prompt_tokens

GAMMA = 7
ROUND = GAMMA + 1  # tokens
FEWEST_TOKENS = 2 * ROUND  # the first round is not counted
HINDSIGHT = "hindsight"  # SpecAttn's Eq 2 by the round's own verification, which no draft can know
# Policies with the hyperparameters that differ from a plan's: a budget of the ratio alone.
POLICIES: dict[str, dict[str, Any]] = {
    "streamingllm": {},
    "snapkv": {},
    "specextend": {"page": 1},
    "specattn": {},
    "specattn-heads": {"per_kv_head": True},
    "specattn-logits": {"score": "logits"},
    "specattn-all": {"rows": "all"},
    HINDSIGHT: {"rows": "all", "per_kv_head": True},
    "quest": {},
    "progressive": {},
    "oracle": {},
}
ROWS = ("streamingllm", "snapkv", "specextend", "specattn", "quest", "progressive")  # as plans have them
FORMATS = {"bf16": (DraftCodes.FULL, False), "kv4": (DraftCodes.UPPER, False), "w4kv4": (DraftCodes.UPPER, True)}


@dataclass(frozen=True)
class Draft:
    """A policy of `POLICIES` or "all", the share of tokens that it reads, and what of them: a format of `FORMATS`."""

    policy: str
    ratio: float
    format: str

    @property
    def selection(self) -> DraftSelection:
        """The plan's selection."""
        if self.policy == "all":
            return AllTokens()
        name = "specattn" if self.policy == HINDSIGHT else self.policy.split("-")[0]
        return draft_selection(name, ratio=self.ratio, floor=0, **POLICIES[self.policy])

    @property
    def codes(self) -> DraftCodes:
        """The codes that it reads."""
        return FORMATS[self.format][0]

    @property
    def quantized_weights(self) -> bool:
        """Whether it has 4-bit weights."""
        return FORMATS[self.format][1]

    def starved_at(self, context: int) -> bool:
        """Whether the sinks and the latest tokens, which are always read, leave nothing of its budget to choose."""
        selection = self.selection
        if not isinstance(selection, SparseSelection):
            return False
        return math.ceil(selection.ratio * context) <= selection.sinks + selection.recent

    @property
    def row_name(self) -> str:
        """The draft of a row of acceptance; "" for bounds and variants, which no plan has."""
        bits = "" if self.format == "bf16" else self.format
        if self.policy == "all":
            return bits
        return "+".join(filter(None, (bits, self.policy))) if self.policy in ROWS else ""


@dataclass(frozen=True)
class DraftAcceptance:
    """Conditional acceptance by position in a round, each the mean over all rounds."""

    draft: Draft
    context: int
    rounds: int
    by_position: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over all positions."""
        return sum(self.by_position) / len(self.by_position)

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens of a round of all positions' drafts: 1 and, for each, that all up to it are accepted."""
        return 1 + sum(itertools.accumulate(self.by_position, lambda all_before, one: all_before * one))


def drafts_of(policies: Sequence[str], ratios: Sequence[float], formats: Sequence[str]) -> list[Draft]:
    """Every combination, and for each format that differs from the target's the drafts that read all tokens.

    Raises WorkloadError for names that are not in `POLICIES` and `FORMATS`, and for ratios outside 0 to 1.
    """
    for what, names, known in (("policy", policies, POLICIES), ("format", formats, FORMATS)):
        for name in names:
            if name not in known:
                raise WorkloadError(f"{what} is {name!r}; allowed: {', '.join(known)}")
    for ratio in ratios:
        if not 0 < ratio < 1:
            raise WorkloadError(f"ratio is {ratio}; allowed: above 0 and below 1")
    dense = [Draft("all", 1.0, one) for one in formats if one != "bf16"]
    return dense + [Draft(*each) for each in itertools.product(policies, ratios, formats)]


def plan_of(plain: Plan) -> Plan:
    """A plan for the same workload whose cache serves every draft: in full precision, with an INT4 shadow."""
    speculation = Speculation(GAMMA, DraftCodes.UPPER, draft_selection("progressive"))
    return replace(plain, kv=KVCache(KVFormat.SHADOW), speculation=speculation)


def study(
    model: str,
    passage: Passage,
    drafts: Sequence[Draft],
    device: str | None = None,
    on_progress: Progress = silent,
    known: Container[tuple[int, Draft]] = (),
) -> Iterator[DraftAcceptance]:
    """Acceptance of drafts of a model at each context of a passage: a safetensors folder, a GGUF file or a hub id.

    device: as for `ridgeplan.runtime.load`. known: contexts and drafts that are left out. Warns of ratios that leave a
    policy nothing to choose. Raises what `load` raises, PlanError for lengths, WorkloadError for fewer tokens than are
    counted, and PromptError for a text that is too short.
    """
    if passage.tokens < FEWEST_TOKENS:
        allowed = f"{FEWEST_TOKENS} or more, as the first {ROUND} are not counted"
        raise WorkloadError(f"tokens is {passage.tokens}; allowed: {allowed}")
    weights = draft_weights = None
    plans = [plan_of(plain) for plain in passage.plans(named_shape(model))]  # no length is refused after hours
    for plan in plans:
        what = f"{plan.workload.context} tokens"
        asked = [draft for draft in drafts if (plan.workload.context, draft) not in known]
        if not asked:
            continue
        _warn_of_starved(asked, plan.workload.context)
        on_progress(what, 0, 1)
        engine = load(plan, model, device=device, weights=weights)
        weights = engine.weights
        ids = prompt_tokens(engine.tokenizer, plan.workload.final_context, passage.text)
        draft_weights = draft_weights or draft_weights_of(engine, asked, passage.calibration)
        yield from measure(engine, draft_weights, asked, ids, partial(on_progress, what))
        engine.close()


def _warn_of_starved(drafts: Sequence[Draft], context: int) -> None:
    ratios = sorted({draft.ratio for draft in drafts if draft.starved_at(context)})
    if ratios:
        always = SparseSelection.sinks + SparseSelection.recent
        warnings.warn(
            f"at {context} tokens, ratios up to {ratios[-1]:g} leave policies nothing to choose: {always} tokens, the "
            "first and the latest, are always read",
            stacklevel=3,
        )


@torch.inference_mode()
def measure(
    engine: Engine,
    draft_weights: DecoderWeights | None,
    drafts: Sequence[Draft],
    ids: Sequence[int],
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> list[DraftAcceptance]:
    """Acceptance on the whole rounds of a text's tokens after the context of the engine's plan, see `plan_of`.

    The first round is not counted: its sets come from prefill.
    """
    assert engine.cache is not None, "the engine is open"
    context, text = engine.plan.workload.context, torch.tensor(ids, device=engine.device)
    engine.cache.reset(1)
    drafters = list(_drafters(engine.cache, drafts))
    observer = PromptObservers([one.policy for one in drafters])
    prefill(engine.decoder, engine.weights, engine.cache, 0, text[:context], observer=observer)
    starts = range(context, len(text) - ROUND + 1, ROUND)
    rounds = []
    for number, start in enumerate(starts):
        found = _round(engine, draft_weights, drafters, text[None, start : start + ROUND])
        rounds += [found] if number else []
        on_round(number + 1, len(starts))
    means = torch.stack(rounds).double().mean(0).tolist()
    by_draft = zip(drafts, means, strict=True)
    return [DraftAcceptance(draft, context, len(rounds), tuple(each)) for draft, each in by_draft]


@dataclass(frozen=True)
class _Drafter:
    """A draft with its policy. collects: whether verification leaves scores for it, and for those that share them."""

    draft: Draft
    policy: DraftPolicy
    collects: bool


def _drafters(cache: Cache, drafts: Sequence[Draft]) -> Iterator[_Drafter]:
    """Policies over one storage. Those that rank the same scores share them: they differ in ratio or in codes."""
    reading = {codes: cache.reading(codes) for codes in DraftCodes}
    first: dict[object, RankedPolicy] = {}
    for draft in drafts:
        policy = draft_policy(draft.selection, reading[draft.codes])
        collects = False
        if isinstance(policy, RankedPolicy):
            key = draft.policy == HINDSIGHT, replace(draft.selection, ratio=1.0)
            owner = first.setdefault(key, policy)
            policy.scores, collects = owner.scores, owner is policy
        policy.start()
        yield _Drafter(draft, policy, collects)


def _round(
    engine: Engine, draft_weights: DecoderWeights | None, drafters: Sequence[_Drafter], tokens: Tensor
) -> Tensor:
    """Acceptance [drafts, GAMMA] of one round's tokens [1, ROUND], which then enter the cache."""
    assert engine.cache is not None, "the engine is open"
    target = engine.weights
    for one in drafters:
        if one.collects and one.draft.policy == HINDSIGHT:
            _pass(engine, target, tokens, one.policy.target_metadata(ROUND))
    drafted = [
        _drafted(engine, draft_weights if one.draft.quantized_weights else target, one.policy, tokens)
        for one in drafters
    ]
    for one in drafters:
        if one.collects and one.draft.policy != HINDSIGHT:
            _pass(engine, target, tokens, one.policy.target_metadata(ROUND))
    p = _pass(engine, target, tokens, engine.cache.target_metadata(ROUND))[:GAMMA]
    engine.cache.advance(torch.full_like(engine.cache.lengths[:1], ROUND))
    overlaps = torch.stack([torch.minimum(p, q).sum(-1) for q in drafted])
    return overlaps.clamp_max(1)  # sums of float32 probabilities may pass 1


def _drafted(engine: Engine, weights: DecoderWeights | None, policy: DraftPolicy, tokens: Tensor) -> Tensor:
    """The distributions [GAMMA, vocab] of a draft; sets that last a round serve all positions in one pass."""
    assert weights is not None, "weights are quantized for drafts that have their own"
    policy.before_round()
    policy.before_drafts()
    if not policy.selection.per_query:
        return _pass(engine, weights, tokens[:, :GAMMA], policy.draft_metadata(0, GAMMA))
    steps = [
        _pass(engine, weights, tokens[:, ahead : ahead + 1], policy.draft_metadata(ahead)) for ahead in range(GAMMA)
    ]
    return torch.cat(steps)


def _pass(engine: Engine, weights: DecoderWeights, tokens: Tensor, metadata: AttentionMetadata) -> Tensor:
    assert engine.cache is not None, "the engine is open"
    return engine.decoder.step(weights, engine.cache, tokens, metadata)[0].float().softmax(-1)
