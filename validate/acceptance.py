"""Rows of acceptance measured on a text: one model, all contexts and drafts. `ridgeplan acceptance` writes them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ridgeplan.planner.acceptance import AcceptanceRow
from ridgeplan.planner.plan import Plan, PlanError, Workload, require
from ridgeplan.planner.policies.selection.all import autoregressive
from ridgeplan.planner.resolution import yarn_factor
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.model.source import model_source
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.quantization.calibrate import quantized_draft
from ridgeplan.runtime.quantization.calibration_text import CalibrationText
from ridgeplan.validate.machine import cpu_model
from ridgeplan.validate.progress import Progress, silent
from ridgeplan.validate.prompts import prompt_tokens
from ridgeplan.validate.teacher_forced import ROUND, Draft, TeacherForced, TextAcceptance

MAX_TOKENS_MEASURED = 1 << 16
WEIGHT_GROUP = 128


@dataclass(frozen=True)
class Passage:
    """The text that is measured on: its name, and how many tokens after each context.

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
                    "allowed: less, or YaRN"
                )
            yield autoregressive(Workload(shape.name, "this machine", context, self.tokens, 1, factor))


@dataclass(frozen=True)
class MeasuredAcceptance:
    """A row, and acceptance by position in a round."""

    row: AcceptanceRow
    by_position: tuple[float, ...]


def measure_acceptance(
    model: str, passage: Passage, drafts: Sequence[Draft], device: str | None = None, on_progress: Progress = silent
) -> Iterator[MeasuredAcceptance]:
    """A row for each context and draft of a model: a safetensors folder, a GGUF file or a hub id.

    The model is loaded once, and its 4-bit weights are made once. device: as for `ridgeplan.runtime.load`.
    Raises what `load` raises, PlanError for lengths, and PromptError for a text that is too short.
    """
    shape = named_shape(model)
    plans = list(passage.plans(shape))
    rounds = passage.tokens // ROUND
    weights = draft_weights = None
    for number, plan in enumerate(plans):
        counted = _Counted(on_progress, f"{plan.workload.context} tokens", number * rounds, rounds * len(plans))
        engine = load(plan, model, device=device, weights=weights)
        weights = engine.weights
        ids = prompt_tokens(engine.tokenizer, plan.workload.final_context, passage.text)
        draft_weights = draft_weights or draft_weights_of(engine, drafts, passage.calibration)
        measured = TeacherForced(engine, draft_weights, drafts).run(ids, plan.workload.context, counted.one_more)
        engine.close()
        for one in measured:
            yield MeasuredAcceptance(_row(one, engine, shape, passage, checkpoint_of(model)), one.by_position)


class HasWeights(Protocol):
    """A draft that may have 4-bit weights of its own."""

    @property
    def quantized_weights(self) -> bool:
        """Whether it has."""


class _Counted:
    """Progress of one context's rounds among those of all contexts."""

    def __init__(self, on_progress: Progress, what: str, done: int, total: int) -> None:
        self._report = lambda count: on_progress(what, count, total)
        self._done = done
        self._report(done)

    def one_more(self) -> None:
        self._done += 1
        self._report(self._done)


def named_shape(model: str) -> ModelShape:
    """The shape by the name that `recommend` knows the model by. Raises what `load_shape` and `model_source` raise."""
    try:
        return load_shape(model)
    except ValueError:
        return load_shape(model_source(model))


def device_name(engine: Engine) -> str:
    """What the engine runs on, as rows say it."""
    return torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else cpu_model()


def checkpoint_of(model: str) -> str:
    """What a model's weights are, where that is not its published checkpoint."""
    return "GGUF, decoded" if model.lower().endswith(".gguf") else ""


def quantizer_of(device_type: str, calibrated: bool) -> str:
    """How 4-bit weights are made on a device, "cuda" or "cpu". calibrated: for a given text."""
    return "gptq" if device_type == "cuda" or calibrated else "diagonal"


def draft_weights_of(
    engine: Engine, drafts: Iterable[HasWeights], calibration: Sequence[int] | None
) -> DecoderWeights | None:
    """4-bit weights made of an engine's, fitted to a text or to the model's own; None if no draft has any."""
    if not any(draft.quantized_weights for draft in drafts):
        return None
    decoder, weights = engine.decoder, engine.weights
    text = (
        CalibrationText.of_model(decoder, weights)
        if calibration is None
        else CalibrationText.given(calibration, decoder.config.shape.vocab)
    )
    return quantized_draft(decoder, weights, WEIGHT_GROUP, text)


def _row(
    measured: TextAcceptance, engine: Engine, shape: ModelShape, passage: Passage, checkpoint: str
) -> AcceptanceRow:
    dtype = str(engine.weights.embedding.dtype).removeprefix("torch.")
    factor = engine.plan.workload.yarn_factor
    return AcceptanceRow(
        draft=measured.draft.kind,
        model=shape.name,
        parameters=shape.parameters / 1e9,
        context=engine.plan.workload.context,
        acceptance=min(1.0, max(1e-6, measured.mean)),  # sums of float32 probabilities may pass 1
        source="measured",
        where=f"teacher-forced over {passage.tokens} tokens of {passage.name}, {device_name(engine)}"
        + (f", YaRN x{factor:g}" if factor > 1 else ""),
        ratio=measured.draft.ratio,
        gamma=ROUND,
        quantizer=quantizer_of(engine.device.type, bool(passage.calibration)),
        dtype=dtype,
        checkpoint=checkpoint,
        tokens=passage.tokens,
        date=datetime.date.today().isoformat(),
        text=passage.name,
    )
