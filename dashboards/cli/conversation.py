"""What `ridgeplan chat` and `ridgeplan serve` share: an engine for a saved plan, or for a model that is planned now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.model_inputs import (
    calibration_tokens,
    embedded_or,
    model_tokenizer,
    require_planned_model,
)
from ridgeplan.dashboards.cli.run_inputs import PlanOrModel, model_id, plan_for_run
from ridgeplan.planner import SearchOptions
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.quality import Quality, QualityFloor, parse_quality
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import load_profile

if TYPE_CHECKING:
    from ridgeplan.runtime import Engine

DEFAULT_CONTEXT = 8192  # that a model is planned for

engine_options = opt.combine(
    click.argument("given", metavar="PLAN|MODEL", type=PlanOrModel()),
    opt.model_to_run,
    click.option("--ctx", type=opt.POSITIVE_TOKENS, help=f"Context to plan MODEL for.  [default: {DEFAULT_CONTEXT}]"),
    click.option(
        "--max-new-tokens", "--new-tokens", "--osl", "max_new_tokens", type=opt.POSITIVE_TOKENS,
        help=f"Tokens of an answer to plan MODEL for.  [default: {opt.DEFAULT_NEW_TOKENS}]",
    ),
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


def load_engine(
    given: SavedPlan | str, model: str | None, ctx: int | None, max_new_tokens: int | None,
    quality: Quality | QualityFloor | None, calibration: str | None, retrieval_head: str | None,
    drafter_head: str | None, profile: str | None, memory_utilization: float, any_model: bool,
    *, needs_template: bool = False,
) -> Engine:  # fmt: skip
    """The engine of `engine_options`, after all that can be checked before weights are read.

    needs_template: refuse a model without a chat template. Raises UsageError, ChatTemplateError, and what `recommend`
    and `runtime.load` raise.
    """
    rates = None if profile is None else load_profile(profile)
    if isinstance(given, SavedPlan):
        if ctx is not None or max_new_tokens is not None or quality is not None:
            raise click.UsageError("--ctx, --max-new-tokens and --quality plan a MODEL; allowed: without a PLAN")
        if not any_model:
            require_planned_model(given, model, ", or any with --any-model")
        plan, source = given.plan, embedded_or(model)
    else:
        if model is not None:
            raise click.UsageError("a model was given twice; allowed: PLAN with --model, or MODEL alone")
        shape, new_tokens = load_shape(given), max_new_tokens or opt.DEFAULT_NEW_TOKENS
        search = SearchOptions(
            new_tokens=new_tokens, quality=quality or Quality.NEAR_LOSSLESS, memory_utilization=memory_utilization,
            profile=rates, drafter_head=drafter_head,
        )  # fmt: skip
        context = ctx or max(1, min(DEFAULT_CONTEXT, shape.max_context - new_tokens))
        plan, source = plan_for_run(given, context, search), model_id(given, shape)
    from ridgeplan import runtime  # torch takes seconds, so that all the above is checked first
    from ridgeplan.runtime.chat_template import require_template
    from ridgeplan.runtime.loading import require_described

    require_described(plan, source, memory_utilization)
    if needs_template:
        require_template(model_tokenizer(source))
    return runtime.load(
        plan, source, calibration=calibration_tokens(source, calibration), memory_utilization=memory_utilization,
        retrieval_head=retrieval_head, drafter_head=drafter_head, profile=rates,
    )  # fmt: skip
