"""Operations of a forward pass: against transformers' parameters, and against counts made by hand."""

from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from ridgeplan.planner import PlanError, preset, resolve, workload_for
from ridgeplan.planner.lowering import strategy_of
from ridgeplan.planner.question import ask
from ridgeplan.planner.search import search
from ridgeplan.roofline.catalog.config_json import shape_from_config
from ridgeplan.roofline.catalog.families import families
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import (
    code_memory,
    draft_weight_memory,
    full_kv,
    layer_parameters,
    stored_elements,
    weight_memory,
)
from ridgeplan.roofline.passes import PassTerms, decode_pass, prefill_pass, weight_bytes, windowed
from ridgeplan.roofline.plan.support import missing_cost_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 24}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 24}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, **HEADS),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, **HEADS),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2),
    "deepseek": DeepseekV3Config(
        **SIZES, num_key_value_heads=4, **LATENT, **EXPERTS, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
INDEX = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 32}
MAMBA = {"mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4}
# Every kind of layer that is priced, in tiny models of the families that have it: the family's keys beside `SIZES`.
LAYERED = {
    "qwen3_5_text": {**HEADS, **DELTA, "num_hidden_layers": 4},
    "qwen3_next": {**HEADS, **DELTA, **ROUTED, "shared_expert_intermediate_size": 20, "num_hidden_layers": 4},
    "kimi_linear": {
        **LATENT, **EXPERTS, "num_local_experts": 8, "linear_num_heads": 4, "linear_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "nemotron_h": {
        **HEADS, **EXPERTS, **MAMBA, "moe_shared_expert_intermediate_size": 20, "hybrid_override_pattern": "ME*-",
        "moe_latent_size": 40, "num_hidden_layers": 4,
    },
    "granitemoehybrid": {
        "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 20,
        "mamba_n_heads": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "layer_types": ["mamba", "attention", "mamba"],
    },
    "gemma4_text": {
        **HEADS, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 16,
        "num_hidden_layers": 6, "hidden_size_per_layer_input": 0,
    },
    "deepseek_v32": {**LATENT, **EXPERTS, **INDEX, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
                     "first_k_dense_replace": 1},
    "minimax_m2": {**HEADS, "num_local_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {**HEADS, **EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "cohere2": {"num_key_value_heads": 2, "sliding_window": 16, "num_hidden_layers": 4},
    "olmo3": {"num_key_value_heads": 2, "sliding_window": 16, "num_hidden_layers": 4},
    "gemma4_unified_text": {**HEADS, "sliding_window": 16, "num_hidden_layers": 6},
    "afmoe": {
        **HEADS, **ROUTED, "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 16, "num_hidden_layers": 4,
    },
    "hy_v3": {**HEADS, **ROUTED, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
}  # fmt: skip
LLAMA = load_shape("Llama-3.1-8B")


def layered(name):
    """The parameters by name of a tiny model of a family, as transformers makes it, and its shape by config.json."""
    keys = {**SIZES, **LAYERED[name]}
    config = AutoConfig.for_model(name, **keys, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {key: tuple(value.shape) for key, value in model.named_parameters()}
    return shapes, shape_from_config({"model_type": name, "max_position_embeddings": 512, **keys}, name, "a test")


@pytest.mark.parametrize("name", LAYERED)
def test_layers_of_every_kind_have_the_parameters_of_transformers(name):
    """All but a few left out on purpose: a shared expert's gate, an indexer's norm, a router's scales."""
    shapes, shape = layered(name)
    left_out = (
        "shared_expert_gate",
        "k_norm.bias",
        "router.scale",
        "per_expert_scale",
        "layer_scalar",
        "indexer.k_norm",
        "expert_bias",
    )
    counted = sum(
        torch.Size(value).numel() for key, value in shapes.items() if not any(part in key for part in left_out)
    )
    assert shape.parameters == counted


# Their classes lack a key that a model needs, or have no layer with attention.
WITHOUT_DEFAULTS = ("deepseek_v2", "granitemoehybrid")
# Counted nowhere; a table of several keys, of which families.toml has the base; what the class computes from a rule.
NOT_DEFAULT = {"num_nextn_predict_layers", "rope_parameters"}
RULES = {"kimi_linear": {"layer_types"}}


@pytest.mark.parametrize("name", [name for name in families() if name not in WITHOUT_DEFAULTS])
def test_a_key_that_is_left_out_is_refused_or_has_the_default_of_transformers(name):
    keys = {**AutoConfig.for_model(families()[name].hub_type or name).to_dict(), "model_type": name}
    whole = shape_from_config(keys, name, "a test")
    for key in keys.keys() - NOT_DEFAULT - RULES.get(name, set()) - {"model_type"}:
        others = {other: value for other, value in keys.items() if other != key}
        with suppress(ValueError):  # a line says what is missing
            assert shape_from_config(others, name, "a test") == whole, key


def test_sizes_of_states_follow_from_others_as_in_transformers():
    keys = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 4, "linear_num_key_heads": 2}
    whole = AutoConfig.for_model("olmo_hybrid", **keys).to_dict()
    left = {key: value for key, value in whole.items() if not key.startswith("linear_") or key in keys}
    shape = shape_from_config(left, "x", "a test")
    assert shape == shape_from_config(whole, "x", "a test")
    (state,) = {group.state for group in shape.layer_groups if group.state}
    assert (state.key_heads, state.value_heads, state.key_dim, state.value_dim) == (2, 4, 24, 48)


@pytest.mark.parametrize("name", LAYERED)
def test_a_token_multiplies_once_with_the_matrices_of_layers_of_every_kind(name):
    """All products but those of latent factors at decode count each matrix once; experts those of one token."""
    shapes, shape = layered(name)
    skipped = ("embed", "conv1d", "shared_expert_gate", "A_log")
    matrices = {key: each for key, each in shapes.items() if len(each) > 1 and not any(x in key for x in skipped)}
    routed = sum(elements([each]) for key, each in matrices.items() if ".experts." in key and "router" not in key)
    head = 0 if "lm_head.weight" in shapes else 64 * 128  # tied
    active = elements(matrices.values()) + head - (routed * 6 // 8 if routed else 0)
    assert linear(decode_pass(shape, terms())).flops == 2 * active


@cache
def parameters(name):
    """Names and shapes of a tiny model's parameters, as transformers makes it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    return {key: tuple(value.shape) for key, value in model.named_parameters()}


def elements(shapes):
    return sum(torch.Size(shape).numel() for shape in shapes)


def tiny(name):
    return shape_from_config(CONFIGS[name].to_dict(), name, "a test")


def terms(**changes):
    plain = {
        "batch": 1,
        "queries": 1,
        "quantized_tokens": 0,
        "full_tokens": 1000,
        "bits": 0,
        "group": 128,
        "splits": 1,
        "weight_bytes": 2,
        "head_bytes": 2,
        "element_bytes": 2,
    }
    return PassTerms(**{**plain, **changes})


def by_name(ops):
    return {op.name: op for op in ops}


def linear(ops):
    return sum((op.total for op in ops if op.category == "linear"), Cost())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_token_multiplies_with_every_matrix_once_and_with_its_own_experts(name):
    matrices = {key: shape for key, shape in parameters(name).items() if len(shape) > 1 and "embed" not in key}
    routed = [shape for key, shape in matrices.items() if ".experts." in key]
    active = elements(matrices.values()) - elements(routed) + elements(routed) * 2 // 8
    assert linear(decode_pass(tiny(name), terms())).flops == 2 * active
    assert linear(decode_pass(tiny(name), terms(batch=3, queries=5))).flops == 15 * 2 * active
    head = 128 * 64
    assert linear(prefill_pass(tiny(name), 2, 100, 2)).flops == 200 * 2 * (active - head) + 2 * 2 * head


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_of_weights_is_that_of_transformers_parameters(name):
    """Quantization takes the matrices of the layers but routers; drafts also have a head of their own."""
    shapes, shape = parameters(name), tiny(name)
    assert weight_memory(shape, 2, 2) == 2 * elements(shapes.values())
    layers = {key: value for key, value in shapes.items() if ".layers." in key and len(value) > 1}
    full = ("mlp.gate.weight", "kv_b_proj.weight")  # routers, and projections from latents
    quantized = elements(value for key, value in layers.items() if not key.endswith(full))
    assert layer_parameters(shape) == quantized
    assert weight_memory(shape, 0.5, 2) == 0.5 * quantized + 2 * (elements(shapes.values()) - quantized)
    assert draft_weight_memory(shape, 0.5) == 0.5 * (quantized + 128 * 64)


@pytest.mark.parametrize("layers", [24, 25])
def test_gpt_oss_slides_in_every_other_layer_from_the_first(layers):
    config = GptOssConfig(num_hidden_layers=layers)
    old = {key: value for key, value in config.to_dict().items() if key != "layer_types"}  # configs of transformers 4
    for data in (config.to_dict(), old):
        assert shape_from_config(data, "x", "a test").window_layers == config.layer_types.count("sliding_attention")


def test_norms_of_three_rows():
    """RMSNorm before both blocks of 32 layers and before the head; all but the first add a residual."""
    ops = by_name(decode_pass(LLAMA, terms(batch=3)))
    row, weight = 3 * 4096 * 2, 4096 * 2
    first, others = ops["first norm"], ops["residual + norm"]
    assert (first.launches, first.cost.read_bytes, first.cost.write_bytes) == (1, row + weight, row)
    assert (others.launches, others.cost.read_bytes, others.cost.write_bytes) == (64, 2 * row + weight, 2 * row)


def test_a_verification_has_logits_of_all_queries_and_prefill_those_of_the_last_token():
    verified = by_name(decode_pass(LLAMA, terms(batch=2, queries=5)))["lm head"]
    assert verified.cost.write_bytes == 10 * 128_256 * 2
    assert verified.cost.flops == 10 * 2 * 128_256 * 4096
    prompt = by_name(prefill_pass(LLAMA, 2, 1000, 2))["lm head"]
    assert prompt.cost.write_bytes == 2 * 128_256 * 2


@pytest.mark.parametrize("bits, group, expected", [(4, 128, 0.53125), (4, 32, 0.625), (8, 128, 1.0625), (16, 128, 4.0)])
def test_bytes_of_a_quantized_weight_hold_a_scale_and_zero_per_group_of_each_plane(bits, group, expected):
    assert weight_bytes(bits, group, 4.0) == expected


def test_qk_norm_reads_a_weight_for_every_element_of_queries_and_keys():
    """Qwen3-8B: 32 + 8 heads of 128; without the norms, rows of the tables and a slot are all that is read beside."""
    normed = load_shape("Qwen3-8B")
    ops = [by_name(decode_pass(shape, terms()))["rope + append"] for shape in (normed, replace(normed, qk_norm=False))]
    assert ops[0].cost.read_bytes - ops[1].cost.read_bytes == 40 * 128 * 2
    qkv = (32 + 2 * 8) * 128 * 2
    assert (ops[1].cost.read_bytes, ops[1].cost.write_bytes) == (qkv + 128 * 4 + 8, qkv)
    assert ops[0].launches == 36


def test_windowed_layers_prefill_only_their_window():
    """gpt-oss-20b: 12 of 24 layers, 64 heads of 64, windows of 128 tokens; token i sees min(i + 1, 128) tokens."""
    ops = by_name(prefill_pass(load_shape("openai/gpt-oss-20b"), 1, 1000, 2))
    full, window = ops["prefill attention"], ops["prefill attention (window)"]
    assert full.launches == window.launches == 12
    pairs = sum(min(token + 1, 128) for token in range(1000))
    assert window.cost.flops == pytest.approx(4 * 64 * 64 * pairs, rel=0.01)
    assert full.cost.flops == pytest.approx(4 * 64 * 64 * sum(range(1, 1001)), rel=0.01)


@pytest.mark.parametrize(
    ("codes", "full", "read"),
    [(0, 100, (0, 100)), (0, 5000, (0, 1024)), (300, 200, (300, 200)), (5000, 200, (824, 200))],
)
def test_a_window_holds_the_latest_tokens_which_are_in_full_precision(codes, full, read):
    terms_in_window = windowed(terms(quantized_tokens=codes, full_tokens=full), 1024)
    assert (terms_in_window.quantized_tokens, terms_in_window.full_tokens) == read
    held = windowed(terms(quantized_tokens=codes, full_tokens=full, held=codes + full), 1024)
    assert (held.quantized_tokens, held.full_tokens) == ((0, 1024) if codes + full > 1024 else read)


def test_a_moe_model_with_leading_dense_layers():
    ops = by_name(decode_pass(tiny("deepseek"), terms()))
    launches = {name: ops[name].launches for name in ("mlp down", "routed experts", "shared experts down", "router")}
    assert launches == {"mlp down": 1, "routed experts": 2, "shared experts down": 2, "router": 2}


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_activated_experts_against_routing_at_random(rows):
    """2 of 8 experts a token, uniform and independent; 20,000 draws."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(20_000, rows, 8, generator=generator).topk(2).indices
    activated = torch.zeros(20_000, 8).scatter_(1, chosen.flatten(1), 1).sum(1).mean()
    ops = by_name(decode_pass(tiny("mixtral"), terms(batch=rows)))
    routed = ops["routed experts"].cost
    expert = 3 * 64 * 96 * 2
    assert (routed.read_bytes - rows * 64 * 2) / expert == pytest.approx(float(activated), rel=0.01)
    assert routed.flops == rows * 2 * 2 * 3 * 64 * 96


# Models whose structure changes bytes: sliding windows, mixtures of experts, latent attention; counted by hand.

GEMMA, MIXTRAL, LITE = (load_shape(name) for name in ("gemma-3-27b-it", "Mixtral-8x7B-v0.1", "DeepSeek-V2-Lite"))


def read_bytes(shape, category, batch=1, context=32768, weight_bytes=2.0):
    """Bytes that one decode step reads in operations of a category."""
    terms = PassTerms(
        batch=batch, queries=1, quantized_tokens=0, full_tokens=context, bits=0, group=1, splits=1,
        weight_bytes=weight_bytes, head_bytes=2, element_bytes=2,
    )  # fmt: skip
    return sum(op.total.read_bytes for op in decode_pass(shape, terms) if op.category == category)


def test_gemma_reads_all_tokens_in_10_layers_and_1024_in_52() -> None:
    row = 2 * 16 * 128 * 2
    assert read_bytes(GEMMA, "attention", 2, 32768) == pytest.approx(2 * row * (10 * 32768 + 52 * 1024), rel=2e-3)


def test_layers_with_a_window_store_no_more_than_it() -> None:
    """At 128k tokens: 10 layers of everything and 52 of 1024 tokens."""
    row = 2 * 16 * 128 * 2
    assert full_kv(GEMMA, 1, 131072, 2) == row * (10 * 131072 + 52 * 1024)
    assert full_kv(GEMMA, 1, 512, 2) == row * 62 * 512  # shorter than the window
    mistral = load_shape("Mistral-7B-v0.1")
    assert stored_elements(mistral, 32768) == 2 * 8 * 128 * 32 * 4096
    # Codes: 4 bits and 4 bits of 2 x 16 x 128 numbers, 4 bytes a token and head for values, 4 x 128 / group for keys.
    per_token = 2 * 16 * 128 + 16 * (4 + 4 * 128 / 128)
    assert code_memory(GEMMA, 1, 131072, 2, 128) == per_token * (10 * 131072 + 52 * 1024)


def test_norms_after_blocks_are_priced() -> None:
    """Two more launches a layer, each of which reads and writes one row of 5376."""
    terms = PassTerms(
        batch=1, queries=1, quantized_tokens=0, full_tokens=1, bits=0, group=1, splits=1, weight_bytes=2, head_bytes=2,
        element_bytes=2,
    )  # fmt: skip
    (extra,) = (op for op in decode_pass(GEMMA, terms) if op.name == "block norms")
    assert (extra.launches, extra.cost.write_bytes) == (2 * 62, 2 * 5376)


def test_experts_that_a_batch_activates() -> None:
    """One token reads 2 of 8 experts; of two tokens the second meets each of the others with probability 1/4."""
    expert = 3 * 4096 * 14336 * 2
    attention = 2 * 4096 * (4096 + 1024) * 2
    router, head = 4096 * 8 * 2, 32000 * 4096 * 2
    for batch, activated in ((1, 2), (2, 2 + 6 / 4), (64, 8 * (1 - 0.75**64))):
        expected = 32 * (activated * expert + attention + router) + head
        assert read_bytes(MIXTRAL, "linear", batch) == pytest.approx(expected, rel=2e-3), batch


def test_latent_rows_are_read_once_for_all_heads() -> None:
    """27 layers of 512 + 64 numbers of 2 bytes a token."""
    assert read_bytes(LITE, "attention", 4, 65536) == pytest.approx(4 * 65536 * 27 * 576 * 2, rel=2e-3)


@pytest.mark.parametrize("name", ["specattn", "magicdec-quest", "snapkv", "specontext"])
def test_policies_that_choose_by_kv_head_are_refused_under_latent_attention(name: str) -> None:
    shape, profile = resolve("DeepSeek-V2-Lite", "h200")
    plan = preset(name, workload_for(shape, profile, 32768, 1024, 1, yarn=False))
    with pytest.raises(PlanError, match="one latent row for all heads; allowed: plans that read every token") as caught:
        strategy_of(plan, shape, Machine.of(profile), 1.0)
    assert "\n" not in str(caught.value)
    assert missing_cost_model(plan, load_shape("Qwen3-8B")) is None


def test_a_search_leaves_out_what_cannot_be_priced() -> None:
    question = ask("DeepSeek-V2-Lite", "h200", 32768)
    candidates = search(question)
    assert {"autoregressive", "quantspec"} <= {candidate.name for candidate in candidates}
    assert all(missing_cost_model(candidate.plan, question.shape) is None for candidate in candidates)
