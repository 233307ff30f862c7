"""Engines that plans are exported to: argument names, nearest formats, and KV cache dtypes, all in formats.toml.

Not here: which of them a plan becomes (carry.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.files import parse_toml, read_document
from ridgeplan.roofline.catalog.parallel import Parallel
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.plan import Plan, require

_TABLES = parse_toml(read_document(Path(__file__).with_suffix(".toml")))


@dataclass(frozen=True)
class KVDtype:
    """A cache dtype. bits: per number, with its scales. kind: dtypes whose attention kernels are alike share one."""

    name: str
    bits: float
    kind: str


DTYPES = {name: KVDtype(name, **dtype) for name, dtype in _TABLES["dtypes"].items()}
# Fidelity of formats by what `quantization` is told and the kind of KV cache.
FIDELITIES: Mapping[str, Mapping[str, float]] = _TABLES["fidelities"]
FIDELITY_SOURCE = "with vLLM's rounding emulated on one small model, SmolLM2-135M (docs/vllm.md)"


def fidelity(quantization: str, kv: str) -> float | None:
    """That of weights and of a cache dtype, by `FIDELITIES`; None where none was measured."""
    return FIDELITIES.get(quantization, {}).get(DTYPES[kv].kind)


def formats_loss(quantization: str, kv: str) -> str:
    """What an engine's formats cost in quality, with its source; "" for those of the checkpoint."""
    named = [f"{quantization} weights"] if quantization else []
    named += [f"{kv} KV"] if kv != "auto" else []
    known = fidelity(quantization, kv)
    figure = "no figure is known" if known is None else f"fidelity {known:.3f}, {FIDELITY_SOURCE}"
    return f"{' and '.join(named)}: {figure}" if named else ""


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """One engine. serve: the command before the model, whose argument is `model` ("" where it is positional).

    weights: what `quantization` is told for 8 or 4 bits, the engine quantizing the checkpoint as it loads it.
    kv_dtypes: for the KV formats whose target reads codes. schedules_gamma: whether gamma may depend on the batch.
    host_cache: arguments that keep prefixes' KV on the host, and what each is told. divides_attention: in models with
    experts, attention's ranks divide those of tensor parallelism; else all ranks share the experts.
    """

    name: str
    title: str
    serve: tuple[str, ...]
    model: str
    max_model_len: str
    max_num_seqs: str
    memory: str
    kv_cache_dtype: str
    quantization: str
    cpu_offload: str
    overrides: str
    weights: Mapping[int, str]
    kv_dtypes: Mapping[str, str]
    schedules_gamma: bool
    host_cache: Mapping[str, str]
    divides_attention: bool

    def formats(self, plan: Plan) -> tuple[str, str]:
        """What executes a plan's formats: `quantization`, "" for weights as stored, and the cache dtype."""
        return self.weights.get(plan.weights.target_bits, ""), self.kv_dtypes.get(plan.kv.format, "auto")

    def fidelity(self, plan: Plan) -> float | None:
        """That of the formats that execute a plan's, None where none was measured."""
        return fidelity(*self.formats(plan))

    def host_cache_arguments(self, gib: int, backend: str) -> Iterator[tuple[str, Any]]:
        """Arguments that keep prefixes' KV on the host."""
        values = {"gib": gib, "backend": backend, "enabled": True}
        return ((argument, values[value]) for argument, value in self.host_cache.items())

    def parallel_arguments(self, parallel: Parallel, moe: bool) -> Iterator[tuple[str, Any]]:
        """Arguments of the degrees of parallelism, for a model with experts or without."""
        divides = self.divides_attention and parallel.data > 1 and moe
        yield "--tensor-parallel-size", parallel.expert_ranks if divides else parallel.tensor
        if parallel.pipeline > 1:
            yield "--pipeline-parallel-size", parallel.pipeline
        if parallel.data > 1:
            yield "--data-parallel-size", parallel.data
        if divides:
            yield "--enable-dp-attention", True
        if parallel.expert and self.divides_attention:
            yield "--expert-parallel-size", parallel.expert_ranks
        elif parallel.expert:
            yield "--enable-expert-parallel", True


def _engine(name: str, *, serve: list[str], weights: dict[str, str], **fields: Any) -> ServingEngine:
    by_bits = {int(bits): quantization for bits, quantization in weights.items()}
    return ServingEngine(name=name, serve=tuple(serve), weights=by_bits, **fields)


ENGINES = {name: _engine(name, **fields) for name, fields in _TABLES["engines"].items()}


def engine_named(name: str) -> ServingEngine:
    """The engine. Raises PlanError for another name."""
    require(name in ENGINES, f"engine is {brief(name)}; allowed: {', '.join(ENGINES)}")
    return ENGINES[name]
