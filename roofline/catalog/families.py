"""What families of models have beside the keys of their config.json: a row of data for each `model_type`.

A row says what config.json leaves to the family's class in transformers. Everything else is read by key
(`config_json`), for families that have no row as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Family:
    """defaults: of keys that config.json may leave out. attention_bias: whatever the file says. qk_norm: norms of each
    head's queries and keys; None: by the key `use_qk_norm`. wide_qk_norm: of all heads together. sliding: which layers
    have the window, where `layer_types` is missing: "all", "even", "pattern" (all but every n-th), "last"
    (`max_window_layers` on), "none". output_gate: attention's output is gated. full_every: every n-th layer has full
    attention, the others a state. routing: fields of `layers.Routing` beside those that keys give. traits: of
    `model_shape.TRAITS`.

    What only the runtime reads: executed: whether it runs these models. hub_type: the `model_type` of the class in
    transformers that has this structure, where transformers has none of the family's name. norms: where the norms of a
    layer stand, of NORM_NAMES. norm_offset: added to their weights. layer_norm: they are LayerNorms. interleaved_rope:
    RoPE turns each channel with the next one, not with the one half a head away. full_rope: layers of full attention
    have RoPE. scaled_embedding: embeddings are multiplied by the root of the hidden size. value_norm: each head's
    values are normalized, without a weight. state_norms: where norms of layers with a state stand; "": as elsewhere.
    state_eps: of norms of a state's output; 0: as elsewhere."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    attention_bias: bool | None = None
    qk_norm: bool | None = False
    wide_qk_norm: bool = False
    gated_mlp: bool = True
    sliding: str = "none"
    output_gate: bool = False
    full_every: int = 0
    routing: Mapping[str, Any] = field(default_factory=dict)
    traits: tuple[str, ...] = ()
    executed: bool = False
    hub_type: str = ""
    norms: str = "before"
    norm_offset: float = 0.0
    layer_norm: bool = False
    interleaved_rope: bool = False
    full_rope: bool = True
    scaled_embedding: bool = False
    value_norm: bool = False
    state_norms: str = ""
    state_eps: float = 0.0

    @property
    def sandwich_norms(self) -> bool:
        """Whether norms stand before and after both blocks of a layer."""
        return self.norms == "sandwich"


# A layer's norms by where they stand: of what its token mixer and its MLP read, and of what these leave; "" for none.
# Parallel blocks read the same norm of the stream.
PARALLEL = "parallel"
NORM_NAMES = {
    "before": ("input_layernorm", "post_attention_layernorm", "", ""),
    "sandwich": (
        "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm",
    ),
    "after": ("", "", "post_attention_layernorm", "post_feedforward_layernorm"),
    PARALLEL: ("input_layernorm", "", "", ""),
}  # fmt: skip


_DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "head_dim": 256,
}  # fmt: skip
_HYBRID = Family(
    _DELTA, qk_norm=True, output_gate=True, full_every=4, norm_offset=1.0, traits=("partial rotary",), executed=True
)
_GEMMA3 = {  # of transformers' Gemma3TextConfig
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    "max_position_embeddings": 131072, "rope_theta": 1e6, "tie_word_embeddings": True, "sliding_window_pattern": 6,
}  # fmt: skip
_GEMMA4 = {  # of transformers' Gemma4TextConfig; scores are not scaled
    "attention_multiplier": 1.0, "vocab_size": 262144, "head_dim": 256,
    "global_head_dim": 512, "sliding_window": 512, "rope_theta": 1e6,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "sliding_window_pattern": 6,
}  # fmt: skip
_GEMMA_TRAITS = ("scaled embeddings", "rope by layer type", "other norms", "other activation")
_SIGMOID = {"sigmoid": True, "min_sum": 1e-20}
_DEEPSEEK = Family(routing=_SIGMOID, traits=("scaled experts",))
_INDEXED = Family({"index_topk": 2048}, routing=_SIGMOID, traits=("sparse indexer", "scaled experts"))
_GEMMA: dict[str, Any] = {"norms": "sandwich", "norm_offset": 1.0, "scaled_embedding": True}
_GRANITE = Family(traits=("scaled embeddings",))
_SLIDING_BY_FOUR = {"sliding_window_pattern": 4}

FAMILIES: dict[str, Family] = {
    "llama": Family(executed=True),
    "mistral": Family(attention_bias=False, sliding="all", executed=True),
    "mixtral": Family(attention_bias=False, sliding="all", executed=True),
    "ministral3": Family(attention_bias=False, sliding="all", executed=True),
    "qwen2": Family({"max_window_layers": 28}, attention_bias=True, sliding="last", executed=True),
    "qwen3": Family({"max_window_layers": 28}, qk_norm=True, sliding="last", executed=True),
    "qwen3_moe": Family({"max_window_layers": 28}, qk_norm=True, sliding="last", executed=True),
    "qwen3_next": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "gpt_oss": Family(
        {"attention_bias": True}, sliding="even", traits=("attention sinks", "other activation"), executed=True
    ),
    "deepseek_v2": Family(routing={"normalized": False, "group_members": 1}, executed=True),
    "deepseek_v3": Family(routing=_SIGMOID, executed=True),
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "glm4_moe_lite": replace(_DEEPSEEK, executed=True),
    "kimi_k2": Family(routing=_SIGMOID, executed=True, hub_type="deepseek_v3"),
    "kimi_linear": _DEEPSEEK,
    "glm4_moe": Family(qk_norm=None, routing=_SIGMOID, traits=("partial rotary", "scaled experts"), executed=True),
    "minimax_m2": Family(
        attention_bias=False, qk_norm=True, wide_qk_norm=True, routing={"sigmoid": True}, executed=True,
        traits=("partial rotary", "scaled experts"),
    ),
    "nemotron_h": Family(gated_mlp=False, traits=("other activation", "scaled experts")),
    "phi3": Family(attention_bias=False, sliding="all", executed=True),
    "gemma3_text": Family(_GEMMA3, qk_norm=True, sliding="pattern", traits=_GEMMA_TRAITS, executed=True, **_GEMMA),
    "gemma4_text": Family(
        _GEMMA4, qk_norm=True, sliding="pattern", traits=_GEMMA_TRAITS, executed=True, norms="sandwich",
        scaled_embedding=True, value_norm=True,
    ),
    "cohere2": Family(
        {"tie_word_embeddings": True, **_SLIDING_BY_FOUR}, sliding="pattern",
        traits=("parallel blocks", "scaled embeddings", "rope by layer type", "other norms"),
        executed=True, norms=PARALLEL, layer_norm=True, interleaved_rope=True, full_rope=False,
    ),
    "ernie4_5": Family(attention_bias=False, executed=True, interleaved_rope=True),
    "ernie4_5_moe": Family(attention_bias=False, executed=True, interleaved_rope=True),
    "internlm3": Family(executed=True),
    "solar_open": replace(_DEEPSEEK, executed=True),
    "gemma2": Family(
        {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096}, sliding="even", executed=True, **_GEMMA,
        traits=("attention soft cap", "logit soft cap", "scaled embeddings", "other norms", "other activation"),
    ),
    "granite": replace(_GRANITE, executed=True),
    "granitemoe": replace(_GRANITE, executed=True),
    "granitemoehybrid": _GRANITE,
    "olmo2": Family(qk_norm=True, wide_qk_norm=True, traits=("other norms",), executed=True, norms="after"),
    "olmo3": Family(
        _SLIDING_BY_FOUR, qk_norm=True, wide_qk_norm=True, sliding="pattern",
        traits=("other norms", "rope by layer type"), executed=True, norms="after",
    ),
    "olmo_hybrid": Family(
        {"linear_allow_neg_eigval": True}, qk_norm=True, wide_qk_norm=True, full_every=4, traits=("other norms",),
        executed=True, norms="after", state_norms="before", state_eps=1e-5,
    ),
    "seed_oss": Family(attention_bias=True, executed=True),
    "smollm3": Family(traits=("rope by layer type",), executed=True),
}  # fmt: skip

# `model_type` of a model that has others inside, such as one of images and text: that of its `text_config`.
INNER_TYPES = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "mistral3": "mistral", "kimi_k25": "kimi_k2",
}  # fmt: skip

# Keys of one meaning, the first of which is present counts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "experts_per_token")
EXPERT_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size")
SHARED_WIDTH = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
)  # fmt: skip
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
LEADING_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")


def draft_head_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """A draft head's config.json with its layer's keys among the others, which vllm-project/speculators nests."""
    layer = keys.get("transformer_layer_config")
    return {**keys, **layer} if isinstance(layer, dict) else dict(keys)


def mtp_layers_of(keys: Mapping[str, Any]) -> int:
    """Layers of multi-token prediction that a config.json has."""
    parts = keys, keys.get("text_config")
    counts = (part.get(name) for part in parts if isinstance(part, dict) for name in MTP_LAYERS)
    return next((count for count in counts if isinstance(count, int) and count > 0), 0)


MAMBA_HEADS = ("mamba_num_heads", "mamba_n_heads")
MAMBA_HEAD_DIM = ("mamba_head_dim", "mamba_d_head")
MAMBA_GROUPS = ("n_groups", "mamba_n_groups")
MAMBA_STATE = ("ssm_state_size", "mamba_d_state")
MAMBA_TAPS = ("conv_kernel", "mamba_d_conv")

# Kinds of a layer by its entry in `layer_types`: how it mixes tokens, and its MLP ("" for what other keys say).
LAYER_KINDS = {
    "full_attention": ("full", ""), "attention": ("full", ""), "indexed_attention": ("full", ""),
    "sliding_attention": ("sliding", ""), "linear_attention": ("state", ""), "mamba": ("state", ""),
    "moe": ("none", "routed"), "mlp": ("none", "dense"),
}  # fmt: skip
PATTERN_KINDS = {"M": ("state", "none"), "*": ("full", "none"), "-": ("none", "dense"), "E": ("none", "routed")}
