"""Generations of real models on real texts: time per token at measured acceptance, acceptance, and peak memory.

The texts are two: predictions at the acceptance measured on one are compared with the times measured on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.plan.support import as_loaded
from ridgeplan.runtime import Engine, SamplingParams
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.model.source import model_source
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.validate.comparison import Comparison, compare_measured, tpot_ms_at
from ridgeplan.validate.decode_bench.inflated_model import InflatedModel
from ridgeplan.validate.decode_bench.report import DecodeCase
from ridgeplan.validate.engines import SharedWeights
from ridgeplan.validate.machine import free_library_workspaces
from ridgeplan.validate.measure import Measured, measure
from ridgeplan.validate.prompts import first_tokens, prompt_batch, sample_text
from ridgeplan.validate.suite.report import AT_ANOTHER, AT_MEASURED, PEAK, SuiteRow
from ridgeplan.validate.suite.sections import case_text, plan_row

ACCEPTANCE, BY_DRIVER = "acceptance", "memory in use, by the driver"
CALIBRATION_TOKENS = 8192  # of 4-bit weights
SAMPLING = SamplingParams(temperature=1.0)
METHOD = (
    "Real models with a prefill, each plan alone on the device, at temperature 1; the median segment of a generation. "
    "The large shape computes a small model's function (inflation). Prompts are spread over the text; acceptance is "
    "also measured on another text, to a part of which 4-bit draft weights are fitted. Peak memory is what torch "
    "allocated. The driver's figure also has what a captured round keeps, and what was in use before the engine was "
    "loaded, the driver's context included, which is not predicted but measured."
)


@dataclass(frozen=True)
class Texts:
    """The text that times are measured on, another one for acceptance alone, and one to fit 4-bit drafts to."""

    main: str
    other: str
    fitted: str

    @classmethod
    def of(cls, main: str | None, other: str | None) -> Texts:
        """By default halves of the sample text; drafts are fitted to the last quarter of the other text."""
        sample = sample_text()
        if other is None:
            other = sample[len(sample) // 2 :] if main is None else sample
        main = sample[: len(sample) // 2] if main is None else main
        cut = 3 * len(other) // 4
        return cls(main, other[:cut], other[cut:])


@dataclass(frozen=True, eq=False)
class Generator:
    """A model to run plans on. engine: a context manager that closes the plan's engine. function: see `predict_all`."""

    shape: ModelShape
    function: ModelShape
    tokenizer: Any
    engine: Callable[[Plan], AbstractContextManager[Engine]]


def small_model(source: str, texts: Texts) -> Generator:
    """A user's model, costed as the runtime loads it. Raises ModelError and what `load_shape` raises."""
    tokenizer = load_tokenizer(model_source(source))
    shared = SharedWeights(source, calibration=_calibration(tokenizer, texts))
    shape = as_loaded(load_shape(source))
    return Generator(shape, shape, tokenizer, shared.engine)


def inflated_model(source: str, shape: str, texts: Texts) -> Generator:
    """A user's model inside a large shape, on a GPU. Raises ModelError and InflationError."""
    model, drafts = InflatedModel.load(source, load_shape(shape)), dict[int, DecoderWeights]()
    calibration = _calibration(model.tokenizer, texts)
    engine = partial(model.shared_engine, drafts=drafts, calibration=calibration)
    return Generator(model.shape, model.function, model.tokenizer, engine)


def _calibration(tokenizer: Any, texts: Texts) -> list[int] | None:
    """Tokens to fit drafts to; None on a CPU, where a whole Hessian takes minutes."""
    return first_tokens(tokenizer, CALIBRATION_TOKENS, texts.fitted) if torch.cuda.is_available() else None


def generation_rows(
    model: Generator, case: DecodeCase, profile: Profile, new_tokens: int, texts: Texts
) -> tuple[list[SuiteRow], str | None]:
    """The rows of one plan, or none and the reason. Raises PromptError for a text that is too short."""
    plan = case.plan(model.shape, profile, new_tokens)
    prompts = [prompt_batch(model.tokenizer, case.context, case.batch, text) for text in (texts.main, texts.other)]
    with model.engine(plan) as engine:
        measured = measure(engine, prompts[0], new_tokens, SAMPLING)
        drafting = plan.speculation.active
        elsewhere = measure(engine, prompts[1], new_tokens, SAMPLING).statistics.acceptance if drafting else None
    free_library_workspaces(engine.device)
    compared = compare_measured(plan, model.shape, profile, measured, function=model.function)
    if compared.busy:
        return [], f"{model.shape.name}, {case_text(plan)}: machine busy, spread {compared.spread:.0%}"
    return list(rows_of(plan, model.shape, profile, measured, elsewhere, model.function)), None


def rows_of(
    plan: Plan,
    shape: ModelShape,
    profile: Profile,
    measured: Measured,
    elsewhere: float | None,
    function: ModelShape | None = None,
) -> Iterator[SuiteRow]:
    """The rows of one measurement. elsewhere: acceptance measured on another text, None without drafts."""
    compared = compare_measured(plan, shape, profile, measured, function=function)
    ran = replace(plan, workload=measured.workload(plan.workload))  # with the lengths that were run
    if elsewhere is None:
        yield _row(ran, compared, "tpot", AT_MEASURED)
    else:
        yield _row(ran, compared, "tpot at the measured acceptance", AT_MEASURED)
        predicted_ms = tpot_ms_at(ran, shape, profile, elsewhere)
        yield plan_row("generations", ran, AT_ANOTHER, "ms", predicted_ms, measured.tpot_ms, compared.source)
        if measured.statistics.acceptance:
            yield _row(ran, compared, "acceptance", ACCEPTANCE)
    memory = compared.row("peak memory")
    if memory.measured:
        yield _row(ran, compared, "peak memory", PEAK)
    if measured.driver_bytes is not None:
        reserved = predicted_memory(ran, shape, Machine.of(profile)).reserved_peak
        predicted = float(reserved) + (measured.statistics.outside_bytes or 0)
        yield plan_row("generations", ran, BY_DRIVER, "bytes", predicted, float(measured.driver_bytes), compared.source)


def _row(plan: Plan, compared: Comparison, name: str, kind: str) -> SuiteRow:
    row = compared.row(name)
    assert row.measured is not None, f"{name} was not measured"
    return plan_row("generations", plan, kind, row.unit, row.predicted, row.measured, compared.source)
