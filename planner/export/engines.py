"""The engines that plans are exported to: names of their arguments, and the formats that come nearest to a plan's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeplan.planner.plan import KVFormat, require
from ridgeplan.roofline.catalog.mistakes import brief


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine. serve: the command before the model, whose argument is `model` ("" where it is positional).

    weights: what `quantization` is told for 8 or 4 bits, the engine quantizing the checkpoint as it loads it.
    kv_dtypes: for the KV formats whose target reads codes, the dtypes from nearest to farthest.
    schedules_gamma: whether gamma may depend on the batch. host_cache: arguments that keep prefixes' KV on the host, by
    its GiB and backend.
    """

    name: str
    title: str
    serve: tuple[str, ...]
    model: str
    max_model_len: str
    max_num_seqs: str
    memory: str
    tensor_parallel: str
    kv_cache_dtype: str
    quantization: str
    cpu_offload: str
    overrides: str
    weights: Mapping[int, str]
    kv_dtypes: Mapping[KVFormat, str]
    schedules_gamma: bool
    host_cache: Callable[[int, str], tuple[tuple[str, Any], ...]]


ENGINES = {
    "vllm": Engine(
        name="vllm",
        title="vLLM",
        serve=("vllm", "serve"),
        model="",
        max_model_len="--max-model-len",
        max_num_seqs="--max-num-seqs",
        memory="--gpu-memory-utilization",
        tensor_parallel="--tensor-parallel-size",
        kv_cache_dtype="--kv-cache-dtype",
        quantization="--quantization",
        cpu_offload="--cpu-offload-gb",
        overrides="--hf-overrides",
        # int8_per_channel_weight_only quantizes experts only and leaves dense layers as they are; nothing makes INT4.
        weights={8: "fp8_per_channel", 4: "fp8_per_channel"},
        # fp8 rather than int8_per_token_head, which takes 2.3 times bf16's time (measured.toml).
        kv_dtypes={KVFormat.INT8: "fp8", KVFormat.HIERARCHICAL: "fp8"},
        schedules_gamma=True,
        host_cache=lambda gib, backend: (("--kv-offloading-size", gib), ("--kv-offloading-backend", backend)),
    ),
    "sglang": Engine(
        name="sglang",
        title="SGLang",
        serve=("sglang", "serve"),
        model="--model-path",
        max_model_len="--context-length",
        max_num_seqs="--max-running-requests",
        memory="--mem-fraction-static",
        tensor_parallel="--tensor-parallel-size",
        kv_cache_dtype="--kv-cache-dtype",
        quantization="--quantization",
        cpu_offload="--cpu-offload-gb",
        overrides="--json-model-override-args",
        weights={8: "fp8", 4: "fp8"},
        kv_dtypes={KVFormat.INT8: "fp8_e4m3", KVFormat.HIERARCHICAL: "fp8_e4m3"},
        schedules_gamma=False,
        host_cache=lambda gib, _: (("--enable-hierarchical-cache", True), ("--hicache-size", gib)),
    ),
}


def engine_named(name: str) -> Engine:
    """The engine. Raises PlanError for another name."""
    require(name in ENGINES, f"engine is {brief(name)}; allowed: {', '.join(ENGINES)}")
    return ENGINES[name]
