"""How often sparse drafts are accepted, by policy, ratio and position, and the file that a study goes on from.

The model continues passages of a text in rounds of seven drafts, by the engine's own decode loop: rejected drafts are
dropped, and the next round's sets come from what this one's verification left. Or, teacher-forced, a text goes through
the model in rounds of eight tokens with its own next tokens as drafts, all of which count as accepted. The policy's own
code selects and reads each draft's tokens. A position's acceptance is sum(min(p, q)) of the target's and the draft's
distributions at temperature 1, given that the drafts before it were accepted (Leviathan et al. 2023, section 3.3).
The target reads a full-precision cache; drafts read it too, or an INT4 shadow of it.
"""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeplan.planner.acceptance import AcceptanceRow
from ridgeplan.planner.resolution import yarn_factor
from ridgeplan.roofline.catalog import validation as check
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.validation import Checked
from ridgeplan.roofline.plan.plan import MAX_TOKENS, DraftCodes, KVCache, KVFormat, Plan, Speculation
from ridgeplan.roofline.plan.policy import AllTokens, SparseSelection, TokenSelection, make_selection
from ridgeplan.runtime import WorkloadError
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.policies import token_selector
from ridgeplan.runtime.policies.base import TokenSelector
from ridgeplan.runtime.policies.ranked import VerificationSelector
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.runtime.request import Request
from ridgeplan.runtime.retrieval.head import Head
from ridgeplan.runtime.sampling import SamplingParams, require_finite
from ridgeplan.validate.acceptance import (
    MAX_TOKENS_MEASURED,
    Passage,
    draft_weights_of,
    measured_row,
    named_shape,
    rows_by_position,
)
from ridgeplan.validate.engines import SharedWeights, bound_head
from ridgeplan.validate.measure import clamp_share
from ridgeplan.validate.prompts import prompt_batch
from ridgeplan.validate.result_file import SCHEMA, ResultFile
from ridgeplan.validate.studies import methods
from ridgeplan.validate.studies.draft_rounds import ObservedSpeculator, RoundCounts, observe_rounds
from ridgeplan.validate.studies.methods import FORMATS, GREEDY, HINDSIGHT, POLICIES, SAMPLED, TEACHER_FORCED

GAMMA = 7
ROUND = GAMMA + 1  # tokens
MIN_TOKENS = 2 * ROUND  # the first round is not counted
MIN_SAMPLED_TOKENS = 3 * ROUND  # nor is the last one, which may be cut, where tokens are generated
MAX_PASSAGES = 1000
ROWS = (
    "streamingllm",
    "snapkv",
    "specextend",
    "specattn",
    methods.WEIGHTS,
    "quest",
    "progressive",
)  # as plans have them


@dataclass(frozen=True)
class StudyDraft:
    """A policy of `POLICIES` or "all", the share of tokens that it reads, and their format, one of `FORMATS`."""

    policy: str
    ratio: float
    format: str

    @property
    def selection(self) -> TokenSelection:
        """The plan's selection."""
        if self.policy == "all":
            return AllTokens()
        name, options = POLICIES[self.policy]
        return make_selection(name, ratio=self.ratio, floor=0, **options)  # a budget of the ratio only

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
class StudyRow(Checked):
    """A draft's conditional acceptance at one context, each figure a mean over the drafts that were verified.

    format: what the draft reads, one of the study's formats. tokens_per_round: tokens that rounds kept, or would keep
    if rejected drafts were dropped. by_position: of the positions that any round reached. verified: drafts that were
    verified at each position; empty if all rounds verified all drafts.
    """

    error = WorkloadError
    context: int = check.whole(1, MAX_TOKENS)
    policy: str = check.text()
    ratio: float = check.number(0, 1)
    format: str = check.text()
    rounds: int = check.whole(1, MAX_TOKENS)
    mean: float = check.number(0, 1)
    tokens_per_round: float = check.number(1, MAX_TOKENS)
    by_position: tuple[float, ...] = check.numbers(0, 1)
    verified: tuple[float, ...] = check.numbers(0, MAX_TOKENS, ())

    @classmethod
    def of(cls, draft: StudyDraft, context: int, counts: RoundCounts) -> StudyRow:
        """From the counts of a draft's rounds. Raises WorkloadError for an acceptance that is no probability.

        Where no draft was dropped, a round's tokens are those expected if drafts after a rejected one were: 1, and for
        each position the probability that all drafts up to it are accepted.
        """
        reached = [(a / v, v) for a, v in zip(counts.accepted, counts.verified, strict=True) if v]
        by_position, verified = zip(*reached, strict=True)
        weights = verified if counts.tokens else (1,) * len(by_position)
        mean = sum(a * n for a, n in zip(by_position, weights, strict=True)) / sum(weights)
        tokens_per_round = counts.tokens / counts.rounds or 1 + sum(itertools.accumulate(by_position, operator.mul))
        return cls(
            context, draft.policy, draft.ratio, draft.format, counts.rounds, clamp_share(mean), tokens_per_round,
            tuple(map(clamp_share, by_position)), verified if counts.tokens else (),
        )  # fmt: skip

    @property
    def draft(self) -> StudyDraft:
        """The draft."""
        return StudyDraft(self.policy, self.ratio, self.format)


def drafts_of(policies: Sequence[str], ratios: Sequence[float], formats: Sequence[str]) -> list[StudyDraft]:
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
    dense = [StudyDraft("all", 1.0, format_name) for format_name in formats if format_name != "bf16"]
    return dense + [StudyDraft(*each) for each in itertools.product(policies, ratios, formats)]


def plan_of(plain: Plan) -> Plan:
    """A plan for the same workload whose cache serves every draft: in full precision, with an INT4 shadow."""
    speculation = Speculation(GAMMA, DraftCodes.UPPER, make_selection("progressive"))
    return replace(plain, kv=KVCache(KVFormat.SHADOW), speculation=speculation)


def study(
    model: str,
    passage: Passage,
    drafts: Sequence[StudyDraft],
    device: str | None = None,
    on_progress: OnProgress = silent,
    known: Container[tuple[int, StudyDraft]] = (),
    verification: str = SAMPLED,
    passages: int = 1,
    head: str | None = None,
) -> Iterator[StudyRow]:
    """Acceptance of drafts of a model at each context of a passage: a safetensors folder, a GGUF file or a hub id.

    device: as for `ridgeplan.runtime.load`. known: contexts and drafts that are left out. verification: how rounds go
    on, one of `methods.VERIFICATIONS`. passages: prompts, spread over the text. head: the file of a retrieval head, for
    the policies that choose by one; by default the one that ships for the model. A warning names drafts that are left
    out because their ratio leaves the policy nothing to choose, or because no real round has them.
    Raises what `load` raises, PlanError for lengths, WorkloadError for fewer tokens than are counted or where no draft
    is left, and PromptError for a text that is too short.
    """
    forced = verification == TEACHER_FORCED
    min_tokens = MIN_TOKENS if forced else MIN_SAMPLED_TOKENS
    if passage.tokens < min_tokens:
        left_out = f"the first {ROUND}" if forced else "the first and the last round"
        allowed = f"{min_tokens} or more, as {left_out} are not counted"
        raise WorkloadError(f"tokens is {passage.tokens}; allowed: {allowed}")
    if not forced and any(draft.policy == HINDSIGHT for draft in drafts):
        warnings.warn(f"not measured: {HINDSIGHT}, which only teacher-forced rounds can know", stacklevel=2)
        drafts = [draft for draft in drafts if draft.policy != HINDSIGHT]
    shared, draft_weights = SharedWeights(model, device), None
    plans = [plan_of(plain) for plain in passage.plans(named_shape(model))]  # no length is refused after hours
    _require_choice(drafts, passage.contexts)
    for plan in plans:
        what = f"{plan.workload.context} tokens"
        context = plan.workload.context
        missing = _with_a_choice([draft for draft in drafts if (context, draft) not in known], context)
        if not missing:
            continue
        on_progress(what, 0, 1)
        with shared.engine(plan) as engine:
            bound = bound_head(engine, head)
            length = plan.workload.final_context if forced else context
            prompts = prompt_batch(engine.tokenizer, length, passages, passage.text)
            if draft_weights is None and any(draft.quantized_weights for draft in missing):
                draft_weights = draft_weights_of(engine, passage.calibration)
            measured: list[list[RoundCounts]] = []
            for ids in prompts:
                index = len(measured)
                on_round = partial(_report, partial(on_progress, what), index, passages)
                if forced:
                    measured.append(measure(engine, draft_weights, missing, ids, on_round, bound))
                else:
                    sampling = SamplingParams(temperature=float(verification == SAMPLED), seed=index)
                    parts = engine, draft_weights, missing, ids, sampling, on_round, bound
                    measured.append(measure_rounds(*parts))
            for draft, counts in zip(missing, zip(*measured, strict=True), strict=True):
                yield StudyRow.of(draft, context, RoundCounts.total(counts))


def _report(on_progress: Callable[[int, int], None], index: int, passages: int, done: int, total: int) -> None:
    """Progress of a passage, of several."""
    on_progress(index * total + done, passages * total)


def _require_choice(drafts: Sequence[StudyDraft], contexts: Sequence[int]) -> None:
    """Raises WorkloadError where no draft has tokens to choose at any context, so that nothing would be measured."""
    if not drafts:
        raise WorkloadError("there are no drafts to measure; allowed: one policy or more, or a format other than bf16")
    longest = max(contexts)
    if all(draft.starved_at(longest) for draft in drafts):
        selections = [draft.selection for draft in drafts]
        always = min(each.sinks + each.recent for each in selections if isinstance(each, SparseSelection))
        raise WorkloadError(
            f"nothing can be measured: at {longest} tokens the sinks and recent tokens fill the budget of every draft; "
            f"allowed: a ratio and a context whose product is above {always}"
        )


def _with_a_choice(drafts: Sequence[StudyDraft], context: int) -> list[StudyDraft]:
    """The drafts whose policy has tokens to choose. Warns of the others, which would all read the same tokens."""
    starved = [draft for draft in drafts if draft.starved_at(context)]
    if starved:
        names, ratios = (sorted({str(getattr(draft, name)) for draft in starved}) for name in ("policy", "ratio"))
        warnings.warn(
            f"not measured at {context} tokens: {', '.join(names)} at {', '.join(ratios)}, whose sinks and recent "
            "tokens fill the budget",
            stacklevel=3,
        )
    return [draft for draft in drafts if draft not in starved]


@torch.inference_mode()
def measure(
    engine: Engine,
    draft_weights: DecoderWeights | None,
    drafts: Sequence[StudyDraft],
    ids: Sequence[int],
    on_round: Callable[[int, int], None] = lambda done, total: None,
    head: Head | None = None,
) -> list[RoundCounts]:
    """Each draft's acceptance on the whole rounds of a text's tokens after the context of the engine's plan.

    The plan is one of `plan_of`. The first round is not counted: its sets come from prefill.
    """
    context, text = engine.plan.workload.context, torch.tensor(ids, device=engine.device)
    drafters, _ = _prefilled(engine, drafts, text[:context], head)
    starts = range(context, len(text) - ROUND + 1, ROUND)
    rounds = []
    for index, start in enumerate(starts):
        acceptance = _round(engine, draft_weights, drafters, text[None, start : start + ROUND])
        rounds += [acceptance] if index else []
        on_round(index + 1, len(starts))
    sums = torch.stack(rounds).double().sum(0)
    require_finite([bool(sums.isfinite().all())])  # NaN where any of the target's or the drafts' logits was
    return [RoundCounts(len(rounds), (len(rounds),) * GAMMA, tuple(each)) for each in sums.tolist()]


@torch.inference_mode()
def measure_rounds(
    engine: Engine,
    draft_weights: DecoderWeights | None,
    drafts: Sequence[StudyDraft],
    prompt: Sequence[int],
    sampling: SamplingParams,
    on_draft: Callable[[int, int], None] = lambda done, total: None,
    head: Head | None = None,
) -> list[RoundCounts]:
    """The rounds in which each draft's generation continues a prompt, which is processed once for all of them."""
    cache, tokens = engine.cache, engine.plan.workload.new_tokens
    assert cache is not None, "the engine is open"
    drafters, logits = _prefilled(engine, drafts, torch.tensor(prompt, device=engine.device), head)
    request = Request.build(prompt, tokens, sampling)
    seed = torch.tensor(sampling.seed, dtype=torch.int64, device=engine.device)
    scored = [each.policy for each in drafters if each.collects and isinstance(each.policy, VerificationSelector)]
    kept = [(tensor, tensor.clone()) for policy in scored for tensor in policy.state]
    results = []
    for drafter in drafters:
        cache.finish_prompt(0, len(prompt))
        for tensor, after_prefill in kept:
            tensor.copy_(after_prefill)
        weights = draft_weights if drafter.draft.quantized_weights else engine.weights
        assert weights is not None, "weights are quantized for drafts that have their own"
        parts = engine.decoder, engine.weights, weights, cache, drafter.policy, sampling, seed
        speculator = ObservedSpeculator(*parts)
        results.append(observe_rounds(speculator, request, speculator.first(logits[None])))
        on_draft(len(results), len(drafters))
    return results


@dataclass(frozen=True)
class _Drafter:
    """A draft with its policy. collects: whether verification leaves scores for it, and for those that share them."""

    draft: StudyDraft
    policy: TokenSelector
    collects: bool


def _prefilled(
    engine: Engine, drafts: Sequence[StudyDraft], prompt: Tensor, head: Head | None
) -> tuple[list[_Drafter], Tensor]:
    """Drafters that know the prompt [tokens], which is in the cache, and the logits [vocab] that follow it."""
    assert engine.cache is not None, "the engine is open"
    engine.cache.reset(1)
    drafters = list(_drafters(engine.cache, drafts, head))
    observers = [drafter.policy for drafter in drafters]
    return drafters, prefill(engine.decoder, engine.weights, engine.cache, 0, prompt, observers=observers)


def _drafters(cache: Cache, drafts: Sequence[StudyDraft], head: Head | None) -> Iterator[_Drafter]:
    """Policies over one storage. Those that rank the same scores share them: they differ in ratio or in codes."""
    reading = {codes: AttentionMetadataBuilder(cache, codes) for codes in DraftCodes}
    first: dict[object, VerificationSelector] = {}
    for draft in drafts:
        policy = token_selector(draft.selection.among_all, reading[draft.codes], head)
        collects = False
        if isinstance(policy, VerificationSelector):
            key = draft.policy == HINDSIGHT, replace(draft.selection, ratio=1.0)
            owner = first.setdefault(key, policy)
            policy.share_state(owner)
            collects = owner is policy
        policy.start()
        yield _Drafter(draft, policy, collects)


def _round(
    engine: Engine, draft_weights: DecoderWeights | None, drafters: Sequence[_Drafter], tokens: Tensor
) -> Tensor:
    """Acceptance [drafts, GAMMA] of one round's tokens [1, ROUND], which then enter the cache."""
    assert engine.cache is not None, "the engine is open"
    target = engine.weights
    for drafter in drafters:
        if drafter.collects and drafter.draft.policy == HINDSIGHT:
            _collect(engine, drafter.policy, tokens)
    drafted = [
        _drafted(engine, draft_weights if drafter.draft.quantized_weights else target, drafter.policy, tokens)
        for drafter in drafters
    ]
    for drafter in drafters:
        if drafter.collects and drafter.draft.policy != HINDSIGHT:
            _collect(engine, drafter.policy, tokens)
    p = _pass(engine, target, tokens, AttentionMetadataBuilder(engine.cache).target_metadata(ROUND))[:GAMMA]
    engine.cache.advance(torch.full_like(engine.cache.lengths[:1], ROUND))
    overlaps = torch.stack([torch.minimum(p, q).sum(-1) for q in drafted])
    return overlaps.clamp_max(1)  # sums of float32 probabilities may pass 1


def _collect(engine: Engine, policy: TokenSelector, tokens: Tensor) -> None:
    """A verification of a round's tokens for the scores that it leaves; all of its drafts count as accepted."""
    _pass(engine, engine.weights, tokens, policy.target_metadata(ROUND))
    policy.after_verification(torch.full((1,), GAMMA, device=tokens.device))


def _drafted(engine: Engine, weights: DecoderWeights | None, policy: TokenSelector, tokens: Tensor) -> Tensor:
    """The distributions [GAMMA, vocab] of a draft; sets that last a round serve all positions in one pass."""
    assert weights is not None, "weights are quantized for drafts that have their own"
    policy.before_round()
    policy.before_drafts()
    if not policy.selection.per_query:
        return _pass(engine, weights, tokens[:, :GAMMA], policy.draft_metadata(0, GAMMA))
    steps = []
    for ahead in range(GAMMA):
        token = tokens[:, ahead : ahead + 1]
        policy.before_pass(token, ahead)
        steps.append(_pass(engine, weights, token, policy.draft_metadata(ahead)))
    return torch.cat(steps)


def _pass(engine: Engine, weights: DecoderWeights, tokens: Tensor, metadata: AttentionMetadata) -> Tensor:
    assert engine.cache is not None, "the engine is open"
    return engine.decoder.step(weights, engine.cache, tokens, metadata)[0].float().softmax(-1)


# All rows of a file share these, beside the device.
CONDITIONS = ("model", "text", "tokens", "calibration", "verification", "passages", "head")


@dataclass(frozen=True)
class SavedStudy(ResultFile):
    """The conditions that all rows share, and the rows. calibration: the text of 4-bit weights; "" for the model's own.

    verification: how rounds went on, by default as in files that do not say it. passages: prompts, of `tokens` each.
    head: the file of the retrieval head that chose; "" for none, and for the one that ships.
    device, date and software are those of the run that wrote the file last.
    """

    error = WorkloadError
    title, advice = "study", "make it again with `ridgeplan study drafts`"
    model: str = check.text()
    tokens: int = check.whole(MIN_TOKENS, MAX_TOKENS_MEASURED)
    calibration: str = check.text("")
    verification: str = check.one_of(methods.VERIFICATIONS, default=TEACHER_FORCED)
    passages: int = check.whole(1, MAX_PASSAGES, 1)
    head: str = check.text("")
    rows: tuple[StudyRow, ...] = check.parts(StudyRow, ())
    device: str = check.text("")
    date: str = check.text("")
    software: Mapping[str, str] = check.texts_by_name(dict)
    text: str = check.text("")

    @property
    def known(self) -> frozenset[tuple[int, StudyDraft]]:
        """Contexts and drafts that have a row."""
        return frozenset((row.context, row.draft) for row in self.rows)

    @property
    def document(self) -> dict[str, Any]:
        """Plain JSON values, without where they come from."""
        conditions = {name: getattr(self, name) for name in CONDITIONS}
        return {"schema": SCHEMA, **conditions, "rows": [vars(row) for row in self.rows]}

    def with_row(self, row: StudyRow) -> SavedStudy:
        """With one more row."""
        return replace(self, rows=(*self.rows, row))

    def resumed(self, path: Path) -> SavedStudy:
        """With the rows of a file, which its own replace.

        Raises WorkloadError for a damaged one, and for one of other conditions.
        """
        saved = SavedStudy.read(path)
        for name in (*CONDITIONS, "device"):
            there, here = getattr(saved, name), getattr(self, name)
            if there != here:
                raise WorkloadError(f"cannot resume {str(path)!r}: its {name} is {there!r}; allowed: {here!r}")
        rows = {(row.context, row.draft): row for row in (*saved.rows, *self.rows)}
        return replace(self, rows=tuple(rows.values()))


def acceptance_rows(study: SavedStudy, shape: ModelShape, checkpoint: str) -> list[AcceptanceRow]:
    """Rows for `recommend` from a study on this machine, of the drafts that plans can have.

    A row for each draft, or for each position that enough drafts reached, where rejected ones were dropped. shape: of
    the model. checkpoint: as `AcceptanceRow` has it. Raises WorkloadError for greedy rounds: rows are of temperature 1.
    """
    if study.verification == GREEDY:
        raise WorkloadError(f"verification is {GREEDY}; allowed for rows of acceptance: {SAMPLED}, {TEACHER_FORCED}")
    shape, device_type = replace(shape, name=study.model), "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[AcceptanceRow] = []
    for row in study.rows:
        if not row.draft.row_name:
            continue
        fields: dict[str, Any] = {
            "calibrated": bool(study.calibration), "yarn": yarn_factor(shape, row.context + study.tokens),
            "draft": row.draft.row_name, "ratio": row.ratio, "gamma": GAMMA, "checkpoint": checkpoint,
        }  # fmt: skip
        measured_on = device_type, shape, study.text, row.context
        if row.verified:
            rows += rows_by_position(*measured_on, study.device, row.verified, row.by_position, **fields)
        else:
            where = f"teacher-forced over {study.tokens} tokens of {study.text}, {study.device}"
            rows.append(measured_row(*measured_on, where, acceptance=row.mean, tokens=study.tokens, **fields))
    return rows
