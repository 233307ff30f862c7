"""The input of an export, and the serving setup that the engine runs for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ridgeplan.planner.acceptance import Acceptance, AcceptanceModel
from ridgeplan.planner.capacity import MEMORY_UTILIZATION
from ridgeplan.planner.engines.formats import DTYPES, ServingEngine
from ridgeplan.planner.engines.rates import EngineProfile, engine_profile
from ridgeplan.planner.export.drafts import HEADS, LOOKUPS, DraftModel
from ridgeplan.planner.export.schema import Schema
from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.sharding import shard
from ridgeplan.roofline.engine import FULL_BITS, HALF_BITS, EngineStep, engine_memory
from ridgeplan.roofline.latency import GIB
from ridgeplan.roofline.memory import MemoryBreakdown
from ridgeplan.roofline.plan.plan import Plan


@dataclass(frozen=True)
class ServeCommandOptions:
    """A plan, its model and machine, and the user's choices.

    model: the checkpoint that the engine loads. kv_cache_dtype: replaces the nearest to the plan's format. draft_model,
    draft_shape: the user's draft model; its shape is None if it is unknown. host_cache_gib: host memory for the KV of
    prefixes, managed by vLLM itself or by LMCache. engine_profile: a file of `ridgeplan calibrate --engine`.
    """

    plan: Plan
    shape: ModelShape
    profile: Profile
    engine: ServingEngine
    schema: Schema
    model: str
    memory_utilization: float = MEMORY_UTILIZATION
    kv_cache_dtype: str | None = None
    draft_model: str | None = None
    draft_shape: ModelShape | None = None
    draft_method: str = "draft_model"
    host_cache_gib: int = 0
    host_cache_backend: str = "native"
    engine_profile: Path | None = None

    @cached_property
    def sharded(self) -> ModelShape:
        """What one GPU holds of the model; all of it on a single one."""
        return shard(self.shape, self.plan.parallel)

    @property
    def hardware(self) -> Hardware:
        """The machine's figures."""
        return self.profile.hardware

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence when generation ends, or the model's limit, beyond which engines refuse to start."""
        workload = self.plan.workload
        return min(workload.final_context, int(workload.yarn_factor * self.shape.max_context))

    @cached_property
    def speed(self) -> EngineProfile:
        """The engine's profile on this machine, or what stands in for it."""
        return engine_profile(self.engine.name, self.hardware, self.engine_profile)

    @cached_property
    def acceptance(self) -> Acceptance:
        """The acceptance predicted for the plan's drafts. An engine's drafts read at least as many bits and tokens."""
        model = AcceptanceModel.of_profile(self.shape, self.plan.workload.context, self.profile)
        return model.of(self.plan)


@dataclass(frozen=True)
class Served:
    """What the engine runs. quantization: "" for the checkpoint's own format. offload_gib: of weights, on the host."""

    options: ServeCommandOptions
    kv: str
    quantization: str = ""
    drafts: DraftModel | None = None
    offload_gib: int = 0

    @property
    def weight_bits(self) -> float:
        """Bits per weight of the target's linear layers."""
        return HALF_BITS if self.quantization else FULL_BITS

    def step(self) -> EngineStep:
        """A plain decode step of the plan's batch, halfway through the generation."""
        return self.options.speed.step(self.options.plan.workload, self.weight_bits, self.kv)

    @property
    def host_s(self) -> float:
        """Seconds that a pass takes to read the weights that are on the host."""
        return self.offload_gib * GIB / self.options.hardware.host_link_bytes_per_s

    @property
    def memory(self) -> MemoryBreakdown:
        """What the engine reserves on each GPU for the target, as `plan --backend` counts it."""
        return self._memory(self.options.sharded, self.weight_bits, self.kv)

    def _memory(self, shape: ModelShape, bits: float, kv: str) -> MemoryBreakdown:
        batch, tokens = self.options.plan.workload.rank_batch, self.options.max_model_len
        return engine_memory(shape, self.options.speed.rates.reserve, batch, tokens, bits, DTYPES[kv].bits)

    @property
    def needed_bytes(self) -> float:
        """Weights, KV of every sequence at its end, activations and graphs of a GPU; those of drafts included.

        A lookup has none, and a head is one layer more.
        """
        target_bytes = float(self.memory.peak)
        if self.drafts is None or self.drafts.method in LOOKUPS:
            return target_bytes
        if self.drafts.method in HEADS:
            return target_bytes + float(self.memory.weights + self.memory.kv) / self.options.shape.layers
        shape = shard(self.drafts.shape or self.options.shape, self.options.plan.parallel)
        drafts = self._memory(shape, self.drafts.weight_bits, self.drafts.kv)
        return target_bytes + float(drafts.weights + drafts.kv)

    @property
    def usable_bytes(self) -> float:
        """Bytes of each GPU that the engine may use."""
        return self.options.memory_utilization * self.options.hardware.memory_bytes

    @property
    def missing_gib(self) -> int:
        """GiB by which each GPU lacks memory; 0 if everything fits."""
        return math.ceil(max(self.needed_bytes - self.usable_bytes, 0) / GIB)
