"""Known incompatibilities of engines, each a rule that cites the thread where it was reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ridgeplan.planner.engines.formats import DTYPES
from ridgeplan.planner.engines.rates import is_ampere
from ridgeplan.planner.export.options import Served

VLLM = "https://github.com/vllm-project/vllm/"
SGLANG = "https://github.com/sgl-project/sglang/"
SPECULATORS = "https://github.com/vllm-project/speculators/"
EAGLE_CONTEXT = 8192  # where the sliding-window head overtakes the full one in the cited table
FP8_KV_BATCH = 8  # the cited "small batch"
ANY = ("vllm", "sglang")


@dataclass(frozen=True)
class Rule:
    """An incompatibility: when it applies, its effect and its reports. forbids: the output would be wrong."""

    name: str
    engines: tuple[str, ...]
    applies: Callable[[Served], bool]
    says: str
    sources: tuple[str, ...]
    forbids: bool = False


def applying(served: Served) -> Iterator[Rule]:
    """The rules that apply to what an engine is to run."""
    engine = served.options.engine.name
    return (rule for rule in RULES if engine in rule.engines and rule.applies(served))


def _kind(served: Served) -> str:
    return DTYPES[served.kv].kind


def _generation(served: Served) -> tuple[int, ...]:
    """Compute capability: 8.x is Ampere and Ada, 9 Hopper, 10 and up Blackwell; () on other vendors' GPUs."""
    numbers = served.options.hardware.compute_capability.split(".")
    return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else ()


def _is_ampere(served: Served) -> bool:
    return is_ampere(served.options.hardware)


def _drafts_from(served: Served, method: str) -> bool:
    return served.drafts is not None and served.drafts.method == method


def _keeps_prefixes(served: Served, backend: str) -> bool:
    return served.options.host_cache_gib > 0 and served.options.host_cache_backend == backend


def _vocabulary_differs(served: Served) -> bool:
    drafts = served.drafts
    return drafts is not None and drafts.shape is not None and drafts.shape.vocab != served.options.shape.vocab


RULES = (
    Rule(
        "turboquant-with-drafts",
        ("vllm",),
        lambda served: _kind(served) == "turboquant" and served.drafts is not None,
        "TurboQuant KV with speculation gives degenerate output without any error",
        (f"{VLLM}issues/53180", f"{VLLM}issues/40831"),
        forbids=True,
    ),
    Rule(
        "codes-with-latent-attention",
        ("vllm",),
        lambda served: _kind(served) in ("turboquant", "per_token_head") and served.options.shape.is_mla,
        "no backend of multi-head latent attention reads TurboQuant or per-token-head KV; allowed: auto, fp8",
        (f"{VLLM}issues/40069",),
        forbids=True,
    ),
    Rule(
        "turboquant-k8v4-on-ampere",
        ("vllm",),
        lambda served: served.kv == "turboquant_k8v4" and _is_ampere(served),
        "turboquant_k8v4 decodes 31% slower than fp8 at 55k tokens on Ampere, 2.8% at 3k",
        (f"{VLLM}issues/55610",),
    ),
    Rule(
        "turboquant-4bit-decode",
        ("vllm",),
        lambda served: served.kv == "turboquant_4bit_nc",
        "turboquant_4bit_nc took 7 times fp8's time per token on an H200 NVL",
        (f"{VLLM}pull/40858",),
    ),
    Rule(
        "per-token-head-kv",
        ("vllm",),
        lambda served: _kind(served) == "per_token_head",
        "per-token-head KV runs on Triton attention only: 14.0 ms a step against 6.19 ms in bf16 on an H200 "
        "(Llama-3.1-8B, 32k tokens, vLLM 0.24)",
        (f"{VLLM}pull/40835",),
    ),
    Rule(
        "nvfp4-kv-below-blackwell",
        ("vllm",),
        lambda served: served.kv == "nvfp4" and _generation(served) < (10, 0),
        "NVFP4 KV has a native path on Blackwell only; elsewhere it is refused or experimental",
        (f"{VLLM}pull/46963", f"{VLLM}issues/49011"),
    ),
    Rule(
        "fp8-kv-on-ampere",
        ("vllm",),
        lambda served: _kind(served) == "fp8" and _is_ampere(served),
        "fp8 KV doubles the capacity, but on an A100 decoding gained 0.4% to 5.5% and prompts took 2.4% to 4.9% longer",
        (f"{VLLM}issues/42058",),
    ),
    Rule(
        "sglang-fp8-kv-small-batch",
        ("sglang",),
        lambda served: (
            _kind(served) == "fp8"
            and _generation(served)[:1] == (9,)
            and served.options.plan.workload.batch <= FP8_KV_BATCH
        ),
        "fp8 KV decodes slower than bf16 at batches up to 8 on Hopper: it is quantized by unfused kernels",
        (f"{SGLANG}issues/30815",),
    ),
    Rule(
        "gamma-by-batch-loses-graphs",
        ("vllm",),
        lambda served: served.drafts is not None and served.drafts.scheduled,
        "gamma by batch turns full CUDA graphs off (14% at batch 1) and throughput collapsed at a threshold of the "
        "schedule; set VLLM_USE_V2_MODEL_RUNNER=1, or leave the schedule out",
        (f"{VLLM}issues/49548",),
    ),
    Rule(
        "eagle3-at-long-context",
        ANY,
        lambda served: _drafts_from(served, "eagle3") and served.options.max_model_len > EAGLE_CONTEXT,
        "an EAGLE-3 head's acceptance length falls from 2.30 at 2k tokens to 1.08 at 20k, unless it was trained with a "
        "sliding window",
        (f"{SPECULATORS}pull/684",),
    ),
    Rule(
        "eagle3-without-head",
        ("sglang",),
        lambda served: _drafts_from(served, "eagle3") and served.options.draft_model is None,
        "EAGLE3 without a draft model takes the target for its head and crashes: name one with --draft-model",
        (f"{SGLANG}issues/36528",),
        forbids=True,
    ),
    Rule(
        "other-vocabulary",
        ANY,
        _vocabulary_differs,
        "the draft's vocabulary differs from the target's: tokens would stand for other words",
        (f"{SGLANG}issues/24051", f"{SGLANG}pull/23838"),
        forbids=True,
    ),
    Rule(
        "adaptive-gamma-is-for-eagle",
        ("sglang",),
        lambda served: _drafts_from(served, "draft_model") and served.options.plan.speculation.adaptive,
        "--speculative-adaptive serves EAGLE only, so gamma is fixed",
        (f"{SGLANG}pull/21599",),
    ),
    Rule(
        "host-cache-races",
        ("vllm",),
        lambda served: _keeps_prefixes(served, "native"),
        "KV loaded back from the host was corrupted at high concurrency, because copies raced with compute; only the "
        "race of the stores is fixed",
        (f"{VLLM}pull/46278", f"{VLLM}issues/47282", f"{VLLM}issues/31210"),
    ),
    Rule(
        "lmcache-slows-decoding",
        ("vllm",),
        lambda served: _keeps_prefixes(served, "lmcache"),
        "LMCache on the host slowed decoding down",
        (f"{VLLM}issues/32604",),
    ),
    Rule(
        "lmcache-with-drafts",
        ("vllm",),
        lambda served: _keeps_prefixes(served, "lmcache") and served.drafts is not None,
        "LMCache returned corrupt KV of long prompts under speculation, without any error",
        ("https://github.com/LMCache/LMCache/issues/4345",),
        forbids=True,
    ),
    Rule(
        "weights-on-the-host",
        ("vllm",),
        lambda served: served.offload_gib > 0,
        "offloaded weights are read over the host link in every step, which is slow except on a GH200",
        (f"{VLLM}pull/15354",),
    ),
    Rule(
        "offload-of-latent-attention",
        ("vllm",),
        lambda served: served.offload_gib > 0 and served.options.shape.is_mla,
        "weight offload kept most weights of DeepSeek-V2-Lite on the GPU",
        (f"{VLLM}issues/15871",),
    ),
)
