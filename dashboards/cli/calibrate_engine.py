"""`ridgeplan calibrate --engine`: measures the user's own engine, and saves the profile that `--backend` reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from ridgeplan.dashboards.cli.output import echo, number, print_answer, print_table, progress
from ridgeplan.dashboards.files import locked, require_lockable, write_atomically
from ridgeplan.planner.engines.formats import DTYPES, ENGINES
from ridgeplan.planner.engines.measurements import EngineMeasurements, MeasuredStep, load_measurements, user_engine_path
from ridgeplan.planner.engines.rates import engine_profile, error
from ridgeplan.planner.quantities import tokens_text
from ridgeplan.roofline.catalog.hardware import detect_hardware, load_hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import list_models, load_shape
from ridgeplan.validate.engine_steps import (
    CompletionsServer,
    EngineFailed,
    InProcessVllm,
    ServingEngine,
    measure_steps,
    saved_config,
)

CONTEXTS, BATCHES = (2048, 8192, 32768), (1, 2, 4, 6, 8, 12, 16)
SPARE_TOKENS = 2048  # of a sequence beyond its prompt
UNLIKELY = 0.3  # relative error of fitted rates beyond which the steps are hardly those of the GPU


def calibrate_engine(
    engine: str, output: Path | None, *, url: str | None, model: str | None, served_model: str | None, gpu: str | None,
    contexts: Sequence[int], batches: Sequence[int], quantization: str, kv_cache_dtype: str, load_format: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Measures an engine's decode steps and saves them. Raises UsageError, and EngineFailed."""
    if model is None:
        raise click.UsageError("--engine needs --model; allowed: the model that it serves, as in `ridgeplan plan`")
    if engine != "vllm" and url is None:
        raise click.UsageError(f"{ENGINES[engine].title} is measured by --url; allowed: http://HOST:PORT of a server")
    if kv_cache_dtype not in DTYPES:
        raise click.UsageError(f"--kv-cache-dtype is {kv_cache_dtype!r}; allowed: {', '.join(DTYPES)}")
    name = gpu or detect_hardware()
    if name is None:
        raise click.UsageError(
            "this machine's GPU is not in the catalog; allowed: --gpu with the name of the engine's GPU"
        )
    shape, hardware, target = load_shape(model), load_hardware(name), output or user_engine_path(engine)
    require_lockable(target)
    if target.exists():
        load_measurements(target)  # a damaged file would be refused only after measuring
    sizes = [tokens for tokens in contexts or CONTEXTS if tokens + SPARE_TOKENS <= shape.max_context]
    if not sizes:
        raise click.UsageError(f"--ctx is beyond {shape.name}'s limit of {shape.max_context}; allowed: shorter ones")
    measuring = _connect(engine, model, shape, url, served_model, quantization, kv_cache_dtype, load_format, max(sizes))
    skipped: list[str] = []
    with progress("measuring") as on_progress:
        steps = measure_steps(
            measuring, shape, sizes, batches or BATCHES, quantization, kv_cache_dtype, on_progress, skipped.append
        )
        rows = tuple(steps)
    for why in skipped:
        echo(f"note: left out: {why}", err=True)
    if not rows:
        raise EngineFailed(f"{ENGINES[engine].title} ran none of these batches; allowed: smaller ones")
    shapes = {} if shape in list_models() else {shape.name: shape}
    measured = EngineMeasurements(
        engine=engine, version=measuring.version, device=hardware.name, date=time.strftime("%Y-%m-%d"),
        hardware=hardware, rows=rows, shapes=shapes,
    )  # fmt: skip
    with locked(target):
        if target.exists():
            measured = merged(load_measurements(target), measured)
        write_atomically(target, measured.to_json())
    document = {"path": str(target), "rows": [vars(row) for row in rows]}
    print_answer(document, as_json, lambda: _print(measured, rows, target))


def _connect(
    engine: str, model: str, shape: ModelShape, url: str | None, served_model: str | None, weights: str, kv: str,
    load_format: str, longest: int,
) -> ServingEngine:  # fmt: skip
    if url is not None:
        return CompletionsServer.connect(url, shape.vocab, served_model)
    echo(f"starting {ENGINES[engine].title}; it prints its own log", err=True)
    return InProcessVllm.start(
        served_model or saved_config(model), shape.vocab, longest + SPARE_TOKENS, load_format=load_format,
        quantization=None if weights == "auto" else weights, kv=None if kv == "auto" else kv,
    )  # fmt: skip


def merged(before: EngineMeasurements, measured: EngineMeasurements) -> EngineMeasurements:
    """The rows of a file with new ones in place of those of the same step, if both are of one version and machine."""
    same = (before.engine, before.version, before.hardware) == (measured.engine, measured.version, measured.hardware)
    if not same:
        return measured
    again = {_key(row) for row in measured.rows}
    kept = tuple(row for row in before.rows if _key(row) not in again)
    return replace(measured, rows=(*kept, *measured.rows), shapes={**before.shapes, **measured.shapes})


def _key(row: MeasuredStep) -> tuple[object, ...]:
    return row.model, row.context, row.batch, row.weights, row.kv


def _print(measured: EngineMeasurements, rows: Sequence[MeasuredStep], target: Path) -> None:
    """The measured steps beside those of the rates that were fitted to the file."""
    profile = engine_profile(measured.engine, measured.hardware, target)
    errors = [error(profile.rates, profile.measured, row) for row in rows]
    cells = []
    for row, off in zip(rows, errors, strict=True):
        cells.append((tokens_text(row.context), str(row.batch), row.weights, row.kv, number(row.tpot_ms),
                      number(row.tpot_ms * (1 + off)), f"{off:+.1%}"))  # fmt: skip
    echo(f"{profile.title} {measured.version} on {measured.hardware.name}: {rows[0].model}")
    print_table("Decode steps", ("context", "batch", "weights", "KV", "measured ms", "fitted ms", "error"), cells)
    if (largest := max(map(abs, errors))) > UNLIKELY:
        name = measured.hardware.name
        echo(f"note: fitted rates miss steps by up to {largest:.0%}: was it {name}, and otherwise idle?", err=True)
    echo(f"saved to {target}; `--backend {measured.engine}` and `export` use it on {measured.hardware.name}")
