"""GGUF files for tests, as llama.cpp's converter writes them."""

import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf_blocks import random_blocks
from tokenizers import pre_tokenizers
from torch import Tensor

# GGUF's names of a layer's tensors, and transformers'.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {"ffn_gate_inp": "mlp.gate", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
REST = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """The order of GGUF's query and key rows: the halves of a rotary pair are neighbours there."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def neighboured(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `interleaved`."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, merge: str = "+ -", kinds: Sequence[str] = (), rope_factors: Any = None) -> None:
    """A transformers Llama or Qwen3-MoE in float32, as llama.cpp's converter writes it.

    kinds: the types that its matrices get in turn, of `gguf_blocks.BLOCKS`, with random values, which the model then
    has, too. rope_factors: what frequencies of RoPE are divided by.
    """
    config, state = model.config, model.state_dict()
    routed = config.model_type == "qwen3_moe"
    writer = _writer(path, "qwen3moe" if routed else "llama", config, merge)
    names = {f"{name}.weight": f"{ours}.weight" for name, ours in REST.items()}
    if config.tie_word_embeddings:
        del names["output.weight"]
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{name}.weight": f"model.layers.{layer}.{ours}.weight" for name, ours in LAYER.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    if routed:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        heads = {}
        names = {name: ours for name, ours in names.items() if not re.search("ffn_(gate|up|down).w", name)}
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            names |= {f"blk.{layer}.{name}.weight": f"{prefix}{ours}.weight" for name, ours in EXPERTS.items()}
            gate, up = state[f"{prefix}mlp.experts.gate_up_proj"].chunk(2, dim=1)
            for name, stack in (("gate", gate), ("up", up), ("down", state[f"{prefix}mlp.experts.down_proj"])):
                writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", stack.contiguous().numpy())
    if rope_factors is not None:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_tensor("rope_freqs.weight", rope_factors)
    types = cycle(kinds)
    for name, ours in names.items():
        count = heads.get(name.split(".")[-2])
        tensor = state[ours] if count is None else interleaved(state[ours], count)
        if not kinds or tensor.dim() == 1:
            writer.add_tensor(name, tensor.numpy())
            continue
        kind = next(types)
        content, values = random_blocks(kind, *tensor.shape)
        writer.add_tensor(name, content, raw_dtype=gguf.GGMLQuantizationType[kind])
        state[ours].copy_(values if count is None else neighboured(values, count))
    _close(writer)


def _writer(path: Path, architecture: str, config: Any, merge: str = "+ -") -> gguf.GGUFWriter:
    """A file with the sizes and the tokenizer of a model, and no tensors yet."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(config.head_dim * share))
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: config.vocab_size - 1]
    writer.add_token_list([*letters, "+-"])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges([merge, merge])  # transformers 5.17 reads a list of one string as the string
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    return writer


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GPT_OSS = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.router",
}  # fmt: skip


def write_gpt_oss(path: Path, model: Any, kind: str) -> None:
    """A transformers gpt-oss as llama.cpp's converter writes it, in float32 but for its experts.

    kind: the type of these; the model then has their values, too.
    """
    config, state, experts = model.config, model.state_dict(), gguf.GGMLQuantizationType[kind]
    writer = _writer(path, "gpt-oss", config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    names = {f"{name}.weight": f"{ours}.weight" for name, ours in REST.items()}
    for layer in range(config.num_hidden_layers):
        place, prefix = f"blk.{layer}", f"model.layers.{layer}."
        names |= {f"{place}.{name}.weight": f"{prefix}{ours}.weight" for name, ours in GPT_OSS.items()}
        names |= {
            f"{place}.{name}.bias": f"{prefix}{ours}.bias" for name, ours in GPT_OSS.items() if "norm" not in name
        }
        names[f"{place}.attn_sinks.weight"] = f"{prefix}self_attn.sinks"
        gate_up, down = (state[f"{prefix}mlp.experts.{part}_proj"].mT for part in ("gate_up", "down"))
        biases = [state[f"{prefix}mlp.experts.{part}_proj_bias"] for part in ("gate_up", "down")]
        stacks = {"gate": gate_up[:, ::2], "up": gate_up[:, 1::2], "down": down}
        for (part, stack), bias in zip(stacks.items(), (biases[0][:, ::2], biases[0][:, 1::2], biases[1]), strict=True):
            content = gguf.quantize(stack.contiguous().numpy(), experts)
            stack.copy_(torch.from_numpy(gguf.dequantize(content, experts)))
            writer.add_tensor(f"{place}.ffn_{part}_exps.weight", content, raw_dtype=experts)
            writer.add_tensor(f"{place}.ffn_{part}_exps.bias", bias.contiguous().numpy())
    for name, ours in names.items():
        writer.add_tensor(name, state[ours].numpy())
    _close(writer)


DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
HYBRID_LAYER = {name: ours for name, ours in LAYER.items() if name != "ffn_norm"} | DELTA | {
    "post_attention_norm": "post_attention_layernorm", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip


def tiled(weight: Tensor, key_heads: int, value_heads: int) -> Tensor:
    """The order of GGUF's value heads along dimension 0: those of a key head are far from each other there."""
    return weight.unflatten(0, (key_heads, value_heads // key_heads, -1)).transpose(0, 1).reshape(weight.shape)


def write_qwen35(path: Path, model: Any) -> None:
    """A transformers Qwen3.5 in float32, as llama.cpp's converter writes it."""
    config, state = model.config, model.state_dict()
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    channels = 2 * key_heads * config.linear_key_head_dim
    writer = _writer(path, "qwen35", config)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_inner_size(value_heads * config.linear_value_head_dim)
    writer.add_full_attention_interval(config.num_hidden_layers)

    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_sections([2, 1, 1, 0])  # of the pairs that turn
    names = {f"{name}.weight": f"{ours}.weight" for name, ours in REST.items()}
    for layer in range(config.num_hidden_layers):
        place, prefix = f"blk.{layer}.", f"model.layers.{layer}."
        names |= {f"{place}{name}.weight": f"{prefix}{ours}.weight" for name, ours in HYBRID_LAYER.items()}
        names |= {f"{place}ssm_a": f"{prefix}linear_attn.A_log", f"{place}ssm_dt.bias": f"{prefix}linear_attn.dt_bias"}
    for name, ours in names.items():
        if ours not in state:  # of the other kind of layer
            continue
        tensor = state[ours]
        if name.endswith("norm.weight") and "ssm" not in name:
            tensor = tensor + 1
        if any(part in name for part in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")):
            tensor = tiled(tensor, key_heads, value_heads)
        if name.endswith("ssm_a"):
            tensor = -tensor.exp()
        if "ssm_out" in name:
            tensor = tiled(tensor.T, key_heads, value_heads).T
        if "attn_qkv" in name or "ssm_conv1d" in name:
            tensor = tensor.squeeze(1)
            tensor = torch.cat([tensor[:channels], tiled(tensor[channels:], key_heads, value_heads)])
        writer.add_tensor(name, tensor.contiguous().numpy())
    _close(writer)
