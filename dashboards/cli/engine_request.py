"""What `run`, `chat` and `serve` share: an engine for a saved plan, or for a model that is planned now."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.calibrate import machine_profile
from ridgeplan.dashboards.cli.model_inputs import (
    calibration_tokens,
    embedded_or,
    model_tokenizer,
    require_planned_model,
)
from ridgeplan.dashboards.cli.output import echo, progress
from ridgeplan.dashboards.cli.run_inputs import PlanOrModel, model_id, plan_for_run
from ridgeplan.dashboards.cli.threads import limit_threads
from ridgeplan.planner import Plan, SearchOptions
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.quality import Quality, QualityFloor, parse_quality
from ridgeplan.planner.resolution import NotCalibrated, this_machine
from ridgeplan.roofline.catalog.files import existing_path
from ridgeplan.roofline.catalog.gguf import read_gguf_header
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Profile, load_profile

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine

DEFAULT_CONTEXT = 8192  # that a model is planned for
GGUF_TEMPLATE = "tokenizer.chat_template"  # keys of a GGUF file's templates begin with it

plan_or_model = opt.combine(click.argument("given", metavar="PLAN|MODEL", type=PlanOrModel()), opt.model_to_run)
loading_options = opt.combine(
    click.option(
        "--quality", type=opt.QualityLimit("|".join(Quality), parse_quality),
        help=f"What a plan for MODEL may give up, as for `ridgeplan plan`.  [default: {Quality.NEAR_LOSSLESS}]",
    ),
    opt.calibration_file,
    opt.retrieval_head,
    opt.drafter_head,
    opt.profile_file,
    opt.memory_utilization,
    opt.any_model,
)  # fmt: skip
sampling_options = opt.combine(
    click.option("--temperature", type=click.FloatRange(0), default=0.0, help="0 always takes the likeliest token."),
    click.option("--top-k", type=click.IntRange(1), help="Sample from the k likeliest tokens."),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True),
                 help="Sample from the likeliest tokens with this total probability."),
)  # fmt: skip
conversation_options = opt.combine(
    plan_or_model,
    click.option("--ctx", type=opt.POSITIVE_TOKENS, help=f"Context to plan MODEL for.  [default: {DEFAULT_CONTEXT}]"),
    click.option(
        "--max-new-tokens", "--new-tokens", "--osl", "max_new_tokens", type=opt.POSITIVE_TOKENS,
        help=f"Tokens of an answer to plan MODEL for.  [default: {opt.DEFAULT_NEW_TOKENS}]",
    ),
    loading_options,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """The options of `plan_or_model` and `loading_options`. The others, of MODEL's workload, are None with a PLAN.

    given: PLAN or MODEL. Raises UsageError for options that exclude each other, ProfileError, and what `load_shape`
    raises, before torch is imported.
    """

    given: SavedPlan | str
    model: str | None
    quality: Quality | QualityFloor | None
    calibration: str | None
    retrieval_head: str | None
    drafter_head: str | None
    profile: str | None
    memory_utilization: float
    any_model: bool
    ctx: int | None = None
    batch: int | None = None
    new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.saved is None:
            if self.model is not None:
                raise click.UsageError("a model was given twice; allowed: PLAN with --model, or MODEL alone")
            _ = self.shape
        else:
            options = {"--ctx": self.ctx, "--batch": self.batch, "--max-new-tokens": self.new_tokens,
                       "--quality": self.quality}  # fmt: skip
            if stray := [name for name, value in options.items() if value is not None]:
                raise click.UsageError(f"{' and '.join(stray)} cannot be given with a PLAN; allowed: with a MODEL")
            if self.model and self.model.lower().endswith(".gguf"):
                load_shape(self.model)  # raises for a file that is missing or damaged
            if not self.any_model:
                require_planned_model(self.saved, self.model, ", or any with --any-model")
        _ = self.rates

    @property
    def saved(self) -> SavedPlan | None:
        """PLAN; None where MODEL is given."""
        return self.given if isinstance(self.given, SavedPlan) else None

    @cached_property
    def rates(self) -> Profile | None:
        """The profile of --profile."""
        return None if self.profile is None else load_profile(self.profile)

    @cached_property
    def machine(self) -> tuple[Profile | None, Path | None]:
        """As `machine_profile` returns it; a PLAN needs rates only where its gamma adapts itself."""
        if self.saved is None or self.saved.plan.speculation.adaptive:
            return machine_profile(self.rates)
        limit_threads()
        with suppress(NotCalibrated):
            return self.rates or this_machine(), None
        return None, None

    @cached_property
    def shape(self) -> ModelShape:
        """MODEL's."""
        return load_shape(str(self.given))

    @cached_property
    def source(self) -> str:
        """What the runtime loads. It imports the runtime, and so torch, which takes seconds."""
        return embedded_or(self.model) if self.saved is not None else model_id(str(self.given), self.shape)

    def plan(self, context: int = DEFAULT_CONTEXT, new_tokens: int = opt.DEFAULT_NEW_TOKENS) -> Plan:
        """PLAN's, or the fastest one for MODEL with this workload; it fits this machine as far as the model is known.

        Raises what `recommend` and `runtime.load` raise.
        """
        from ridgeplan.runtime.loading import require_described

        profile, _ = self.machine
        if self.saved is not None:
            plan = self.saved.plan
        else:
            search = SearchOptions(
                batch=self.batch or 1, new_tokens=new_tokens, quality=self.quality or Quality.NEAR_LOSSLESS,
                memory_utilization=self.memory_utilization, profile=profile, drafter_head=self.drafter_head,
            )  # fmt: skip
            plan = plan_for_run(str(self.given), context, search)
        require_described(plan, self.source, self.memory_utilization)
        return plan

    def load(self, plan: Plan) -> Engine:
        """The engine, whose weights are read now. Raises what `runtime.load` raises."""
        from ridgeplan import runtime

        calibration = calibration_tokens(self.source, self.calibration)
        with progress("reading weights") as on_progress:
            engine = runtime.load(
                plan, self.source, calibration=calibration,
                memory_utilization=self.memory_utilization, retrieval_head=self.retrieval_head,
                drafter_head=self.drafter_head, profile=self.machine[0], on_progress=on_progress,
            )  # fmt: skip
        if note := self._other_machine(plan.workload.hardware):  # after all that may be an error
            echo(f"note: {note}", err=True)
        return engine

    def _other_machine(self, planned: str) -> str | None:
        """That PLAN was made for another machine than this one; None where it was not."""
        profile, _ = self.machine
        here = profile.hardware.name if profile else "this machine, which is not calibrated,"
        if self.saved is None or here == planned:
            return None
        return f"the plan was made for {planned}, but {here} executes it, so its predictions do not hold"

    def require_template(self) -> None:
        """Raises ChatTemplateError where the model has no chat template. A GGUF file's header says so at once."""
        from ridgeplan.runtime.chat_template import require_template

        path = existing_path(self.model or "" if self.saved is not None else str(self.given))
        if path is not None and path.suffix.lower() == ".gguf":
            require_template(any(key.startswith(GGUF_TEMPLATE) for key in read_gguf_header(path).metadata))
        else:
            require_template(model_tokenizer(self.source).chat_template)

    def conversation(self) -> Engine:
        """The engine of `conversation_options`. Raises as `plan` and `load` do."""
        new_tokens = self.new_tokens or opt.DEFAULT_NEW_TOKENS
        context = self.ctx or DEFAULT_CONTEXT
        if self.saved is None and self.ctx is None:
            context = max(1, min(context, self.shape.max_context - new_tokens))
        return self.load(self.plan(context, new_tokens))
