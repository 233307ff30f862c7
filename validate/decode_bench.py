"""Decoding end to end on a model of a large shape with real acceptance: several plans, each beside its prediction."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ridgeplan.planner.inputs import workload_for
from ridgeplan.planner.plan import Plan
from ridgeplan.planner.presets import preset
from ridgeplan.roofline.profile import Profile
from ridgeplan.validate.comparison import Comparison
from ridgeplan.validate.measure import Measured, comparison, measure
from ridgeplan.validate.peers import vllm_tpot_ms
from ridgeplan.validate.prompts import prompt_batch

if TYPE_CHECKING:
    from ridgeplan.runtime.weights import DecoderWeights
    from ridgeplan.validate.inflated import InflatedModel

PLAIN = "autoregressive"
# Plain decoding, a quantized target, and QuantSpec with each of its parts alone (QuantSpec, Fig 4).
ABLATION = ("int8", "quantspec-kv", "quantspec-weights", "quantspec")
ReportProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DecodeCase:
    """One plan at one workload; gamma None is the preset's own."""

    preset: str
    context: int
    batch: int
    gamma: int | None = None

    def plan(self, model: InflatedModel, profile: Profile, new_tokens: int) -> Plan:
        """The plan, with positions stretched where the small model needs it. Raises PlanError."""
        workload = workload_for(model.shape, profile, self.context, new_tokens, self.batch, yarn=True)
        plan = preset(self.preset, workload)
        if self.gamma is None or not plan.speculation.active:
            return plan
        return replace(plan, speculation=replace(plan.speculation, gamma=self.gamma))


@dataclass(frozen=True)
class DecodeRow:
    """One case: what the engine measured, beside the prediction for exactly that."""

    case: DecodeCase
    gamma: int
    measured: Measured
    comparison: Comparison
    vllm_tpot_ms: float | None  # vLLM's plain decoding of this shape, context and batch on this device, if known

    @property
    def over_vllm(self) -> float | None:
        """Speed-up in time per output token over vLLM's plain decoding; None where either is not known."""
        tpot_ms = self.measured.statistics.tpot_ms
        return None if self.vllm_tpot_ms is None or not tpot_ms else self.vllm_tpot_ms / tpot_ms

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        statistics = self.measured.statistics
        derived = ("tpot_ms", "ttft_ms", "tokens_per_round", "acceptance", "acceptance_at", "accepted_share")
        figures = {**asdict(statistics), **{name: getattr(statistics, name) for name in derived}}
        del figures["prompt_tokens"]
        return {
            **asdict(self.case),
            "gamma": self.gamma,
            "measured": figures,
            "comparison": self.comparison.to_dict()["rows"],
            "vllm_tpot_ms": self.vllm_tpot_ms,
            "over_vllm": self.over_vllm,
        }


@dataclass(frozen=True)
class DecodeReport:
    """All cases on one device."""

    device: str
    model: str
    shape: str
    software: dict[str, str]
    date: str
    temperature: float
    calibration_tokens: int  # of a text that 4-bit draft weights were fitted to; 0: of none
    rows: tuple[DecodeRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        return {**head, "rows": [row.to_dict() for row in self.rows]}


def suite_cases(workloads: Sequence[tuple[int, int]], gammas: Sequence[int]) -> list[DecodeCase]:
    """Every plan of the ablation at every (context, batch), those that speculate with every gamma."""
    cases = []
    for context, batch in workloads:
        cases.append(DecodeCase(PLAIN, context, batch))
        for name in ABLATION:
            tried: Sequence[int | None] = gammas if name.startswith("quantspec") else (None,)
            cases += [DecodeCase(name, context, batch, gamma) for gamma in tried]
    return cases


def bench_decode(
    model: InflatedModel,
    cases: Sequence[DecodeCase],
    profile: Profile,
    new_tokens: int,
    *,
    text: str | None = None,
    temperature: float = 0.0,
    calibration: Sequence[int] = (),
    on_progress: ReportProgress | None = None,
) -> DecodeReport:
    """Runs `cases`; those of one context and batch run on the same prompts, and are compared with the first of them.

    calibration: tokens of a text that 4-bit draft weights are fitted to, as in `ridgeplan.runtime.load`.
    Raises PlanError, UnsupportedPlan or PromptError before anything runs, and WorkloadError for a case that does not
    fit into memory.
    """
    from ridgeplan.runtime.loading import require_executable

    plans = {case: case.plan(model, profile, new_tokens) for case in cases}
    for plan in plans.values():
        require_executable(plan)
    sizes = dict.fromkeys((case.context, case.batch) for case in cases)
    prompts = {size: prompt_batch(model.tokenizer, *size, text) for size in sizes}
    rows: list[DecodeRow] = []
    for (context, batch), same in groupby(cases, lambda case: (case.context, case.batch)):
        planned = [(case, plans[case]) for case in same]
        for row in _rows(model, planned, profile, prompts[context, batch], temperature, calibration):
            rows.append(row)
            if on_progress is not None:
                on_progress(f"{row.case.preset}, context {context}, batch {batch}", len(rows), len(cases))
    return DecodeReport(
        device=_device_name(model),
        model=model.hub.model_type,
        shape=model.shape.name,
        software={name: metadata.version(name) for name in ("torch", "ridgeplan")},
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        temperature=temperature,
        calibration_tokens=len(calibration),
        rows=tuple(rows),
    )


def _rows(
    model: InflatedModel,
    planned: list[tuple[DecodeCase, Plan]],
    profile: Profile,
    prompts: list[list[int]],
    temperature: float,
    calibration: Sequence[int],
) -> Iterator[DecodeRow]:
    plain: Measured | None = None
    drafts: dict[int, DecoderWeights] = {}  # by group; quantizing a large shape takes most of a minute
    for case, plan in planned:
        if not plan.weights.draft_differs:
            drafts.clear()  # what a plan does not need is not in its peak
        elif calibration and plan.weights.group not in drafts:
            drafts[plan.weights.group] = model.draft_weights(plan, calibration)
        measured = _measured(model, plan, drafts, prompts, temperature)
        plain = plain or measured
        found = comparison(plan, model.shape, profile, measured, plain.statistics)
        vllm = vllm_tpot_ms(_device_name(model), model.shape.name, case.context, case.batch)
        yield DecodeRow(case, plan.speculation.gamma, measured, found, vllm)


def _measured(
    model: InflatedModel,
    plan: Plan,
    drafts: dict[int, DecoderWeights],
    prompts: list[list[int]],
    temperature: float,
) -> Measured:
    """Runs a plan with the draft weights of `drafts`, or adds its own; nothing else of its engine outlives this."""
    engine = model.engine(plan, drafts.get(plan.weights.group))
    if plan.weights.draft_differs:
        drafts[plan.weights.group] = engine.draft_weights
    measured = measure(engine, prompts, plan.workload.new_tokens, temperature=temperature)
    engine.close()
    return measured


def _device_name(model: InflatedModel) -> str:
    import torch

    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
