"""Published rows and the papers' engines, read from TOML: workloads, plans, printed cells.

engines.toml has one set of facts per engine, each with its source, which holds for all of the engine's cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog import validation as check
from ridgeplan.roofline.catalog.files import parse_toml, read_document, read_tables
from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.parallel import MAX_DEVICES
from ridgeplan.roofline.catalog.profile import NO_GAP, Profile, Rates, profile_for, shipped_profiles
from ridgeplan.roofline.catalog.validation import Checked, build
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.latency import KERNEL_CLASSES, STEPPED_PARTS
from ridgeplan.roofline.plan.plan import MAX_BATCH, MAX_TOKENS

PAPERS = ("quantspec", "specontext", "specattn", "dapq")
OUT_OF_MEMORY, NOT_PRINTED = "OOM", "-"


class PublishedError(ValueError):
    """A paper's file that is damaged, or has a value that is not allowed; or an unknown paper."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow(Checked):
    """One row of a table, as published. 0 and "" stand for "not given".

    case: rows of the same case are comparable, such as one workload on several engines. baseline: the engine of the
    plain decoding that ratios are over, `baseline_batch` and `baseline_context` its workload; by default the row's own.
    queries: rows of logits that are collected. weight_bits: of a checkpoint that is published in 8 bits. offload:
    layers leave the GPU where they do not fit. accepted_share: accepted over drafted tokens (QuantSpec-6). over: "max"
    or "min" of all other rows of the table. unpredictable: why no cell of the row can be predicted. cells: by metric
    (metrics.py) a number, "OOM", or "-" where the paper prints none or the figure is lost.
    """

    error = PublishedError
    case: str = check.text()
    method: str = check.text()
    model: str = check.text("")
    gpu: str = check.text("")
    gpus: int = check.whole(1, MAX_DEVICES, default=1)
    context: int = check.whole(0, MAX_TOKENS, default=0)
    new_tokens: int = check.whole(1, MAX_TOKENS, default=1)
    batch: int = check.whole(1, MAX_BATCH, default=1)
    preset: str = check.text("autoregressive")
    engine: str = check.text("runtime")
    baseline: str = check.text("")
    baseline_batch: int = check.whole(0, MAX_BATCH, default=0)
    baseline_context: int = check.whole(0, MAX_TOKENS, default=0)
    gamma: int = check.whole(0, MAX_GAMMA, default=0)
    ratio: float = check.number(0, 1, default=0.0)
    budget: int = check.whole(0, MAX_TOKENS, default=0)
    queries: int = check.whole(1, MAX_GAMMA + 1, default=1)
    weight_bits: int = check.one_of((16, 8), default=16)
    offload: bool = check.flag(False)
    accepted_share: float = check.number(0, 1, default=0.0)
    over: str = check.one_of(("", "max", "min"), default="")
    unpredictable: str = check.text("")
    note: str = check.text("")
    cells: Mapping[str, Any] = check.values_by_name()

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
    paper: str = check.one_of(PAPERS)
    name: str = check.text()
    title: str = check.text()
    rows: tuple[PublishedRow, ...] = check.parts(PublishedRow)


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


# Classes where libraries' kernels run, and the class of the library's products of the same kind.
LIBRARY_CLASSES = {
    **dict.fromkeys(("linear", "linear_int8", "linear_int4", "head"), "prefill_linear"),
    **dict.fromkeys(("grouped_linear", "grouped_linear_int8", "grouped_linear_int4"), "prefill_linear"),
    "attention": "prefill_attention",
    "attention_d64": "prefill_attention_d64",
    "attention_mla": "prefill_attention",
}


class UnknownEngine(ValueError):
    """A row names an engine that engines.toml lacks."""


@dataclass(frozen=True, kw_only=True)
class PublishedEngine(Checked):
    """One engine. 0 stands for this package's own figure on the machine.

    launch_s: time of a launch beyond its bytes, in every class. streaming_utilization: bandwidth utilization of
    products and of 16-bit attention. layer_dispatch_s: host time to launch a layer. kv_passes: how often attention's KV
    moves through memory, 1 where it is only read; `repeats_kv` adds a write and a read per query head of a group beyond
    the first. draft_cache: drafts read a copy of the tokens selected for them. batched_prefill: all prompts at once,
    whole. materializes_scores: eager attention. fetches_values: selected values come from the host at every step.
    whole_cache: eviction frees nothing before prefill ends. codes_utilization: as streaming_utilization, of products of
    quantized weights.
    """

    name: str = check.text()
    title: str = check.text()
    source: str = check.text()
    launch_s: float = check.number(0, 1, default=0.0)
    streaming_utilization: float = check.number(0, 1, default=0.0)
    codes_utilization: float = check.number(0, 1, default=0.0)
    layer_dispatch_s: float = check.number(0, 1, default=0.0)
    kv_passes: float = check.number(1, 100, default=1.0)
    repeats_kv: bool = check.flag(False)
    draft_cache: bool = check.flag(False)
    batched_prefill: bool = check.flag(False)
    materializes_scores: bool = check.flag(False)
    fetches_values: bool = check.flag(False)
    whole_cache: bool = check.flag(False)

    def profile(self, hardware: Hardware, shape: ModelShape) -> Profile:
        """The machine's profile, measured or transferred, with the engine's own figures in place of the runtime's."""
        base = profile_for(hardware, shipped_profiles())
        profile = replace(
            base,
            classes={kind: self._rates(kind, base, shape) for kind in KERNEL_CLASSES},
            layer_dispatch_s=self.layer_dispatch_s or base.layer_dispatch_s,
        )
        # Where launches are the engine's own, so is what lies between them.
        return _without_gaps(profile) if self.launch_s or self.layer_dispatch_s else profile

    def passes_of(self, shape: ModelShape) -> float:
        """How often KV moves through memory in one step's attention."""
        group = shape.q_heads / shape.kv_heads
        return self.kv_passes + (2 * group if self.repeats_kv else 0)

    def _rates(self, kind: str, base: Profile, shape: ModelShape) -> Rates:
        """KV that moves several times is priced as attention at a fraction of its bandwidth.

        Libraries' kernels reach the library's share of the peak, not that of this package's kernels for few rows, and
        have none of their steps.
        """
        rates = base.rates(kind)
        if self.codes_utilization and kind in ("linear_int8", "linear_int4"):
            rates = replace(rates, bandwidth_utilization=self.codes_utilization, steps=())
        if self.streaming_utilization and kind in LIBRARY_CLASSES:
            compute = base.rates(LIBRARY_CLASSES[kind]).compute_utilization
            rates = Rates(self.streaming_utilization, compute, rates.launch_s, rates.spread, rates.source)
        if self.launch_s:
            rates = _launched_in(self.launch_s, rates)
        return _read_times(self.passes_of(shape), rates) if kind.startswith("attention") else rates


def _launched_in(launch_s: float, rates: Rates) -> Rates:
    """These rates with `launch_s` for all that a launch takes beyond its bytes and FLOPs."""
    none: dict[str, Any] = dict.fromkeys(STEPPED_PARTS, 0.0)
    steps = tuple(replace(step, **none) for step in rates.steps)
    return replace(rates, **none | {"launch_s": launch_s}, steps=steps)


def _read_times(passes: float, rates: Rates) -> Rates:
    """These rates where all bytes move `passes` times, at any number of rows."""
    steps = (replace(step, inverse_utilization=passes * step.inverse_utilization) for step in rates.steps)
    return replace(rates, bandwidth_utilization=rates.bandwidth_utilization / passes, steps=tuple(steps))


def _without_gaps(profile: Profile) -> Profile:
    """Without the time on the device between kernels of this package's rounds."""
    classes = {**profile.classes, "gap": NO_GAP}
    return replace(profile, classes=classes, draft_gap_s=0.0, target_gap_s=0.0, round_s=0.0)


def load_engine(name: str) -> PublishedEngine:
    """An engine of engines.toml. Raises UnknownEngine."""
    if name not in _engines():
        raise UnknownEngine(f"unknown engine {name!r}; allowed: {', '.join(_engines())}")
    return _engines()[name]


def list_engines() -> tuple[PublishedEngine, ...]:
    """Every engine of engines.toml, in the file's order."""
    return tuple(_engines().values())


@cache
def _engines() -> dict[str, PublishedEngine]:
    tables = read_tables(Path(__file__).with_name("engines.toml"))
    return {name: build(PublishedEngine, {"name": name, **table}, f"engine {name}: ") for name, table in tables.items()}
