"""Tensors of GGUF files under transformers' names: of gpt-oss, of Qwen3.5, and of models that stay as they are stored.

Of gpt-oss transformers knows neither the names of the experts' tensors that llama.cpp writes nor their blocks. A block
of a GGUF file has its power of two ahead of 16 bytes, each of a number and the one 16 after it (block_mxfp4 of
ggml/src/ggml-common.h); transformers' `blocks` have neighbours in a byte, and `scales` apart.

Qwen3.5 it reads only with another package, accelerate. llama.cpp's converter adds 1 to weights of norms, stores
-exp(A_log), and has the value heads of a key head far from each other, as transformers' reader says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ridgeplan.kernels.linear.gguf import gguf_weight
from ridgeplan.roofline.catalog.gguf import KEPT_TYPE, GGUFHeader, config_of_header, keeps_experts, weight_bits_of
from ridgeplan.roofline.catalog.gguf_types import BLOCK_FORMATS
from ridgeplan.roofline.catalog.layers import State
from ridgeplan.runtime.model.packed_weights import stored_name

BLOCK_BYTES = 17
NUMBERS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # of tensors without blocks, by their type
REST = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks",
}  # fmt: skip


DELTA = {
    "attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_alpha": "in_proj_a", "ssm_beta": "in_proj_b",
    "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj", "ssm_dt": "dt_bias", "ssm_a": "A_log",
}  # fmt: skip
DENSE = LAYER | {
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
HYBRID = DENSE | {name: f"linear_attn.{ours}" for name, ours in DELTA.items()}
BARE = ("attn_sinks", "ssm_dt", "ssm_a")  # tensors that transformers' names call neither weight nor bias


def hub_config(header: GGUFHeader) -> dict[str, Any]:
    """The keys of transformers' configuration."""
    keys = config_of_header(header)
    kept = {"quantization_config": {"quant_method": "mxfp4"}} if keeps_experts(header) else {}
    return {**keys, "rms_norm_eps": header.metadata["gpt-oss.attention.layer_norm_rms_epsilon"], **kept}


def hub_tensors(path: Path, header: GGUFHeader) -> dict[str, Tensor]:
    """All tensors of the file, those of experts in MXFP4 as uint8 if all experts are, and all others in float32."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors: dict[str, Tensor] = {}
    for name in [name for name in stored if "_exps." not in name]:
        tensors[_hub_name(name, LAYER)] = _dequantized(stored[name])
    layers = {match[0] for name in stored if (match := re.match(r"blk\.\d+\.", name))}
    for prefix in layers:
        gate, up, down = (stored[f"{prefix}ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        place = f"model.layers.{prefix[4:]}mlp.experts."
        if keeps_experts(header):
            parts = (_blocks(tensor) for tensor in (gate, up, down))
            for name, *triple in zip(("blocks", "scales"), *parts, strict=True):
                tensors[f"{place}gate_up_proj_{name}"] = _alternating(*triple[:2])
                tensors[f"{place}down_proj_{name}"] = triple[2]
        else:
            tensors[f"{place}gate_up_proj"] = _alternating(_dequantized(gate), _dequantized(up)).mT.contiguous()
            tensors[f"{place}down_proj"] = _dequantized(down).mT.contiguous()
        biases = (_dequantized(stored[f"{prefix}ffn_{part}_exps.bias"]) for part in ("gate", "up", "down"))
        gates, ups, tensors[f"{place}down_proj_bias"] = biases
        tensors[f"{place}gate_up_proj_bias"] = _alternating(gates, ups)
    return tensors


def hybrid_tensors(path: Path, state: State, layers: int) -> dict[str, Tensor]:
    """All tensors of a Qwen3.5 file in float32, without layers of multi-token prediction behind the first `layers`."""
    tensors: dict[str, Tensor] = {}
    for stored in gguf.GGUFReader(path).tensors:
        if stored.name.startswith("blk.") and int(stored.name.split(".")[1]) >= layers:
            continue
        name, tensor = _hub_name(stored.name, HYBRID), _dequantized(stored)
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensor -= 1
        part = name.partition("linear_attn.")[2].removesuffix(".weight")
        if part in ("in_proj_z", "in_proj_a", "in_proj_b", "dt_bias", "A_log"):
            tensor = _grouped(tensor, state)
        elif part == "out_proj":
            tensor = _grouped(tensor.T, state).T.contiguous()
        elif part in ("in_proj_qkv", "conv1d"):
            kept = 2 * state.key_width
            tensor = torch.cat([tensor[:kept], _grouped(tensor[kept:], state)])
        if part == "A_log":
            tensor = (-tensor).log()
        tensors[name] = tensor[:, None] if part == "conv1d" else tensor
    return tensors


SECOND_NORM = {"ffn_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_CONTEXT = 8192  # tokens that its RoPE is stretched from


def rope_parameters(path: Path, header: GGUFHeader) -> dict[str, Any] | None:
    """Llama 3's RoPE, of which files have only the divisors of its frequencies, which transformers' reader leaves out.

    None without them. Raises ValueError for divisors of other wavelengths than Llama 3.1 to 3.3 have.
    """
    stored = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == ROPE_FACTORS]
    if not stored:
        return None
    keys, divisors = config_of_header(header), _dequantized(stored[0])
    parameters = {
        "rope_type": "llama3", "rope_theta": keys["rope_theta"], "factor": float(divisors.max()),
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": LLAMA3_CONTEXT,
    }  # fmt: skip
    config = transformers.LlamaConfig(head_dim=2 * len(divisors), rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = keys["rope_theta"] ** (-torch.arange(len(divisors)) / len(divisors))
    if not torch.allclose(plain / scaled, divisors, rtol=1e-3):
        raise ValueError(f"{ROPE_FACTORS} is not of Llama 3's RoPE; supported: that of {LLAMA3_CONTEXT} tokens")
    return parameters


def stored_config(header: GGUFHeader) -> dict[str, Any]:
    """What a configuration says of weights that `stored_tensors` keeps, for `weight_bits_of_config`."""
    return {"quantization_config": {"quant_method": "gguf", "bits": asdict(weight_bits_of(header).stored)}}


def stored_tensors(path: Path, header: GGUFHeader) -> Iterator[dict[str, Tensor]]:
    """The tensors of a dense model's file, layer by layer: those of `BLOCK_FORMATS` as blocks, the others as numbers.

    Parts of blocks have the names of `stored_name`; numbers have the file's type. llama.cpp's converter makes
    neighbours of the halves of a rotary pair in Llama's queries and keys, and adds 1 to Gemma's weights of norms.
    """
    architecture = str(header.metadata["general.architecture"])
    keys = config_of_header(header)
    q_heads = keys["num_attention_heads"] if architecture == "llama" else None
    heads = {"q_proj": q_heads, "k_proj": q_heads and keys.get("num_key_value_heads", q_heads)}
    gemma = architecture == "gemma3"
    names = DENSE | (SANDWICH_NORMS if gemma else SECOND_NORM)
    read = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name != ROPE_FACTORS]
    for _, layer in groupby(sorted(read, key=_layer_of), key=_layer_of):
        tensors: dict[str, Tensor] = {}
        for tensor in layer:
            name = _hub_name(tensor.name, names)
            count = heads.get(name.split(".")[-2])
            if tensor.tensor_type not in BLOCK_FORMATS:
                dense = _dequantized(tensor) - int(gemma and name.endswith("norm.weight"))
                dense = dense.to(NUMBERS.get(tensor.tensor_type, torch.float32))
                tensors[name] = dense if count is None else _halves_apart(dense, count)
                continue
            weight = gguf_weight(int(tensor.tensor_type), torch.tensor(tensor.data))
            for part, values in weight.parts.items():
                ordered = values if count is None else _halves_apart(values, count)
                tensors[stored_name(name, weight.kind, part)] = ordered.contiguous()
        yield tensors


def _layer_of(tensor: Any) -> int:
    """The number of a tensor's layer; -1 for the others."""
    return int(tensor.name.split(".")[1]) if tensor.name.startswith("blk.") else -1


def _halves_apart(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys whose rotary pairs are neighbours, with the first halves of all pairs ahead."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _grouped(rows: Tensor, state: State) -> Tensor:
    """Rows of value heads, [heads x rows of one, ...], with those of each key head together."""
    parts = rows.unflatten(0, (state.value_heads // state.key_heads, state.key_heads, -1))
    return parts.transpose(0, 1).flatten(0, 2)


def _hub_name(name: str, layer: Mapping[str, str]) -> str:
    """transformers' name of a tensor. Raises ValueError for one that the family does not have."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)(?:\.(weight|bias))?", name)
    index, part, last = match.groups() if match else (None, name, None)
    known = REST if index is None else layer
    if part not in known:
        raise ValueError(f"tensor {name} has no known meaning")
    hub_name = known[part] if index is None else f"model.layers.{index}.{known[part]}"
    return hub_name if part in BARE else f"{hub_name}.{last}"


def _dequantized(tensor: Any) -> Tensor:
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    return torch.tensor(values, dtype=torch.float32)


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gates and ups in turn, along dimension 1."""
    return torch.stack([gate, up], dim=2).flatten(1, 2)


def _blocks(tensor: Any) -> tuple[Tensor, Tensor]:
    """blocks [experts, outputs, blocks of a row, 16] and scales [experts, outputs, blocks of a row], uint8."""
    assert tensor.tensor_type == KEPT_TYPE, "all experts are in MXFP4"
    content = torch.tensor(tensor.data).unflatten(-1, (-1, BLOCK_BYTES))
    scales, codes = content[..., 0], content[..., 1:]
    numbers = torch.cat([codes & 15, codes >> 4], dim=-1)
    return numbers[..., ::2] | numbers[..., 1::2] << 4, scales.contiguous()
