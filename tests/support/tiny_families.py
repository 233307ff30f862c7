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
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID | _ROUTED,
    "qwen3_next": HYBRID | _ROUTED,
}
FAMILY_SIZES = MOE_SIZES | HYBRIDS
