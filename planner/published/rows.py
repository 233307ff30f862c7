"""Rows of published tables, read from the papers' TOML files: a workload, a plan on an engine, the cells as printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ridgeplan.planner.plan import MAX_BATCH, MAX_DEVICES, MAX_TOKENS
from ridgeplan.roofline.catalog.checks import Checked, build, flag, number, one_of, parts, text, values_by_name, whole
from ridgeplan.roofline.catalog.documents import parse_toml, read_document
from ridgeplan.roofline.speculation import MAX_GAMMA

PAPERS = ("quantspec", "specontext", "specattn", "dapq")
OUT_OF_MEMORY, NOT_PRINTED = "OOM", "-"


class PublishedError(ValueError):
    """A paper's file that is damaged, or has a value that is not allowed; or an unknown paper."""


@dataclass(frozen=True, kw_only=True)
class Row(Checked):
    """One row of a table, as published. 0 and "" stand for "not given".

    case: rows of the same case are comparable, such as one workload on several engines. baseline: the engine of the
    plain decoding that ratios are over, `baseline_batch` and `baseline_context` its workload; by default the row's own.
    queries: rows of logits that are collected. weight_bits: of a checkpoint that is published in 8 bits. offload:
    layers leave the GPU where they do not fit. accepted_share: accepted over drafted tokens (QuantSpec-6). over: "max"
    or "min" of all other rows of the table. unpredictable: why no cell of the row can be predicted. cells: by metric
    (metrics.py) a number, "OOM", or "-" where the paper prints none or the figure is lost.
    """

    error = PublishedError
    case: str = text()
    method: str = text()
    model: str = text("")
    gpu: str = text("")
    gpus: int = whole(1, MAX_DEVICES, default=1)
    context: int = whole(0, MAX_TOKENS, default=0)
    new_tokens: int = whole(1, MAX_TOKENS, default=1)
    batch: int = whole(1, MAX_BATCH, default=1)
    preset: str = text("autoregressive")
    engine: str = text("runtime")
    baseline: str = text("")
    baseline_batch: int = whole(0, MAX_BATCH, default=0)
    baseline_context: int = whole(0, MAX_TOKENS, default=0)
    gamma: int = whole(0, MAX_GAMMA, default=0)
    ratio: float = number(0, 1, default=0.0)
    budget: int = whole(0, MAX_TOKENS, default=0)
    queries: int = whole(1, MAX_GAMMA + 1, default=1)
    weight_bits: int = one_of((16, 8), default=16)
    offload: bool = flag(False)
    accepted_share: float = number(0, 1, default=0.0)
    over: str = one_of(("", "max", "min"), default="")
    unpredictable: str = text("")
    note: str = text("")
    cells: Mapping[str, Any] = values_by_name()

    def _owner(self) -> str:
        return f"row {self.case!r}, {self.method!r}: "

    def _contradiction(self) -> str | None:
        words = [value for value in self.cells.values() if isinstance(value, str)]
        wrong = [value for value in words if value not in (OUT_OF_MEMORY, NOT_PRINTED)]
        return f"cell {wrong[0]!r}; allowed: a number, {OUT_OF_MEMORY!r} or {NOT_PRINTED!r}" if wrong else None


@dataclass(frozen=True, kw_only=True)
class PublishedTable(Checked):
    """A table, figure or section of a paper."""

    error = PublishedError
    paper: str = one_of(PAPERS)
    name: str = text()
    title: str = text()
    rows: tuple[Row, ...] = parts(Row)


@cache
def load_tables(paper: str) -> tuple[PublishedTable, ...]:
    """The tables of one paper. Raises PublishedError."""
    if paper not in PAPERS:
        raise PublishedError(f"unknown paper {paper!r}; allowed: {', '.join(PAPERS)}")
    return read_paper(paper, read_document(Path(__file__).with_name(f"{paper}.toml")))


def read_paper(paper: str, document: str | bytes) -> tuple[PublishedTable, ...]:
    """The tables of a paper's TOML text. Raises PublishedError, one line."""
    try:
        tables = parse_toml(document).get("table")
    except ValueError as error:
        raise PublishedError(f"{paper}: {error}") from None
    if not isinstance(tables, list) or not all(isinstance(table.get("rows"), list) for table in tables):
        raise PublishedError(f"{paper}: it has no [[table]] or one without a list of rows")
    return tuple(build(PublishedTable, _merged(paper, table), f"{paper}: ") for table in tables)


def _merged(paper: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """A table whose rows all have the fields that the file writes once, as `shared`."""
    shared = table.get("shared", {})
    others = {name: value for name, value in table.items() if name != "shared"}
    return {**others, "paper": paper, "rows": [{**shared, **row} for row in table["rows"]]}
