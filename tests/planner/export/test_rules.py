"""Every known incompatibility: a request to which it applies, and the nearest to which it does not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ridgeplan.planner import PlanError
from ridgeplan.planner.export import ServeCommandOptions, export
from ridgeplan.planner.export.carry import served
from ridgeplan.planner.export.rules import Rule, applying, rules
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Placement, Workload

TURBO, PLAIN = {"kv_cache_dtype": "turboquant_k8v4"}, {"name": "autoregressive"}
SMALL = load_shape("meta-llama/Llama-3.2-1B")  # of the same vocabulary: fast drafts, whatever the KV dtype
HOST = {"plan": {"placement": Placement(True, 1024)}, "name": "autoregressive", "gpu": "rtx4090", "context": 100_000}
MANY = Workload("meta-llama/Llama-3.1-8B", "h200", 4096, 1024, 64, text="docs")
LMCACHE = {"host_cache_gib": 64, "host_cache_backend": "lmcache"}
SPARSE_DRAFTS = {"draft_model": "x/draft", "draft_shape": None}
# By rule: what applies, and what does not.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "turboquant-with-drafts": ({**TURBO, **SPARSE_DRAFTS}, {**TURBO, **PLAIN}),
    "codes-with-latent-attention": (
        {**PLAIN, "model": "deepseek-ai/DeepSeek-V2-Lite", "kv_cache_dtype": "int8_per_token_head"},
        {**PLAIN, "model": "deepseek-ai/DeepSeek-V2-Lite", "kv_cache_dtype": "fp8"},
    ),
    "turboquant-k8v4-on-ampere": ({**PLAIN, **TURBO, "gpu": "a100"}, {**PLAIN, **TURBO, "gpu": "l40s"}),
    "turboquant-4bit-decode": ({**PLAIN, "kv_cache_dtype": "turboquant_4bit_nc"}, {**PLAIN, **TURBO}),
    "per-token-head-kv": (
        {**PLAIN, "kv_cache_dtype": "int4_per_token_head"},
        {**PLAIN, "kv_cache_dtype": "fp8"},
    ),
    "nvfp4-kv-below-blackwell": (
        {**PLAIN, "kv_cache_dtype": "nvfp4"},
        {**PLAIN, "kv_cache_dtype": "nvfp4", "gpu": "b200"},
    ),
    "fp8-kv-on-ampere": ({"name": "int8", "gpu": "a100"}, {"name": "int8", "gpu": "h200"}),
    "fp8-weights-on-ampere": ({"name": "int8-weights", "gpu": "a100"}, {"name": "int8-weights", "gpu": "l40s"}),
    "sglang-fp8-kv-small-batch": (
        {"name": "int8", "engine": "sglang", "batch": 8},
        {"name": "int8", "engine": "sglang", "batch": 9},
    ),
    "gamma-by-batch-loses-graphs": ({"name": "suffix", "plan": {"workload": MANY}}, {"batch": 1}),
    "eagle3-at-long-context": (
        {"draft_method": "eagle3", "draft_model": "x/head", "context": 20_000},
        {"draft_method": "eagle3", "draft_model": "x/head", "context": 4000},
    ),
    "other-vocabulary": (
        {"draft_model": "Qwen/Qwen2.5-0.5B", "draft_shape": load_shape("Qwen/Qwen2.5-0.5B")},
        {"draft_model": "meta-llama/Llama-3.2-1B", "draft_shape": SMALL},
    ),
    "adaptive-gamma-is-for-eagle": ({"engine": "sglang", "plan": "adaptive"}, {"engine": "sglang"}),
    "host-cache-races": ({**PLAIN, "host_cache_gib": 64}, {**PLAIN, **LMCACHE}),
    "lmcache-slows-decoding": ({**PLAIN, **LMCACHE}, {**PLAIN, "host_cache_gib": 64}),
    "lmcache-with-drafts": ({**LMCACHE, "context": 120_000}, {**PLAIN, **LMCACHE}),
    "weights-on-the-host": (HOST, {**HOST, "context": 4096}),
    "offload-of-latent-attention": (
        {**HOST, "model": "deepseek-ai/DeepSeek-V2-Lite"},
        HOST,
    ),
}


def request_and_rules(
    request_for: Callable[..., ServeCommandOptions], case: dict[str, Any]
) -> tuple[ServeCommandOptions, dict[str, Rule]]:
    adaptive = case.get("plan") == "adaptive"
    request = request_for(**{key: value for key, value in case.items() if not (adaptive and key == "plan")})
    if adaptive:
        speculation = replace(request.plan.speculation, adaptive=True)
        request = replace(request, plan=replace(request.plan, speculation=speculation))
    running, _ = served(request)
    return request, {rule.name: rule for rule in applying(running)}


def test_every_rule_has_a_case_and_a_thread() -> None:
    assert [rule.name for rule in rules()] == list(CASES)
    assert all(
        rule.sources and all(source.startswith("https://github.com/") for source in rule.sources) for rule in rules()
    )


@pytest.mark.parametrize("name", CASES)
def test_a_rule_applies_where_it_was_reported_and_not_beside_it(
    request_for: Callable[..., ServeCommandOptions], name: str
) -> None:
    applies, spared = CASES[name]
    request, by_name = request_and_rules(request_for, applies)
    assert name in by_name
    assert name not in request_and_rules(request_for, spared)[1]
    if by_name[name].forbids:
        with pytest.raises(PlanError, match=r"github\.com"):
            export(request)
    else:
        assert name in [rule.name for rule in export(request).rules]
