"""`ridgeplan export`: a plan as the serve command of another engine."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, number, print_answer, wrapped
from ridgeplan.dashboards.files import write_atomically
from ridgeplan.planner import Plan
from ridgeplan.planner.export import (
    ENGINES,
    Exported,
    ServeCommandOptions,
    engine_named,
    export,
    export_with_plugin,
    fastest_with_plugin,
    schema_for,
)
from ridgeplan.planner.export.carry import Carried
from ridgeplan.planner.export.drafts import METHODS
from ridgeplan.planner.export.plugin import VERSION as PLUGIN_VERSION
from ridgeplan.planner.export.rules import Rule
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.quantities import tokens_text
from ridgeplan.roofline.catalog.model_shape import ModelShape, UnknownModel
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import GIB
from ridgeplan.roofline.plan.presets import preset_name

COLUMNS = 78


@command("export")
@click.argument("plan", type=opt.SavedPlanFile())
@click.option("--to", "target", type=click.Choice([*ENGINES]), required=True, help="Engine that serves the plan.")
@click.option("--engine-version", metavar="VERSION", help="Version of the engine.  [default: the latest known]")
@click.option("--model", help="Path or hub id to load, such as a fine-tune.  [default: the plan's model]")
@click.option("--draft-model", metavar="MODEL", help="A draft of your own, such as a 4-bit copy or a small model.")
@click.option(
    "--draft-method", type=click.Choice(METHODS), default="draft_model", show_default=False,
    help="A whole model, a head, the model's own layers, a lookup, or blocks.  [default: as the plan drafts]",
)  # fmt: skip
@click.option("--kv-cache-dtype", metavar="DTYPE", help="The engine's KV format.  [default: the plan's nearest]")
@click.option("--host-cache", type=opt.SIZE, help="Host memory for the KV of prefixes, such as 64GiB.")
@click.option(
    "--host-cache-backend", type=click.Choice(["native", "lmcache"]), default="native", help="vLLM's store for them."
)
@click.option("--plugin", is_flag=True, help="Serve the plan as it is, with ridgeplan's plugin of vLLM.")
@click.option("--keep-drafts", is_flag=True, help="Keep drafts that are predicted to slow the plugin down.")
@opt.one_gpu(help=f"{opt.GPU_HELP}  [default: the plan's]")
@opt.engine_profile
@opt.memory_utilization
@opt.profile_file
@opt.acceptance_file
@click.option("--output", "-o", type=opt.OutputFile(), help="Write the arguments as YAML, for the engine's --config.")
@opt.as_json
def export_plan(
    plan: SavedPlan, target: str, engine_version: str | None, model: str | None, draft_model: str | None,
    draft_method: str, kv_cache_dtype: str | None, host_cache: float | None, host_cache_backend: str, plugin: bool,
    keep_drafts: bool, gpu: str | None, engine_profile: str | None, memory_utilization: float, profile: str | None,
    acceptance: str | None, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Write PLAN as the serve command of vLLM or SGLang.

    The report shows how the engine carries each axis of the plan, known problems, and the predicted speed.

    Examples:
      ridgeplan export plan.json --to vllm
      ridgeplan export plan.json --to vllm --draft-model my/Llama-3.1-8B-AWQ -o serve.yaml
      ridgeplan export plan.json --to vllm --plugin
      ridgeplan export plan.json --to sglang --kv-cache-dtype bf16 --json
    """
    shape, used = plan.resolve(gpu=gpu, profile=profile, acceptance=acceptance)
    with_plugin = export_with_plugin if keep_drafts else fastest_with_plugin
    options = ServeCommandOptions(
        plan=plan.plan, shape=_served_shape(shape, model), profile=used, engine=engine_named(target),
        schema=schema_for(target, engine_version or (PLUGIN_VERSION if plugin and target == "vllm" else None)),
        model=_served_model(plan.plan, model), memory_utilization=memory_utilization,
        engine_profile=Path(engine_profile) if engine_profile else None, kv_cache_dtype=kv_cache_dtype,
        draft_model=draft_model, draft_shape=_known_shape(draft_model), draft_method=draft_method,
        host_cache_gib=math.ceil((host_cache or 0) / GIB), host_cache_backend=host_cache_backend,
    )  # fmt: skip
    exported = (with_plugin if plugin else export)(options)
    if output:
        write_atomically(output, exported.command.yaml())
    print_answer(exported.to_dict(), as_json, lambda: echo("\n".join(report(plan.plan, exported))))


def report(plan: Plan, exported: Exported) -> list[str]:
    """The answer: times, the command, how each axis is carried, and known problems."""
    workload = plan.workload
    where = f"{exported.engine} {exported.version}: {workload.model} on {workload.devices}"
    lines = [
        wrapped(f"{preset_name(plan)} in {where}"),
        wrapped(f"  {tokens_text(workload.context)} tokens of context, batch {workload.batch}: {_times(exported)}"),
        f"\n{exported.command.shell()}",
    ]
    lines += ["", "carried by the engine:", *(line for carried in exported.carried for line in _axis(carried))]
    lines += ["", *wrapped(f"quality cost: {exported.loss}").splitlines()] if exported.loss else []
    lines += ["", "known problems:"] if exported.rules else []
    return [*lines, *(line for rule in exported.rules for line in _problem(rule))]


def _times(exported: Exported) -> str:
    times = exported.times
    if times is None:
        return exported.unpredicted
    band = f"{number(times.low_ms)} to {number(times.high_ms)}"
    plain = f", without drafts {number(times.plain_ms)} ms" if times.tpot_ms != times.plain_ms else ""
    steps = f", from steps {times.measured}" if times.measured else ""
    return f"{number(times.tpot_ms)} ms per token ({band}){plain} [{times.source}]{steps}"


def _axis(carried: Carried) -> list[str]:
    same = carried.exact and carried.plan == carried.engine
    nearest = "" if same else f"; {'the same as' if carried.exact else 'nearest'}: {carried.engine}"
    return _wrapped(f"{carried.axis}: {carried.plan}{nearest}")


def _problem(rule: Rule) -> list[str]:
    return [*_wrapped(rule.says), *(f"    {source}" for source in rule.sources)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)


def _served_model(plan: Plan, model: str | None) -> str:
    """What the engine loads. Raises UsageError where the plan's model is neither a hub id nor given."""
    name = plan.workload.model if model is None else model
    if model is None and "/" not in name:
        raise click.UsageError(
            f"the plan's model {name!r} is not a hub id; allowed: --model with the path or hub id that the engine loads"
        )
    return name


def _served_shape(planned: ModelShape, model: str | None) -> ModelShape:
    """The shape of what the engine loads, where it is known: a 4-bit copy, say. Raises UsageError for another model."""
    served = _known_shape(model)
    if served is None:
        return planned
    sizes, plan_sizes = ((shape.layers, shape.hidden, shape.vocab) for shape in (served, planned))
    if sizes != plan_sizes:
        raise click.UsageError(
            f"--model has layers, width and vocabulary {sizes}, the plan's model {plan_sizes}; allowed: the same model"
        )
    return served


def _known_shape(model: str | None) -> ModelShape | None:
    """The shape of a model, where it is known."""
    try:
        return load_shape(model) if model else None
    except UnknownModel:
        return None
