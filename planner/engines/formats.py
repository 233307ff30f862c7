"""Engines that plans are exported to: argument names, nearest formats, and KV cache dtypes.

Not here: which of them a plan becomes (carry.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeplan.roofline.catalog.parallel import Parallel
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.plan.plan import KVFormat, Plan, require

# One fp16 or fp32 scale (and a zero in 4 bits) per token and head, of heads of 128: what a head of another size adds
# differs by a few percent at most.
HEAD_DIM = 128


@dataclass(frozen=True)
class KVDtype:
    """A cache dtype. bits: per number, with its scales. kind: dtypes whose attention kernels are alike share one."""

    name: str
    bits: float
    kind: str


def _per_token_head(bits: int, scale_bytes: int) -> float:
    return bits + 8 * scale_bytes / HEAD_DIM


# vLLM: vllm/config/cache.py and vllm/v1/attention; SGLang: its own help of --kv-cache-dtype.
DTYPES = {
    dtype.name: dtype
    for dtype in (
        KVDtype("auto", 16, "bf16"),
        KVDtype("bfloat16", 16, "bf16"),
        KVDtype("bf16", 16, "bf16"),
        KVDtype("float16", 16, "bf16"),
        KVDtype("fp8", 8, "fp8"),
        KVDtype("fp8_e4m3", 8, "fp8"),
        KVDtype("fp8_e5m2", 8, "fp8"),
        KVDtype("fp8_per_token_head", _per_token_head(8, 4), "per_token_head"),
        KVDtype("int8_per_token_head", _per_token_head(8, 4), "per_token_head"),
        KVDtype("int4_per_token_head", _per_token_head(4, 4), "per_token_head"),
        KVDtype("turboquant_k8v4", 6.25, "turboquant"),  # keys in FP8, values in 4 bits with a scale per token and head
        KVDtype("turboquant_4bit_nc", 4.25, "turboquant"),
        KVDtype("turboquant_k3v4_nc", 3.75, "turboquant"),
        KVDtype("turboquant_3bit_nc", 3.25, "turboquant"),
        KVDtype("nvfp4", 4.5, "nvfp4"),  # an 8-bit scale per 16
        KVDtype("mxfp8", 8.25, "mxfp8"),  # an 8-bit scale per 32
        KVDtype("fp4_mx_block16", 4.5, "nvfp4"),
    )
}

# Fidelity of formats by what `quantization` is told and the kind of KV cache, on one small model: SmolLM2-135M, 2,048
# tokens, vLLM's rounding emulated (scripts/compare_fp8_fidelity.py, validate/results/fidelity_fp8_smollm2.json).
FIDELITIES = {
    ("", "bf16"): 1.0,
    ("", "fp8"): 0.935,
    ("fp8", "bf16"): 0.927,
    ("fp8", "fp8"): 0.882,
    ("fp8_per_channel", "bf16"): 0.922,
    ("fp8_per_channel", "fp8"): 0.900,
}
FIDELITY_SOURCE = "with vLLM's rounding emulated on one small model, SmolLM2-135M (docs/vllm.md)"


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """One engine. serve: the command before the model, whose argument is `model` ("" where it is positional).

    weights: what `quantization` is told for 8 or 4 bits, the engine quantizing the checkpoint as it loads it.
    kv_dtypes: for the KV formats whose target reads codes, the dtypes from nearest to farthest. parallel: arguments of
    the degrees of parallelism, for a model with experts or without. schedules_gamma: whether gamma may depend on the
    batch. host_cache: arguments that keep prefixes' KV on the host, by its GiB and backend.
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
    kv_dtypes: Mapping[KVFormat, str]
    schedules_gamma: bool
    host_cache: Callable[[int, str], tuple[tuple[str, Any], ...]]
    parallel: Callable[[Parallel, bool], Iterator[tuple[str, Any]]]

    def formats(self, plan: Plan) -> tuple[str, str]:
        """What executes a plan's formats: `quantization`, "" for weights as stored, and the cache dtype."""
        return self.weights.get(plan.weights.target_bits, ""), self.kv_dtypes.get(plan.kv.format, "auto")

    def fidelity(self, plan: Plan) -> float | None:
        """That of the formats that execute a plan's, by `FIDELITIES`; None where none was measured."""
        quantization, kv = self.formats(plan)
        return FIDELITIES.get((quantization, DTYPES[kv].kind))


def _vllm_parallel(parallel: Parallel, moe: bool) -> Iterator[tuple[str, Any]]:
    """vLLM's degrees; experts are sharded over the ranks of tensor and data parallelism."""
    yield "--tensor-parallel-size", parallel.tensor
    if parallel.pipeline > 1:
        yield "--pipeline-parallel-size", parallel.pipeline
    if parallel.data > 1:
        yield "--data-parallel-size", parallel.data
    if parallel.expert:
        yield "--enable-expert-parallel", True


def _sglang_parallel(parallel: Parallel, moe: bool) -> Iterator[tuple[str, Any]]:
    """SGLang's degrees: in models with experts, attention's ranks divide those of tensor parallelism."""
    attention_ranks = parallel.data > 1 and moe
    yield "--tensor-parallel-size", parallel.expert_ranks if attention_ranks else parallel.tensor
    if parallel.pipeline > 1:
        yield "--pipeline-parallel-size", parallel.pipeline
    if parallel.data > 1:
        yield "--data-parallel-size", parallel.data
    if attention_ranks:
        yield "--enable-dp-attention", True
    if parallel.expert:
        yield "--expert-parallel-size", parallel.expert_ranks


ENGINES = {
    "vllm": ServingEngine(
        name="vllm",
        title="vLLM",
        serve=("vllm", "serve"),
        model="",
        max_model_len="--max-model-len",
        max_num_seqs="--max-num-seqs",
        memory="--gpu-memory-utilization",
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
        parallel=_vllm_parallel,
    ),
    "sglang": ServingEngine(
        name="sglang",
        title="SGLang",
        serve=("sglang", "serve"),
        model="--model-path",
        max_model_len="--context-length",
        max_num_seqs="--max-running-requests",
        memory="--mem-fraction-static",
        kv_cache_dtype="--kv-cache-dtype",
        quantization="--quantization",
        cpu_offload="--cpu-offload-gb",
        overrides="--json-model-override-args",
        weights={8: "fp8", 4: "fp8"},
        kv_dtypes={KVFormat.INT8: "fp8_e4m3", KVFormat.HIERARCHICAL: "fp8_e4m3"},
        schedules_gamma=False,
        host_cache=lambda gib, _: (("--enable-hierarchical-cache", True), ("--hicache-size", gib)),
        parallel=_sglang_parallel,
    ),
}


def engine_named(name: str) -> ServingEngine:
    """The engine. Raises PlanError for another name."""
    require(name in ENGINES, f"engine is {brief(name)}; allowed: {', '.join(ENGINES)}")
    return ENGINES[name]
