"""`ridgeplan list`: the catalogs of models, GPUs and presets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ridgeplan.dashboards.cli import options as opt
from ridgeplan.dashboards.cli.groups import command
from ridgeplan.dashboards.cli.output import echo, print_answer, print_json, print_table, wrapped
from ridgeplan.dashboards.cli.table_file import RowTable, write_table
from ridgeplan.planner import PRESETS, Workload
from ridgeplan.planner.quality import quality_of
from ridgeplan.planner.quantities import GB, parameters_text, tokens_text
from ridgeplan.planner.render.tables import Bars
from ridgeplan.planner.search import named_plan
from ridgeplan.roofline.catalog.hardware import Hardware, list_hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import list_models
from ridgeplan.roofline.catalog.profile import shipped_profiles
from ridgeplan.roofline.latency import GIB
from ridgeplan.roofline.plan.presets import describe, short_name
from ridgeplan.roofline.plan.support import missing_architecture, missing_execution

TEMPLATE = Path(__file__).with_name("gpu_template.toml")
PRESETS_LEGEND = (
    "w8: 8-bit weights. int8: 8-bit KV cache. int4x2: two planes of 4-bit codes. upper, full: the codes that drafts "
    "read. :quest: the policy that selects their tokens. /w4: the drafts' weights. stored: a GGUF file's "
    "weights as it stores them.",
    "`ridgeplan explain PRESET` describes a preset in words. --preset also takes combinations, such as stored+int8.",
)
INT4_BITS = 4.25  # per weight: a code, and a scale and a minimum of 16 bits for 128 of them
SAMPLE = Workload("any", "any", 32_768)  # the workload at which presets are described


@command(cls=click.Group)
def lists() -> None:
    """List the models, GPUs and presets of the catalogs.

    Examples:
      ridgeplan list models
      ridgeplan list gpus --json
      ridgeplan list presets
    """


@command()
@opt.table_output
@opt.as_json
def models(output: Path | None, as_json: bool) -> None:
    """List the model shapes of the catalog. Any other model is read from its config.json or GGUF file.

    A model runs on one GPU; it is too large where none of the catalog holds its weights in 4 bits. vLLM divides such
    models among several (`plan --gpus`).

    Examples:
      ridgeplan list models
      ridgeplan list models --json
      ridgeplan plan Qwen3-8B --gpu h200 --ctx 8k
    """
    shapes = list_models()
    values = [
        {**asdict(shape), "parameters": shape.parameters, "active_parameters": shape.active_parameters,
         "executable": missing_architecture(shape) is None}
        for shape in shapes
    ]  # fmt: skip
    write_table(output, RowTable("Models", values, Bars("parameters", "parameters"), ("name",)), values)
    columns = ("model", "size", "layers", "heads/KV", "context", "runs", "notes")
    print_answer(values, as_json, lambda: print_table("Models", columns, map(_model_row, shapes)))


@command()
@click.option("--template", is_flag=True, help="Print a TOML template for a GPU of your own.")
@opt.table_output
@opt.as_json
def gpus(template: bool, output: Path | None, as_json: bool) -> None:
    """List the GPUs of the catalog. Any other GPU is read from a TOML file.

    Examples:
      ridgeplan list gpus
      ridgeplan list gpus --template > mine.toml
      ridgeplan plan Llama-3.1-8B --gpu mine.toml --ctx 8k
    """
    if template and (as_json or output):
        other = "--json" if as_json else "--output"
        raise click.UsageError(f"--template and {other} cannot be combined; allowed: one of them")
    if template:
        echo(TEMPLATE.read_text(encoding="utf-8"), nl=False)
        return
    calibrated = {profile.hardware.name for profile in shipped_profiles()}
    values = [
        {**asdict(item), "ridge_point": item.ridge_point, "calibrated": item.name in calibrated}
        for item in list_hardware()
    ]
    bandwidths = Bars("bandwidth_bytes_per_s", "memory bandwidth in bytes/s")
    write_table(output, RowTable("GPUs", values, bandwidths, ("name",)), values)
    columns = ("GPU", "GB", "GiB", "TB/s", "TFLOP/s", "ridge", "host GB/s", "kernels", "calibration")
    rows = (
        (item.name, f"{item.memory_bytes / GB:.0f}", f"{item.memory_bytes / GIB:.0f}",
         f"{item.bandwidth_bytes_per_s / 1e12:.2f}", f"{item.compute_flops / 1e12:.0f}", f"{item.ridge_point:.0f}",
         f"{item.host_link_bytes_per_s / 1e9:.0f}", _kernels(item),
         "shipped" if item.name in calibrated else "transferred")
        for item in list_hardware()
    )  # fmt: skip
    title = "GPUs (GiB as the driver reports them; ridge point in FLOP/byte)"
    print_answer(values, as_json, lambda: print_table(title, columns, rows))


@command()
@opt.table_output
@opt.as_json
def presets(output: Path | None, as_json: bool) -> None:
    """List the named plans, such as the papers' systems, and how each differs from plain decoding.

    Examples:
      ridgeplan list presets
      ridgeplan explain quantspec
      ridgeplan compare Llama-3.1-8B --gpu h200 --ctx 32k
    """
    plans = {name: make(SAMPLE) for name, make in PRESETS.items()} | {"stored": named_plan("stored", SAMPLE)}
    values = [
        {"name": name, "quality": str(quality_of(plan)), "executable": not missing_execution(plan), "changes":
         describe(plan)} for name, plan in plans.items()
    ]  # fmt: skip
    write_table(output, RowTable("Presets", values, None), values)
    if as_json:
        print_json(values)
        return
    rows = (
        (name, quality_of(plan), "no" if missing_execution(plan) else "yes", short_name(describe(plan)))
        for name, plan in plans.items()
    )
    print_table("Presets", ("preset", "quality", "runs", "changes to plain decoding"), rows)
    for line in PRESETS_LEGEND:
        echo(wrapped(line))


for _command in (models, gpus, presets):
    lists.add_command(_command)


def _kernels(hardware: Hardware) -> str:
    """The language of the kernels that run plans on a GPU."""
    return "CUDA C++" if hardware.has_hopper_kernels else "Triton" if hardware.has_kernels else "none"


def _runs(shape: ModelShape) -> str:
    """Whether the runtime runs a model, on GPUs or on CPUs alone, or no GPU of the catalog holds it."""
    if missing_architecture(shape):
        return "no"
    gpus = [machine for machine in list_hardware() if machine.kind == "gpu" and machine.has_kernels]
    if missing_architecture(shape, gpus[0]):
        return "on CPUs"
    holds = max(gpu.memory_bytes for gpu in gpus) >= shape.parameters * INT4_BITS / 8
    return "yes" if holds else "too large"


def _model_row(shape: ModelShape) -> tuple[str, ...]:
    window = f"{shape.window_layers} layers with a window of {shape.window_tokens} tokens"
    notes = {
        "MLA": shape.is_mla, window: shape.window_tokens, f"{shape.experts} experts": shape.is_moe,
        f"{shape.state_layers} layers with a state": shape.state_layers, "sizes assumed": "assumed" in shape.source,
    }  # fmt: skip
    return (
        shape.name.rpartition("/")[2], parameters_text(shape.parameters), f"{shape.layers}",
        f"{shape.q_heads}/{shape.kv_heads}", tokens_text(shape.max_context), _runs(shape),
        "; ".join(note for note, true in notes.items() if true),
    )  # fmt: skip
