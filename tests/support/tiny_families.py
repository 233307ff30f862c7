"""Sizes of tiny random models that a family needs beside those that all families share."""

from typing import Any

# Value heads are wider together than attention's queries.
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 40, "full_attention_interval": 4,
}  # fmt: skip
_ROUTED: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MOE_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip
_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MOE_SIZES |= {
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_parameters": _HALF},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "solar_open": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
    },
    "hy_v3": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_scaling_factor": 1.5,
    },
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "intermediate_size": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "granitemoe": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 6.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.1, "logits_scaling": 0.5,
    },
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID | _ROUTED,
    "qwen3_next": HYBRID | _ROUTED,
    "olmo_hybrid": {name: size for name, size in HYBRID.items() if name != "full_attention_interval"},
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 48, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 2,
    "topk_group": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
# V2 makes queries of the stream and chooses among experts by softmax; the others have latents of queries.
LATENT_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT
    | {"q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT
    | {"q_lora_rank": 64, "n_shared_experts": 1, "first_k_dense_replace": 1, "rope_parameters": _YARN},
    "kimi_k2": _LATENT
    | {
        "q_lora_rank": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "rope_parameters": _YARN,
    },
    "glm4_moe_lite": _LATENT | {"q_lora_rank": 64, "n_shared_experts": 1},
}
DENSE_SIZES: dict[str, dict[str, Any]] = {  # without per-layer embeddings
    "gemma4_text": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128, "global_head_dim": 64},
}
FAMILY_SIZES = MOE_SIZES | HYBRIDS | LATENT_SIZES | DENSE_SIZES
