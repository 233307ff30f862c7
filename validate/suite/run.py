"""The suite from start to end: its sections on this machine, and the report of what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ridgeplan.planner.feasibility import NothingFits
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import Machine
from ridgeplan.runtime.buffers import available_bytes
from ridgeplan.validate.machine import measured_here
from ridgeplan.validate.measure import Progress, silent
from ridgeplan.validate.random_model import BusyMachine, RandomModel
from ridgeplan.validate.suite import generations, sections
from ridgeplan.validate.suite.report import SECTIONS, RegretRow, SuiteReport, SuiteRow
from ridgeplan.validate.suite.sizes import PlanCase, SuiteSizes, sizes_for

METHODS = {
    "kernels": sections.KERNELS_METHOD,
    "steps": sections.STEPS_METHOD,
    "generations": generations.METHOD,
    "regret": sections.REGRET_METHOD,
}
MEMORY_SHARE = 0.9  # of what is free, for weights and caches


@dataclass(frozen=True)
class SuiteOptions:
    """What to run. models: those that generate, the first also inside the large shape; text, other: by default halves
    of the sample text.
    """

    suite: str
    only: Sequence[str]
    profile: Profile
    models: Sequence[str] = ()
    text: str | None = None
    other: str | None = None

    @property
    def sections(self) -> tuple[str, ...]:
        """The chosen sections, by default all."""
        return tuple(section for section in SECTIONS if section in (self.only or SECTIONS))


@dataclass(eq=False)
class _Results:
    """What has been measured so far."""

    rows: list[SuiteRow] = field(default_factory=list)
    regret: list[RegretRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def run_suite(options: SuiteOptions, on_progress: Progress = silent, sizes: SuiteSizes | None = None) -> SuiteReport:
    """Runs the chosen sections on the GPU if there is one, else on the CPU. sizes: by default the suite's own.

    Generations come first, as a wrong model or a short text is refused there.
    Raises ModelError, InflationError, PromptError, WorkloadError, and what `load_shape` raises.
    """
    device = _device()
    sizes = sizes or sizes_for(options.suite, device.type)
    results = _Results()
    if "generations" in options.sections:
        _generations(options, sizes, results, on_progress)
    if "kernels" in options.sections:
        results.rows += sections.kernel_rows(options.profile, device, sizes.kernels, on_progress)
    if {"steps", "regret"} & set(options.sections):
        _models(options, sizes, device, results, on_progress)
    return replace(
        heading(options), rows=tuple(results.rows), regret=tuple(results.regret), skipped=tuple(results.skipped)
    )


def heading(options: SuiteOptions) -> SuiteReport:
    """The report before anything has been measured."""
    return SuiteReport(
        suite=options.suite,
        **measured_here(),
        profile=_profile_text(options.profile),
        methods={section: METHODS[section] for section in options.sections},
        rows=(),
        regret=(),
    )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _profile_text(profile: Profile) -> str:
    origin = f", rates of {profile.transferred_from}" if profile.transferred_from else ""
    return f"{profile.hardware.name}: {profile.source} on {profile.device}, {profile.date}{origin}"


def _generations(options: SuiteOptions, sizes: SuiteSizes, results: _Results, on_progress: Progress) -> None:
    texts = generations.Texts.of(options.text, options.other)
    for source in options.models:
        model = generations.small_model(source, texts)
        _run_cases(model, sizes.generations, options.profile, sizes.new_tokens, texts, results, on_progress)
    if sizes.inflated_shape is not None and options.models:
        model = generations.inflated_model(options.models[0], sizes.inflated_shape, texts)
        _run_cases(model, sizes.inflated, options.profile, sizes.new_tokens, texts, results, on_progress)


def _run_cases(
    model: generations.Generator,
    cases: Sequence[PlanCase],
    profile: Profile,
    new_tokens: int,
    texts: generations.Texts,
    results: _Results,
    on_progress: Progress,
) -> None:
    """Cases with 4-bit drafts run last, so that those weights take no memory of the others."""

    def drafting(case: PlanCase) -> bool:
        return case.plan(model.shape, profile, new_tokens).weights.draft_copy

    for done, case in enumerate(sorted(cases, key=drafting)):
        on_progress(f"{model.shape.name}: {case.preset}, {case.context} x {case.batch}", done, len(cases))
        rows, reason = generations.generation_rows(model, case, profile, new_tokens, texts)
        results.rows += rows
        results.skipped += [reason] if reason else []


def _models(
    options: SuiteOptions, sizes: SuiteSizes, device: torch.device, results: _Results, on_progress: Progress
) -> None:
    """Steps and regret, model by model, so that each one's weights are made once."""
    for shape in sizes.models:
        on_progress(f"random weights of {shape.name}", 0, 1)
        machine = replace(Machine.of(options.profile), memory_bytes=MEMORY_SHARE * _free_bytes(device))
        model = RandomModel.build(shape, device, machine)
        if "steps" in options.sections:
            results.rows += _steps(options, sizes, model, results, on_progress)
        if "regret" in options.sections:
            results.regret += _regret(options, sizes, model, results, on_progress)
        del model  # its memory is the next one's


def _steps(
    options: SuiteOptions, sizes: SuiteSizes, model: RandomModel, results: _Results, on_progress: Progress
) -> Iterator[SuiteRow]:
    for done, case in enumerate(sizes.steps):
        plan = case.plan(model.shape, options.profile, sections.NEW_TOKENS)
        on_progress(f"{model.shape.name}: {sections.case_text(plan)}", done, len(sizes.steps))
        named = f"{model.shape.name}, {sections.case_text(plan)}"
        if not model.fits(plan):
            results.skipped.append(f"{named}: does not fit into memory")
            continue
        try:
            yield from sections.step_rows(model, plan, options.profile)
        except BusyMachine as error:
            results.skipped.append(f"{named}: {error}")


def _regret(
    options: SuiteOptions, sizes: SuiteSizes, model: RandomModel, results: _Results, on_progress: Progress
) -> Iterator[RegretRow]:
    for done, (context, batch) in enumerate(sizes.regret):
        on_progress(f"{model.shape.name}: regret, {context} x {batch}", done, len(sizes.regret))
        try:
            yield sections.regret_row(model, options.profile, context, batch, sizes.candidates)
        except (NothingFits, BusyMachine) as error:
            results.skipped.append(f"{model.shape.name}, regret at {context} tokens, batch {batch}: {error}")


def _free_bytes(device: torch.device) -> float:
    """Memory that may be allocated; without a limit where the host does not tell."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what ran before
        return float(torch.cuda.mem_get_info(device)[0])
    return float(available_bytes() or 1e18)
