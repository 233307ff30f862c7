"""End-to-end decoding with a large shape and real acceptance: several plans, each with its prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ridgeplan.planner.engines.measurements import shipped_measurements
from ridgeplan.planner.resolution import workload_for
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset, preset_name
from ridgeplan.roofline.plan.support import missing_head
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.validate.comparison import Comparison, compare_measured
from ridgeplan.validate.measure import Measured, measure
from ridgeplan.validate.prompts import prompt_batch, random_batch

if TYPE_CHECKING:
    from ridgeplan.runtime.model.weights import DecoderWeights
    from ridgeplan.validate.decode_bench.inflated_model import InflatedModel


def vllm_tpot_ms(device: str, model: str, context: int, batch: int) -> float | None:
    """vLLM's time per output token of plain bf16 decoding on that device; None if not measured."""
    measured = shipped_measurements()
    return measured.tpot_ms(model, context, batch, "auto", "auto") if device == measured.device else None


PLAIN = "autoregressive"
# Plain decoding, a quantized target, and QuantSpec with only one of its parts (QuantSpec, Fig 4).
ABLATION = ("int8", "quantspec-kv", "quantspec-weights", "quantspec")


@dataclass(frozen=True)
class DecodeCase:
    """One plan at one workload; gamma None means the preset's own.

    adaptive: gamma is the most drafts of a round. share: of the prompt that an eviction leaves; 0 means the preset's
    own budget. chunk: tokens of a prompt after which it evicts; 0 means all. saved_plan: runs instead of a
    preset's; `preset` is then the plan's name.
    """

    preset: str
    context: int
    batch: int
    gamma: int | None = None
    adaptive: bool = False
    share: float = 0.0
    chunk: int = 0
    saved_plan: Plan | None = None

    @classmethod
    def of(cls, plan: Plan) -> DecodeCase:
        """A plan at its own context and batch."""
        workload = plan.workload
        return cls(preset_name(plan), workload.context, workload.batch, saved_plan=plan)

    def plan(self, shape: ModelShape, profile: Profile, new_tokens: int) -> Plan:
        """The plan for a model, with RoPE scaled beyond its context limit. Raises PlanError."""
        workload = workload_for(shape, profile, self.context, new_tokens, self.batch, yarn=True)
        if self.saved_plan is not None:
            known = self.saved_plan.workload
            names = ("text", "acceptance_length", "drafter", "drafter_head")
            workload = replace(workload, **{name: getattr(known, name) for name in names})
            return replace(self.saved_plan, workload=workload)
        plan = preset(self.preset, workload)
        if self.share:
            plan = replace(plan, eviction=replace(plan.eviction, budget=0, share=self.share))
        if self.chunk:
            plan = replace(plan, eviction=replace(plan.eviction, chunk=self.chunk))
        speculation = plan.speculation
        if not speculation.active:
            return plan
        speculation = speculation.with_gamma(speculation.gamma if self.gamma is None else self.gamma)
        return replace(plan, speculation=replace(speculation, adaptive=self.adaptive or speculation.adaptive))


@dataclass(frozen=True)
class DecodeRow:
    """One case: the measurement, and the prediction for the same lengths."""

    case: DecodeCase
    gamma: int
    measured: Measured
    comparison: Comparison
    vllm_tpot_ms: float | None  # vLLM's plain decoding of this shape, context and batch on this device, if known

    @property
    def over_vllm(self) -> float | None:
        """Speed-up in time per output token over vLLM's plain decoding; None if either is unknown."""
        tpot_ms = self.measured.tpot_ms
        return None if self.vllm_tpot_ms is None or not tpot_ms else self.vllm_tpot_ms / tpot_ms

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        statistics = self.measured.statistics
        derived = (
            "ttft_ms", "tokens_per_round", "acceptance", "acceptance_at", "accepted_share", "hit_rate",
            "proposal_acceptance", "drafts_per_pass",
        )  # fmt: skip
        figures = {**asdict(statistics), **{name: getattr(statistics, name) for name in derived}}
        figures |= {"tpot_ms": self.measured.tpot_ms, "spread": self.measured.spread}
        del figures["prompt_tokens"]
        case = vars(self.case).copy()
        saved_plan = case.pop("saved_plan")
        return {
            **case,
            "given": saved_plan and saved_plan.to_dict(),
            "gamma": self.gamma,
            "measured": figures,
            "busy": self.comparison.busy,
            "comparison": self.comparison.to_dict()["rows"],
            "vllm_tpot_ms": self.vllm_tpot_ms,
            "over_vllm": self.over_vllm,
        }


@dataclass(frozen=True)
class DecodeReport:
    """All cases on one device.

    function: name, parameters and context limit of the small model, whose acceptance the cases have.
    """

    device: str
    model: str
    shape: str
    function: dict[str, Any]
    software: dict[str, str]
    date: str
    temperature: float
    calibration_tokens: int  # of the given calibration text; 0 without one
    rows: tuple[DecodeRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        return {**head, "rows": [row.to_dict() for row in self.rows]}


def suite_cases(
    workloads: Sequence[tuple[int, int]], gammas: Sequence[int], presets: Sequence[str] = ABLATION
) -> list[DecodeCase]:
    """Plain decoding and `presets` at every (context, batch), with every gamma for those that speculate."""
    return with_plain(
        [
            DecodeCase(name, context, batch, gamma)
            for context, batch in workloads
            for name in presets
            for gamma in (gammas if has_gamma(name) else (None,))
        ]
    )


def with_plain(cases: Sequence[DecodeCase]) -> list[DecodeCase]:
    """`cases` grouped by context and batch, each group preceded by plain decoding."""
    sizes = sorted({(case.context, case.batch) for case in cases})
    everything = [*(DecodeCase(PLAIN, *size) for size in sizes), *cases]
    return sorted(dict.fromkeys(everything), key=lambda case: (case.context, case.batch))


def has_gamma(name: str) -> bool:
    """Whether a preset speculates."""
    return preset(name, Workload("any", "any", 1)).speculation.active


@dataclass(frozen=True)
class DecodeOptions:
    """What cases have in common: the rates of predictions, and prompts of `text` or of `random_tokens`.

    calibration: tokens as for `ridgeplan.runtime.load`.
    """

    profile: Profile
    new_tokens: int
    text: str | None = None
    random_tokens: bool = False
    temperature: float = 0.0
    calibration: Sequence[int] = ()

    def prompts(self, tokenizer: Any, context: int, batch: int) -> list[list[int]]:
        """The prompts of a context and batch. Raises PromptError for a text that is too short."""
        if self.random_tokens:
            return random_batch(len(tokenizer), context, batch)
        return prompt_batch(tokenizer, context, batch, self.text)


def bench_decode(
    model: InflatedModel,
    cases: Sequence[DecodeCase],
    options: DecodeOptions,
    on_progress: OnProgress = silent,
    on_report: Callable[[DecodeReport], object] = lambda report: None,
) -> DecodeReport:
    """Runs `cases`; those of one context and batch use the same prompts.

    Plain decoding runs first, as the baseline of its context and batch. Cases with 4-bit drafts run last, so that the
    draft weights take no memory of other cases and are quantized once, which takes up to a minute. Of these the longest
    run first, as their prompts use the memory of the draft weights. on_report: takes the report of the cases so far
    after each of them, as a run takes minutes and may be interrupted.
    Raises PlanError, UnsupportedPlan or PromptError before anything runs, and WorkloadError for a case that does not
    fit into memory.
    """
    from ridgeplan.runtime import UnsupportedPlan
    from ridgeplan.runtime.loading import require_executable

    plans = [case.plan(model.shape, options.profile, options.new_tokens) for case in cases]
    for plan in plans:
        require_executable(plan)
        if reason := missing_head(plan):
            raise UnsupportedPlan(f"this plan can be estimated but not executed here: {reason}")
    sizes = dict.fromkeys((case.context, case.batch) for case in cases)
    prompts = {size: options.prompts(model.tokenizer, *size) for size in sizes}
    bench = _Run(model, options)
    for index in sorted(range(len(cases)), key=lambda index: run_order(cases[index], plans[index])):
        case = cases[index]
        bench.rows[index] = bench.row(case, plans[index], prompts[case.context, case.batch])
        on_progress(f"{case.preset}, context {case.context}, batch {case.batch}", len(bench.rows), len(cases))
        on_report(bench.report())
    return bench.report()


def run_order(case: DecodeCase, plan: Plan) -> tuple[bool, int, bool, bool, int]:
    """Sort key for the order that `bench_decode` describes."""
    drafting, weights = plan.weights.draft_copy, plan.weights
    return drafting, -weights.target_bits, weights.hierarchical, case.preset != PLAIN, -case.context if drafting else 0


@dataclass(frozen=True, eq=False)
class _Run:
    """State shared by the cases of a report.

    plain: by context and batch; drafts: 4-bit weights by group; rows: by the index of their case.
    """

    model: InflatedModel
    options: DecodeOptions
    plain: dict[tuple[int, int], Measured] = field(default_factory=dict)
    drafts: dict[int, DecoderWeights] = field(default_factory=dict)
    rows: dict[int, DecodeRow] = field(default_factory=dict)

    def row(self, case: DecodeCase, plan: Plan, prompts: list[list[int]]) -> DecodeRow:
        """Runs one case. Only the draft weights of the plan's engine are kept."""
        from ridgeplan.runtime import SamplingParams

        options, calibration = self.options, self.options.calibration or None
        with self.model.shared_engine(plan, self.drafts, calibration=calibration, profile=options.profile) as engine:
            measured = measure(engine, prompts, plan.workload.new_tokens, SamplingParams(options.temperature))
        if case.preset == PLAIN:
            self.plain[case.context, case.batch] = measured
        shape, plain = self.model.shape, self.plain.get((case.context, case.batch))
        comparison = compare_measured(plan, shape, options.profile, measured, plain, self.model.function)
        vllm = vllm_tpot_ms(self._device_name, shape.name, case.context, case.batch)
        return DecodeRow(case, plan.speculation.gamma, measured, comparison, vllm)

    def report(self) -> DecodeReport:
        """The report of the cases so far, in the order in which they were given."""
        from ridgeplan.validate.machine import software, today

        hub = self.model.hub
        return DecodeReport(
            device=self._device_name,
            model=f"{hub.model_type}, {hub.num_hidden_layers} layers of {hub.hidden_size}",
            shape=self.model.shape.name,
            function={name: getattr(self.model.function, name) for name in ("name", "parameters", "max_context")},
            software=software(),
            date=today(),
            temperature=self.options.temperature,
            calibration_tokens=len(self.options.calibration),
            rows=tuple(self.rows[index] for index in sorted(self.rows)),
        )

    @property
    def _device_name(self) -> str:
        import torch

        return torch.cuda.get_device_name(self.model.device) if self.model.device.type == "cuda" else "cpu"
