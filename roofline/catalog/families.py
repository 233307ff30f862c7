"""What families of models have beside the keys of their config.json: families.toml has a table for each `model_type`.

A table says what config.json leaves to the family's class in transformers. Everything else is read by key
(`config_json`), for families that have no table as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog.files import read_tables


@dataclass(frozen=True)
class Family:
    """defaults: of keys that config.json may leave out, those of the class in transformers. derived: of keys that it
    computes from others: a factor, a key and, if there is one, the key that it is divided by. attention_bias: whatever
    the file says. qk_norm: norms of each head's queries and keys. qk_norm_key: the key that says so instead.
    wide_qk_norm: of all heads together. sliding: which layers have the window, where `layer_types` is missing: "all",
    "even", "pattern" (all but every n-th), "last" (`max_window_layers` on), "none", "keys" (as these say, of a family
    without a table: all without other keys). output_gate: attention's output is gated. full_every: every n-th layer has
    full attention, the others a state. routing: fields of `layers.Routing` beside those that keys give. traits: of
    `model_shape.TRAITS`. trained_contexts: tokens that YaRN's factor refers to, of models with another limit, by that
    limit.

    What only the runtime reads: executed: whether it runs these models. unread: what its reader of checkpoints does not
    know, of families that are not executed. hub_type: the `model_type` of the class in
    transformers that has this structure, where transformers has none of the family's name. norms: where the norms of a
    layer stand, of NORM_NAMES. norm_offset: added to their weights. layer_norm: they are LayerNorms. interleaved_rope:
    RoPE turns each channel with the next one, not with the one half a head away. full_rope: layers of full attention
    have RoPE. scaled_embedding: embeddings are multiplied by the root of the hidden size. value_norm: each head's
    values are normalized, without a weight. state_norms: where norms of layers with a state stand; "": as elsewhere.
    state_eps: of norms of a state's output; 0: as elsewhere."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    attention_bias: bool | None = None
    qk_norm: bool = False
    qk_norm_key: str = ""
    wide_qk_norm: bool = False
    gated_mlp: bool = True
    sliding: str = "none"
    output_gate: bool = False
    full_every: int = 0
    routing: Mapping[str, Any] = field(default_factory=dict)
    traits: tuple[str, ...] = ()
    trained_contexts: Mapping[str, int] = field(default_factory=dict)
    executed: bool = False
    unread: str = ""
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


@cache
def families() -> Mapping[str, Family]:
    """Every table of families.toml, in the file's order."""
    rows: dict[str, Family] = {}
    for name, table in read_tables(Path(__file__).with_suffix(".toml")).items():
        like = rows[table.pop("like")] if "like" in table else Family()
        fields: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in table.items()}
        rows[name] = replace(like, **fields)
    return rows


@cache
def executable_architectures() -> tuple[str, ...]:
    """The families that the runtime executes."""
    return tuple(name for name, family in families().items() if family.executed)


def executed_instead(architecture: object) -> str:
    """What an error says of the executed families beside one that is not: near names, and where to see all."""
    near = ", ".join(get_close_matches(str(architecture)[:100], executable_architectures()))
    return f"{f'near it are {near}; ' if near else ''}`ridgeplan list models` shows what runs"


# `model_type` of a model that has others inside, such as one of images and text: that of its `text_config`.
INNER_TYPES = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "mistral3": "mistral", "kimi_k25": "kimi_k2",
}  # fmt: skip

# Keys of one meaning, the first of which is present counts.
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "experts_per_token")
EXPERT_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size")
SHARED_WIDTH = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
)  # fmt: skip
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
LEADING_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
SPELLINGS = (KV_HEADS, EXPERTS, EXPERTS_PER_TOKEN, EXPERT_WIDTH, SHARED_WIDTH, SHARED_EXPERTS, LEADING_DENSE)
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
