"""Measured decode steps of a serving engine: those that ship with the package, and a user's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ridgeplan.planner.engines.formats import DTYPES, ENGINES
from ridgeplan.roofline.catalog import validation as check
from ridgeplan.roofline.catalog.files import (
    cache_folder,
    fields_of_schema,
    naming_file,
    parse_json,
    read_document,
    read_tables,
)
from ridgeplan.roofline.catalog.hardware import Hardware, load_hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.validation import Checked, build
from ridgeplan.roofline.engine import FULL_BITS, HALF_BITS, EngineRates, EngineStep

SCHEMA = 1
SHIPPED = Path(__file__).with_name("measured.toml")
# What an engine's --quantization is: none, so that the checkpoint stays as it is, or fp8 made as it loads.
WEIGHTS = ("auto", "fp8", "fp8_per_channel")


class BadEngineProfile(ValueError):
    """A file of an engine's measured steps that is missing, damaged, or has a wrong figure."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep(Checked):
    """One measured time per output token. weights, kv: formats by the engine's names; "auto" is the checkpoint's."""

    model: str = check.text()
    context: int = check.whole(1, 10**8)
    batch: int = check.whole(1, 10**5)
    tpot_ms: float = check.number(1e-3, 1e6)
    weights: str = check.one_of(WEIGHTS, default="auto")
    kv: str = check.one_of(tuple(DTYPES), default="auto")
    held_out: bool = check.flag(False)

    def step(self, rates: EngineRates) -> EngineStep:
        """The step that was measured."""
        dtype, bits = DTYPES[self.kv], FULL_BITS if self.weights == "auto" else HALF_BITS
        return EngineStep(self.batch, self.context, bits, dtype.bits, rates.kv_rate(dtype.kind))


@dataclass(frozen=True, kw_only=True)
class EngineMeasurements(Checked):
    """All measured steps of one engine on one machine. shapes: of models that the catalog does not have."""

    error = BadEngineProfile
    engine: str = check.one_of(tuple(ENGINES))
    version: str = check.text()
    device: str = check.text()
    date: str = check.text()
    hardware: Hardware = check.part(Hardware, required=True)
    rows: tuple[MeasuredStep, ...] = check.parts(MeasuredStep)
    shapes: Mapping[str, ModelShape] = check.parts_by_name(ModelShape, default_factory=dict)

    def _contradiction(self) -> str | None:
        return None if self.rows else "rows is empty; allowed: at least one measured step"

    def shape_of(self, row: MeasuredStep) -> ModelShape:
        """The model of a row."""
        return self.shapes[row.model] if row.model in self.shapes else load_shape(row.model)

    def tpot_ms(self, model: str, context: int, batch: int, weights: str, kv: str) -> float | None:
        """The measured time of a step, the least of several sittings; None if it was not measured."""
        key = model, context, batch, weights, kv
        rows = (row for row in self.rows if (row.model, row.context, row.batch, row.weights, row.kv) == key)
        return min((row.tpot_ms for row in rows), default=None)

    @property
    def fitted(self) -> tuple[MeasuredStep, ...]:
        """The rows that rates are fitted to."""
        return tuple(row for row in self.rows if not row.held_out)

    @property
    def source(self) -> str:
        """Where the rows come from, in words."""
        return f"measured with {ENGINES[self.engine].title} {self.version} on {self.device}, {self.date}"

    def to_json(self) -> str:
        """JSON text that `load_measurements` reads."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False) + "\n"


@cache
def shipped_measurements() -> EngineMeasurements:
    """The measured steps that ship with the package, which stand in for engines and machines without their own."""
    tables: dict[str, Any] = read_tables(SHIPPED)["vllm"]
    hardware = asdict(load_hardware(tables["hardware"]))
    return build(EngineMeasurements, {**tables, "hardware": hardware})


def load_measurements(path: Path) -> EngineMeasurements:
    """A file that `ridgeplan calibrate --engine` wrote, which is not trusted. Raises BadEngineProfile, one line."""
    advice = "measure it again with `ridgeplan calibrate --engine`"
    with naming_file("engine profile", path, BadEngineProfile):
        document = parse_json(read_document(path))
        return build(EngineMeasurements, fields_of_schema(document, SCHEMA, advice, BadEngineProfile))


def user_engine_path(engine: str) -> Path:
    """The file in which `ridgeplan calibrate --engine` saves an engine's steps, and which `--backend` reads."""
    return cache_folder() / f"engine_{engine}.json"
