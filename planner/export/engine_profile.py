"""Speed of an engine in a few parameters, fitted to its measured rows: the time of a decode step.

step = launches x launch_s + sum over operations of max(bytes / (bandwidth x u), FLOPs / (peak x v))

The bytes, FLOPs and launches are those of roofline's passes. Fitted are launch_s, u of the weights, and u of the KV of
each kind of dtype; v is the share of the peak that libraries' kernels reach on the calibrated machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from ridgeplan.planner.export.engines import DTYPES
from ridgeplan.roofline.catalog.files import read_tables
from ridgeplan.roofline.catalog.hardware import Hardware, load_hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import profile_for, shipped_profiles
from ridgeplan.roofline.catalog.validation import Checked, build, flag, number, one_of, parts, text, whole
from ridgeplan.roofline.cost import Term, maximum
from ridgeplan.roofline.passes import Op, PassTerms, decode_pass

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


BF16_BYTES = 2
BAND = 1.645  # deviations on either side that hold 90%


@dataclass(frozen=True)
class EngineStep:
    """One pass of an engine: `queries` tokens of each of `batch` sequences, over `context` cached ones.

    weight_bits: of the linear layers; the head keeps the checkpoint's. kv: the cache's dtype by the engine's name.
    """

    batch: Term
    context: float
    weight_bits: float = 16
    kv: str = "auto"
    queries: int = 1

    @classmethod
    def of(cls, row: EngineRow) -> EngineStep:
        """The step that a row measures."""
        return cls(row.batch, row.context, row.weight_bits, row.kv)

    def operations(self, shape: ModelShape) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """The operations that stream weights or activations, and those that stream the KV cache."""
        terms = PassTerms(
            batch=self.batch, queries=self.queries, quantized_tokens=0, full_tokens=self.context, bits=0, group=1,
            splits=1, weight_bytes=self.weight_bits / 8, head_bytes=shape.weight_bits.full_bytes("head", BF16_BYTES),
            element_bytes=BF16_BYTES,
        )  # fmt: skip
        stored = replace(terms, element_bytes=DTYPES[self.kv].bits / 8)
        weights = (op for op in decode_pass(shape, terms) if op.category != "attention")
        cache_reads = (op for op in decode_pass(shape, stored) if op.category == "attention")
        return tuple(weights), tuple(cache_reads)


@dataclass(frozen=True)
class EngineProfile:
    """The fitted parameters. kv_utilization: by kind of KV dtype. spread: the relative deviation of predictions."""

    engine: str
    source: str
    hardware: str
    launch_s: float
    weight_utilization: float
    kv_utilization: Mapping[str, float]
    linear_compute: float
    attention_compute: float
    spread: float

    def step_s(self, step: EngineStep, shape: ModelShape, hardware: Hardware) -> Term:
        """Seconds of one step, or of one at each batch of an array."""
        weights, cache_reads = step.operations(shape)
        launches = sum(op.launches for op in (*weights, *cache_reads))
        streams = (
            (weights, self.weight_utilization, self.linear_compute),
            (cache_reads, self.utilization_of(step.kv), self.attention_compute),
        )
        return launches * self.launch_s + sum(_stream_s(ops, hardware, *shares) for ops, *shares in streams)

    def utilization_of(self, kv: str) -> float:
        """The share of the bandwidth at which attention streams a dtype.

        A kind that was not measured unpacks its codes as the one that was slowest.
        """
        return self.kv_utilization.get(DTYPES[kv].kind, min(self.kv_utilization.values()))

    def knows(self, kv: str) -> bool:
        """Whether a dtype's kind was measured."""
        return DTYPES[kv].kind in self.kv_utilization


def _stream_s(ops: Sequence[Op], hardware: Hardware, utilization: float, compute: float) -> Term:
    memory_rate, flop_rate = hardware.bandwidth_bytes_per_s * utilization, hardware.compute_flops * compute
    return sum(maximum(op.total.bytes / memory_rate, op.total.flops / flop_rate) for op in ops)


def fit(engine: str, rows: Sequence[EngineRow]) -> EngineProfile:
    """The profile with the least relative squares over rows of `measured.toml`'s model and machine.

    All of them are bound by memory, so the time is linear in launch_s and the inverse utilizations.
    """
    measured = measured_rows(engine)
    shape, hardware = load_shape(measured.model), load_hardware(measured.hardware)
    kinds = tuple(dict.fromkeys(DTYPES[row.kv].kind for row in rows))
    terms = np.array([_linear_terms(EngineStep.of(row), shape, hardware, kinds) for row in rows])
    seconds = np.array([row.tpot_ms / 1e3 for row in rows])
    solution, *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(rows)), rcond=None)
    library = profile_for(hardware, shipped_profiles())
    return EngineProfile(
        engine=engine,
        source=measured.source,
        hardware=hardware.name,
        launch_s=float(solution[0]),
        weight_utilization=float(1 / solution[1]),
        kv_utilization={kind: float(1 / inverse) for kind, inverse in zip(kinds, solution[2:], strict=True)},
        linear_compute=library.rates("prefill_linear").compute_utilization,
        attention_compute=library.rates("prefill_attention").compute_utilization,
        spread=0.0,
    )


def _linear_terms(step: EngineStep, shape: ModelShape, hardware: Hardware, kinds: Sequence[str]) -> list[float]:
    """What launch_s and each inverse utilization are multiplied by."""
    weights, cache_reads = step.operations(shape)
    weights_s, cache_s = (sum(op.total.bytes for op in ops) / hardware.bandwidth_bytes_per_s
                          for ops in (weights, cache_reads))  # fmt: skip
    kind = DTYPES[step.kv].kind
    launches = sum(op.launches for op in (*weights, *cache_reads))
    return [launches, weights_s, *(cache_s if other == kind else 0.0 for other in kinds)]


@cache
def engine_profile(engine: str) -> EngineProfile:
    """The profile of an engine, fitted to the rows that are not held out; its spread is the deviation on those."""
    measured = measured_rows(engine)
    fitted = fit(engine, measured.fitted)
    errors = [error(fitted, row) for row in measured.rows if row.held_out]
    return replace(fitted, spread=float(np.sqrt(np.mean(np.square(errors)))))


def error(profile: EngineProfile, row: EngineRow) -> float:
    """The relative error of a row's prediction."""
    measured = measured_rows(profile.engine)
    seconds = profile.step_s(EngineStep.of(row), load_shape(measured.model), load_hardware(measured.hardware))
    return float(1e3 * seconds / row.tpot_ms - 1)
