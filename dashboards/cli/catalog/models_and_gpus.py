"""`ridgeplan models` and `ridgeplan gpus`: the catalogs."""

from __future__ import annotations

from dataclasses import asdict

import click

from ridgeplan.dashboards.cli.options import as_json
from ridgeplan.dashboards.cli.output import print_json, print_table
from ridgeplan.planner.support import missing_architecture
from ridgeplan.roofline.catalog.hardware import list_hardware
from ridgeplan.roofline.catalog.models import list_models
from ridgeplan.roofline.catalog.profile_lookup import shipped_profiles
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.device import GIB


@click.command()
@as_json
def models(as_json: bool) -> None:
    """Model shapes that are known by name; any other comes from its config.json or GGUF file."""
    shapes = list_models()
    if as_json:
        print_json([
            {**asdict(shape), "parameters": shape.parameters, "active_parameters": shape.active_parameters,
             "executable": missing_architecture(shape) is None}
            for shape in shapes
        ])  # fmt: skip
        return
    columns = ("model", "parameters", "layers", "heads", "KV heads", "context", "runs here", "attention")
    print_table("Models", columns, map(_model_row, shapes))


@click.command()
@as_json
def gpus(as_json: bool) -> None:
    """GPUs that are known by name; any other comes from a TOML file of the same figures."""
    calibrated = {profile.hardware.name for profile in shipped_profiles()}
    if as_json:
        print_json([
            {**asdict(item), "ridge_point": item.ridge_point, "calibrated": item.name in calibrated}
            for item in list_hardware()
        ])  # fmt: skip
        return
    columns = ("GPU", "memory GiB", "TB/s", "TFLOP/s", "ridge FLOP/byte", "host GB/s", "calibration")
    rows = (
        (item.name, f"{item.memory_bytes / GIB:.1f}", f"{item.bandwidth_bytes_per_s / 1e12:.2f}",
         f"{item.compute_flops / 1e12:.0f}", f"{item.ridge_point:.0f}", f"{item.host_link_bytes_per_s / 1e9:.0f}",
         "ships with the package" if item.name in calibrated else "transferred")
        for item in list_hardware()
    )  # fmt: skip
    print_table("GPUs", columns, rows)


def _model_row(shape: ModelShape) -> tuple[str, ...]:
    attention = "MLA" if shape.is_mla else "MHA" if shape.kv_heads == shape.q_heads else "GQA"
    window = f", {shape.window_layers} layers with a window of {shape.window_tokens}" if shape.window_tokens else ""
    experts = f", {shape.experts} experts" if shape.is_moe else ""
    return (
        shape.name, f"{shape.parameters / 1e9:.3g}B", f"{shape.layers}", f"{shape.q_heads}", f"{shape.kv_heads}",
        f"{shape.max_context}", "yes" if missing_architecture(shape) is None else "no", attention + window + experts,
    )  # fmt: skip
