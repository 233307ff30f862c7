"""The suite from start to end: its sections on this machine, and the report of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ridgeplan.planner.feasibility import NothingFits
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.latency import Machine
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.validate.acceptance import named_shape
from ridgeplan.validate.calibration.noise import NoisyMachine
from ridgeplan.validate.decode_bench.report import DecodeCase
from ridgeplan.validate.machine import free_bytes, measured_here
from ridgeplan.validate.random_model import BusyMachine, RandomModel, measured_round
from ridgeplan.validate.suite import generations, sections
from ridgeplan.validate.suite.report import SECTIONS, RegretRow, SuiteError, SuiteReport, SuiteRow
from ridgeplan.validate.suite.sizes import SuiteSizes, sizes_for

METHODS = {
    "kernels": sections.KERNELS_METHOD,
    "steps": sections.STEPS_METHOD,
    "outputs": sections.OUTPUTS_METHOD,
    "generations": generations.METHOD,
    "regret": sections.REGRET_METHOD,
}
MEMORY_SHARE = 0.9  # of what is free, for weights and caches


@dataclass(frozen=True)
class SuiteOptions:
    """What to run. models: those that generate, the first also inside the large shape; regret at measured acceptance is
    at the last one's. text, other: by default halves of the sample text.
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


def run_suite(
    options: SuiteOptions, on_progress: OnProgress = silent, sizes: SuiteSizes | None = None,
    keep: Callable[[SuiteReport], object] = lambda report: None,
) -> SuiteReport:  # fmt: skip
    """Runs the chosen sections on the GPU if there is one, else on the CPU. sizes: by default the suite's own.

    Generations come first, as they refuse a wrong model or a short text. keep: takes what has been measured so far,
    after every part.
    Raises ModelError, InflationError, PromptError, WorkloadError, what `load_shape` raises, and where no case ran
    NoisyMachine if others kept the machine busy, else SuiteError.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = _Run(options, sizes or sizes_for(options.suite, device.type), device, on_progress, keep)
    if "generations" in options.sections:
        run.real_models()
    if "kernels" in options.sections:
        run.rows += sections.kernel_rows(options.profile, device, run.sizes.kernels, on_progress)
        run.save()
    if {"steps", "outputs", "regret"} & set(options.sections):
        run.random_models()
    run.require_results()
    return run.report()


def heading(options: SuiteOptions) -> SuiteReport:
    """The report before anything has been measured."""
    profile = options.profile
    origin = f", rates of {profile.transferred_from}" if profile.transferred_from else ""
    return SuiteReport(
        suite=options.suite,
        **measured_here(),
        profile=f"{profile.hardware.name}: {profile.source} on {profile.device}, {profile.date}{origin}",
        methods={section: METHODS[section] for section in options.sections},
        rows=(),
        regret=(),
    )


@dataclass(eq=False)
class _Run:
    """A run of the suite, and what it has measured so far."""

    options: SuiteOptions
    sizes: SuiteSizes
    device: torch.device
    on_progress: OnProgress
    keep: Callable[[SuiteReport], object]
    rows: list[SuiteRow] = field(default_factory=list)
    regret: list[RegretRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    busy: int = 0  # cases that were skipped as the machine was busy

    def report(self) -> SuiteReport:
        """What has been measured so far."""
        rows, regret, skipped = tuple(self.rows), tuple(self.regret), tuple(self.skipped)
        return replace(heading(self.options), rows=rows, regret=regret, skipped=skipped)

    def save(self) -> None:
        """Hands over what has been measured so far, if anything."""
        if self.rows or self.regret:
            self.keep(self.report())

    def require_results(self) -> None:
        """Raises NoisyMachine or SuiteError where nothing was measured."""
        if self.rows or self.regret:
            return
        if self.skipped and self.busy == len(self.skipped):
            raise NoisyMachine(f"nothing was measured: {self.skipped[0]}; allowed: a machine without other work")
        reason = self.skipped[0] if self.skipped else f"the suite has no cases of {', '.join(self.options.sections)}"
        raise SuiteError(
            f"nothing was measured: {reason}; allowed: other parts of the suite, or a machine that fits it"
        )

    def real_models(self) -> None:
        """Measures the user's models as they are, then the first one inside the large shape."""
        options, sizes = self.options, self.sizes
        texts = generations.Texts.of(options.text, options.other)
        for source in options.models:
            self._generate(generations.small_model(source, texts), sizes.generations, texts)
        if sizes.inflated_shape is not None and options.models:
            model = generations.inflated_model(options.models[0], sizes.inflated_shape, texts)
            self._generate(model, sizes.inflated, texts)

    def _generate(self, model: generations.Generator, cases: Sequence[DecodeCase], texts: generations.Texts) -> None:
        """Measures cases. Those with 4-bit drafts run last, so that those weights take no memory of the others."""
        profile, new_tokens = self.options.profile, self.sizes.new_tokens
        cases = sorted(cases, key=lambda case: case.plan(model.shape, profile, new_tokens).weights.draft_copy)
        for done, case in enumerate(cases):
            self.on_progress(f"{model.shape.name}: {case.preset}, {case.context} x {case.batch}", done, len(cases))
            rows, reason = generations.generation_rows(model, case, profile, new_tokens, texts)
            self.rows += rows
            self.skipped += [reason] if reason else []
            self.save()

    def random_models(self) -> None:
        """Measures steps and regret model by model, so that each model's weights are made once."""
        every = {"steps", "regret"} & set(self.options.sections)
        for shape in self.sizes.models:
            with_outputs = "outputs" in self.options.sections and shape.name == self.sizes.outputs_shape
            if not (every or with_outputs):
                continue
            self.on_progress(f"random weights of {shape.name}", 0, 1)
            memory_bytes = MEMORY_SHARE * free_bytes(self.device)
            machine = replace(Machine.of(self.options.profile), memory_bytes=memory_bytes)
            model = RandomModel.build(shape, self.device, machine)
            if "steps" in self.options.sections:
                self._steps(model)
                self.save()
            if with_outputs:
                self._outputs(model)
            if "regret" in self.options.sections:
                self._regret(model)
            self.save()
            del model  # the next model needs its memory

    def _steps(self, model: RandomModel) -> None:
        profile = self.options.profile
        for done, case in enumerate(self.sizes.steps):
            plan = case.plan(model.shape, profile, sections.NEW_TOKENS)
            name = f"{model.shape.name}, {sections.case_text(plan)}"
            self.on_progress(name, done, len(self.sizes.steps))
            if not model.fitting([plan]):
                self.skipped.append(f"{name}: does not fit into memory")
                continue
            try:
                self.rows += sections.rows_of(plan, model, profile, measured_round(model, plan))
            except BusyMachine as error:
                self.skipped.append(f"{name}: {error}")
                self.busy += 1

    def _outputs(self, model: RandomModel) -> None:
        for done, case in enumerate(self.sizes.outputs):
            plan = case.plan(model.shape, self.options.profile)
            name = f"{model.shape.name}, {sections.output_text(plan)}"
            self.on_progress(name, done, len(self.sizes.outputs))
            if not model.fitting([plan]):
                self.skipped.append(f"{name}: does not fit into memory")
                continue
            try:
                self.rows.append(sections.output_row(plan, model, self.options.profile))
            except BusyMachine as error:
                self.skipped.append(f"{name}: {error}")
                self.busy += 1

    def _regret(self, model: RandomModel) -> None:
        options = self.options
        function = named_shape(options.models[-1]) if options.models else None
        for done, (context, batch) in enumerate(self.sizes.regret):
            self.on_progress(f"{model.shape.name}: regret, {context} x {batch}", done, len(self.sizes.regret))
            try:
                row = sections.regret_row(model, options.profile, context, batch, self.sizes.candidates, function)
            except (NothingFits, BusyMachine) as error:
                self.skipped.append(f"{model.shape.name}, regret at {context} tokens, batch {batch}: {error}")
                self.busy += isinstance(error, BusyMachine)
            else:
                self.regret.append(row)
