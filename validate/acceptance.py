"""Acceptance of drafts on a text: teacher-forced passes, and the rows that `ridgeplan acceptance` writes.

The text goes through the model in rounds of a few tokens. Each round is one of speculative decoding, and its drafts are
the text's own next tokens. A draft's pass reads what that draft would read, and later tokens of the round read the KV
that it writes. The target's pass then replaces that KV. A token's acceptance at temperature 1 is sum(min(p, q)) of the
two distributions, given that the earlier tokens were accepted (Leviathan et al. 2023, section 3.3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeplan.planner.acceptance import AcceptanceRow
from ridgeplan.planner.acceptance.rows import MIN_ACCEPTANCE
from ridgeplan.planner.resolution import yarn_factor
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import (
    DraftCodes,
    KVCache,
    KVFormat,
    Plan,
    PlanError,
    Speculation,
    Weights,
    Workload,
    require,
)
from ridgeplan.roofline.plan.policies.dense import autoregressive
from ridgeplan.roofline.plan.policies.selections import StreamingLLM
from ridgeplan.roofline.plan.policy import MIN_RATIO, AllTokens
from ridgeplan.roofline.plan.support import as_loaded, missing_execution
from ridgeplan.runtime import WorkloadError
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.prefill import Destination, prefill_all
from ridgeplan.runtime.model.source import model_source
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.runtime.quantization.calibration import CalibrationText, quantized_draft
from ridgeplan.runtime.sampling import require_finite
from ridgeplan.validate.engines import SharedWeights
from ridgeplan.validate.machine import device_name, today
from ridgeplan.validate.measure import clamp_share
from ridgeplan.validate.prompts import prompt_tokens

ROUND = 8  # drafts; plans with gamma 8 see their mean
SINKS = 4  # first tokens that StreamingLLM keeps (Xiao et al. 2023, section 3.2)
NUMERIC = ("kv8", "kv4", "w4", "w4kv4")
WINDOWED = "streamingllm"
ALLOWED = f"{', '.join(NUMERIC)} or {WINDOWED}:RATIO with a ratio above 0 and below 1"


@dataclass(frozen=True)
class Draft:
    """A draft: its kind, as rows of acceptance name it, and the share of the tokens that it reads."""

    kind: str
    ratio: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Draft:
        """`w4kv4` or `streamingllm:0.07`. Raises WorkloadError for other texts."""
        windowed = re.fullmatch(rf"{WINDOWED}:(0?\.\d+)", text, re.ASCII)
        if text in NUMERIC:
            return cls(text)
        if windowed and float(windowed[1]) >= MIN_RATIO:
            return cls(WINDOWED, float(windowed[1]))
        raise WorkloadError(f"draft is {text!r}; allowed: {ALLOWED}")

    @property
    def quantized_weights(self) -> bool:
        """Whether its weights are a 4-bit copy of the target's."""
        return self.kind.startswith("w4")

    @property
    def reads_codes(self) -> bool:
        """Whether the target that verifies it stores the cache as codes."""
        return self.kind in ("kv4", "w4kv4")

    @property
    def name(self) -> str:
        """The text that `parse` reads."""
        return self.kind if self.ratio == 1 else f"{self.kind}:{self.ratio:g}"

    def plan(self, workload: Workload) -> Plan:
        """The plan whose drafts it stands for; of kv8, whose target."""
        selection = StreamingLLM(ratio=self.ratio) if self.kind == WINDOWED else AllTokens()
        formats = {"kv8": KVFormat.INT8} | dict.fromkeys(("kv4", "w4kv4"), KVFormat.HIERARCHICAL)
        codes = DraftCodes.UPPER if self.reads_codes else DraftCodes.FULL
        return Plan(
            workload,
            weights=Weights(draft_bits=4 if self.quantized_weights else 16),
            kv=KVCache(formats.get(self.kind, KVFormat.FULL)),
            speculation=Speculation(ROUND, codes, selection),
        )


@dataclass(frozen=True)
class TextAcceptance:
    """A draft's conditional acceptance by position in a round, as means over all rounds."""

    draft: Draft
    by_position: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over all positions."""
        return sum(self.by_position) / len(self.by_position)


class _Caches:
    """An engine's full-precision cache, and a cache of codes with the same tokens."""

    def __init__(self, engine: Engine, plain: Cache, coded: bool) -> None:
        self.plain = plain
        self._engine = engine
        config = replace(plain.config, format=KVFormat.HIERARCHICAL, gamma=ROUND, draft_codes=DraftCodes.UPPER)
        self.coded = self._allocated(config) if coded else None

    def _allocated(self, config: KVCacheConfig) -> Cache:
        engine = self._engine
        return Cache(engine.config.shape, config, engine.device, engine.weights.embedding.dtype)

    @property
    def both(self) -> tuple[Cache, ...]:
        return (self.plain,) if self.coded is None else (self.plain, self.coded)

    def fill(self, prompt: Tensor) -> None:
        """Prefills both caches at once."""
        for cache in self.both:
            cache.reset(1)
        prefill_all(self._engine.decoder, self._engine.weights, [Destination(cache, 0) for cache in self.both], prompt)

    def streaming(self, ratio: float) -> Cache:
        """A cache of the sinks and the latest tokens, `ratio` of all; layers that hold a window keep it."""
        plain, length = self.plain, int(self.plain.lengths[0])
        kept = min(length, max(SINKS + 1, round(ratio * length)))
        cache = self._allocated(replace(plain.config, context=kept))
        cache.finish_prompt(0, kept)
        cache.evicted[0] = length - kept
        for store in cache.window_layers:
            cache.fewer[store] = plain.fewer[store] - cache.evicted
        for layer in range(cache.layers):
            for ours, held in zip(cache.full(layer), plain.full(layer), strict=True):
                if plain.config.window(layer):
                    ours.copy_(held)
                    continue
                ours[:, :, :SINKS] = held[:, :, :SINKS]
                ours[:, :, SINKS:kept] = held[:, :, length - kept + SINKS : length]
        return cache


@dataclass(frozen=True, eq=False)
class TeacherForced:
    """Teacher-forced passes of an engine's model over a text. draft_weights: those of drafts with 4-bit weights.

    The engine's plan has rounds of ROUND drafts that read what the target reads, of a bf16 cache that holds the text.
    """

    engine: Engine
    draft_weights: DecoderWeights | None
    drafts: Sequence[Draft]

    @torch.inference_mode()
    def run(self, ids: Sequence[int], context: int, on_round: Callable[[int], None]) -> list[TextAcceptance]:
        """Acceptance on the whole rounds of the tokens after the first `context`. Raises ModelError for NaN logits."""
        assert self.engine.cache is not None, "the engine is open"
        text = torch.tensor(ids, device=self.engine.device)
        coded = any(draft.reads_codes or draft.kind == "kv8" for draft in self.drafts)
        caches = _Caches(self.engine, self.engine.cache, coded)
        caches.fill(text[:context])
        rounds = []
        for start in range(context, len(text) - ROUND + 1, ROUND):
            rounds.append(self._round(caches, text[None, start : start + ROUND]))
            on_round(len(rounds))
        means = torch.stack(rounds).double().mean(0)
        require_finite([bool(means.isfinite().all())])  # NaN where any of the target's or the drafts' logits was
        return [TextAcceptance(draft, tuple(each)) for draft, each in zip(self.drafts, means.tolist(), strict=True)]

    def _round(self, caches: _Caches, tokens: Tensor) -> Tensor:
        """Acceptance [drafts, ROUND] of one round's tokens [1, ROUND], which then enter the caches."""
        drafted = [self._drafted(draft, caches, tokens) for draft in self.drafts]
        plain, *coded = (
            self._pass(cache, tokens, AttentionMetadataBuilder(cache).target_metadata(ROUND)) for cache in caches.both
        )
        for cache in caches.both:
            cache.advance(torch.full_like(cache.lengths, ROUND))
        pairs = [
            (coded[0] if draft.reads_codes else plain, coded[0] if q is None else q)
            for draft, q in zip(self.drafts, drafted, strict=True)
        ]
        return torch.stack([torch.minimum(p, q).sum(-1) for p, q in pairs])

    def _drafted(self, draft: Draft, caches: _Caches, tokens: Tensor) -> Tensor | None:
        """The distributions [ROUND, vocab] of a draft; None for INT8, which is the target of the cache of codes."""
        if draft.kind == "kv8":
            return None
        weights = self.draft_weights if draft.quantized_weights else None
        if draft.kind == WINDOWED:
            cache = caches.streaming(draft.ratio)
            return self._pass(cache, tokens, AttentionMetadataBuilder(cache).target_metadata(ROUND))
        cache = caches.coded if draft.reads_codes and caches.coded is not None else caches.plain
        return self._pass(cache, tokens, AttentionMetadataBuilder(cache).draft_metadata(0, ROUND), weights)

    def _pass(
        self, cache: Cache, tokens: Tensor, metadata: AttentionMetadata, weights: DecoderWeights | None = None
    ) -> Tensor:
        logits = self.engine.decoder.step(weights or self.engine.weights, cache, tokens, metadata)[0]
        return logits.float().softmax(-1)


MAX_TOKENS_MEASURED = 1 << 16
WEIGHT_GROUP = 128


@dataclass(frozen=True)
class Passage:
    """A text to measure on, its name, and the number of tokens that are measured after each context.

    calibration: token ids that 4-bit weights are fitted to. yarn: stretch positions beyond the model's limit.
    """

    text: str
    name: str
    contexts: tuple[int, ...]
    tokens: int
    calibration: Sequence[int] | None = None
    yarn: bool = False

    def plans(self, shape: ModelShape) -> Iterator[Plan]:
        """Plain decoding at each context. Raises PlanError for lengths that are not allowed."""
        allowed = range(ROUND, MAX_TOKENS_MEASURED + 1, ROUND)
        require(
            self.tokens in allowed,
            f"tokens is {self.tokens}; allowed: a multiple of {ROUND} from {ROUND} to {MAX_TOKENS_MEASURED}",
        )
        for context in self.contexts:
            workload = Workload(shape.name, "this machine", context, self.tokens)
            factor = yarn_factor(shape, workload.final_context)
            if factor > 1 and not self.yarn:
                raise PlanError(
                    f"{context} + {self.tokens} tokens are beyond the model's limit of {shape.max_context}; "
                    "allowed: less, or more with --yarn"
                )
            yield autoregressive(Workload(shape.name, "this machine", context, self.tokens, 1, factor))


@dataclass(frozen=True)
class MeasuredAcceptance:
    """A row, and acceptance by position in a round."""

    row: AcceptanceRow
    by_position: tuple[float, ...]


def measure_acceptance(
    model: str, passage: Passage, drafts: Sequence[Draft], device: str | None = None, on_progress: OnProgress = silent
) -> Iterator[MeasuredAcceptance]:
    """A row for each context and draft of a model: a safetensors folder, a GGUF file or a hub id.

    The model is loaded once, and its 4-bit weights are made once. device: as for `ridgeplan.runtime.load`.
    Raises what `load` raises, PlanError for lengths, WorkloadError for drafts that no plan of the model has, and
    PromptError for a text that is too short.
    """
    shape = named_shape(model)
    plans = [replace(plan, speculation=Speculation(ROUND)) for plan in passage.plans(shape)]
    for plan in plans:
        _require_executable(drafts, shape, plan.workload)
    rounds = passage.tokens // ROUND
    shared, draft_weights = SharedWeights(model, device), None
    for number, plan in enumerate(plans):
        report = partial(_report, on_progress, f"{plan.workload.context} tokens", number * rounds, rounds * len(plans))
        report(0)
        with shared.engine(plan) as engine:
            ids = prompt_tokens(engine.tokenizer, plan.workload.final_context, passage.text)
            if draft_weights is None and any(draft.quantized_weights for draft in drafts):
                draft_weights = draft_weights_of(engine, passage.calibration)
            measured = TeacherForced(engine, draft_weights, drafts).run(ids, plan.workload.context, report)
        where = f"teacher-forced over {passage.tokens} tokens of {passage.name}, {device_name(engine.device)}"
        for result in measured:
            row = measured_row(
                engine.device.type, shape, passage.name, plan.workload.context, where,
                calibrated=bool(passage.calibration), yarn=plan.workload.yarn_factor, draft=result.draft.kind,
                acceptance=result.mean, ratio=result.draft.ratio, gamma=ROUND, checkpoint=checkpoint_of(model),
                tokens=passage.tokens,
            )  # fmt: skip
            yield MeasuredAcceptance(row, result.by_position)


def _require_executable(drafts: Sequence[Draft], shape: ModelShape, workload: Workload) -> None:
    """Raises WorkloadError for drafts whose acceptance no plan of the model could use."""
    if shape.states:
        raise WorkloadError(
            "the model has recurrent states, of whose drafts no acceptance is measured by position; allowed: "
            "`ridgeplan tune`, which measures generations"
        )
    missing = {draft.name: missing_execution(draft.plan(workload), as_loaded(shape)) for draft in drafts}
    allowed = ",".join(name for name, reasons in missing.items() if not reasons) or "drafts of another model"
    for name, reasons in missing.items():
        if reasons:
            raise WorkloadError(
                f"drafts {name} of {shape.name}: the runtime cannot execute {', '.join(reasons)}; allowed: {allowed}"
            )


def _report(on_progress: OnProgress, what: str, before: int, total: int, done: int) -> None:
    """Progress after `done` rounds of a context; `before` are those of earlier contexts."""
    on_progress(what, before + done, total)


def named_shape(model: str) -> ModelShape:
    """The shape, named as `recommend` names the model. Raises what `load_shape` and `model_source` raise."""
    try:
        return load_shape(model)
    except ValueError:
        return load_shape(model_source(model))


def checkpoint_of(model: str) -> str:
    """The kind of a model's weights: "" for its published checkpoint."""
    return "GGUF, decoded" if model.lower().endswith(".gguf") else ""


def draft_weights_of(engine: Engine, calibration: Sequence[int] | None) -> DecoderWeights:
    """4-bit weights made of an engine's, fitted to a text or to one that the model generates."""
    decoder, weights = engine.decoder, engine.weights
    text = (
        CalibrationText.of_model(decoder, weights)
        if calibration is None
        else CalibrationText.from_tokens(calibration, decoder.config.shape.vocab)
    )
    return quantized_draft(decoder, weights, WEIGHT_GROUP, text)


MIN_DRAFTS = 32  # of a position, for a row of its own


def rows_by_position(
    device_type: str,
    shape: ModelShape,
    text: str,
    context: int,
    device: str,
    verified: Sequence[float],
    acceptance: Sequence[float],
    **fields: Any,
) -> Iterator[AcceptanceRow]:
    """A row for every position in a round at which enough drafts were verified.

    device: its name. verified, acceptance: of each position. fields: as for `measured_row`.
    """
    for position, (drafts, share) in enumerate(zip(verified, acceptance, strict=True), start=1):
        if drafts >= MIN_DRAFTS:
            where = f"{drafts:g} drafts at position {position} after {text}, {device}"
            yield measured_row(
                device_type, shape, text, context, where, acceptance=share, position=position, tokens=int(drafts),
                **fields,
            )  # fmt: skip


def measured_row(
    device_type: str,
    shape: ModelShape,
    text: str,
    context: int,
    where: str,
    *,
    acceptance: float,
    calibrated: bool,
    yarn: float = 1.0,
    **fields: Any,
) -> AcceptanceRow:
    """A row of acceptance that was measured on a device of type `device_type`, "cuda" or "cpu".

    where: what was measured, and on which device. acceptance: as measured. yarn: YaRN's factor. fields: the row's other
    fields. Raises PlanError for an acceptance that is no probability.
    """
    return AcceptanceRow(
        model=shape.name,
        parameters=shape.parameters / 1e9,
        context=context,
        acceptance=clamp_share(acceptance, MIN_ACCEPTANCE),
        source="measured",
        where=f"{where}, YaRN x{yarn:g}" if yarn > 1 else where,
        quantizer="gptq" if device_type == "cuda" or calibrated else "diagonal",
        dtype="bfloat16" if device_type == "cuda" else "float32",  # what `load` chooses
        yarn=yarn,
        date=today(),
        text=text,
        **fields,
    )  # fmt: skip
