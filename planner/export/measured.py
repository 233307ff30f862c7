"""Measured times of other engines: what their profiles are fitted to, and checked against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ridgeplan.roofline.catalog.checks import Checked, build, flag, number, one_of, parts, text, whole
from ridgeplan.roofline.catalog.named_tables import read_tables

WEIGHTS = ("bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class EngineRow(Checked):
    """One measured time per output token. weights and kv: formats by the engine's names; "auto" is the model's."""

    context: int = whole(1, 10**8)
    batch: int = whole(1, 10**5)
    tpot_ms: float = number(1e-3, 1e6)
    weights: str = one_of(WEIGHTS, default="bf16")
    kv: str = text("auto")
    held_out: bool = flag(False)

    @property
    def weight_bits(self) -> int:
        """Bits per weight of the linear layers."""
        return 8 if self.weights == "fp8" else 16


@dataclass(frozen=True, kw_only=True)
class EngineRows(Checked):
    """All rows of one engine, model and machine."""

    engine: str = text()
    version: str = text()
    device: str = text()
    hardware: str = text()
    model: str = text()
    source: str = text()
    rows: tuple[EngineRow, ...] = parts(EngineRow)

    @property
    def fitted(self) -> tuple[EngineRow, ...]:
        """The rows that the profile is fitted to."""
        return tuple(row for row in self.rows if not row.held_out)


@cache
def measured_rows(engine: str) -> EngineRows:
    """The rows of an engine. Raises KeyError for an engine that was not measured."""
    return build(EngineRows, read_tables(Path(__file__).with_name("measured.toml"))[engine])
