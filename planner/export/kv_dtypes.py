"""What the engines' KV cache dtypes hold: bytes per cached number, and which hardware and models they serve.

Not here: which of them a plan becomes (engines.py).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    one.name: one
    for one in (
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
