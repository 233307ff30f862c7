"""Tensors of GGUF files under transformers' names, layer by layer: blocks that products read, numbers, and experts.

llama.cpp's converter makes neighbours of the halves of a rotary pair in Llama's queries and keys, and adds 1 to weights
of norms of Gemma and Qwen3.5. Of the latter it stores -exp(A_log), and has the value heads of a key head far from each
other.

A block of gpt-oss's experts has its power of two ahead of 16 bytes, each of a number and the one 16 after it
(block_mxfp4 of ggml/src/ggml-common.h); transformers' `blocks` have neighbours in a byte, and `scales` apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ridgeplan.kernels.linear.gguf import SLAB_ELEMENTS, GgufWeight, gguf_weight, stacked
from ridgeplan.roofline.catalog.families import NORM_NAMES, Family, families
from ridgeplan.roofline.catalog.gguf import (
    KEPT_TYPE,
    GGUFHeader,
    config_of_header,
    keeps_experts,
    stored_as,
    weight_bits_of,
)
from ridgeplan.roofline.catalog.gguf_types import BLOCK_FORMATS
from ridgeplan.roofline.catalog.layers import State
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.runtime.model.packed_weights import stored_name

BLOCK_BYTES = 17
NUMBERS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # of tensors without blocks, by their type
REST = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
DELTA = {
    "attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_alpha": "in_proj_a", "ssm_beta": "in_proj_b",
    "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj", "ssm_dt": "dt_bias", "ssm_a": "A_log",
}  # fmt: skip
LAYER = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_sinks": "self_attn.sinks",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    **{name: f"linear_attn.{ours}" for name, ours in DELTA.items()},
}  # fmt: skip
BARE = ("attn_sinks", "ssm_dt", "ssm_a")  # tensors that transformers' names call neither weight nor bias


def hub_config(header: GGUFHeader) -> dict[str, Any]:
    """The keys of transformers' configuration."""
    keys, architecture = config_of_header(header), header.metadata["general.architecture"]
    kept = {"quantization_config": {"quant_method": "mxfp4"}} if keeps_experts(header) else {}
    return {**keys, "rms_norm_eps": header.metadata[f"{architecture}.attention.layer_norm_rms_epsilon"], **kept}


def _names(family: Family) -> dict[str, str]:
    """transformers' names of a layer's tensors."""
    router = "mlp.router" if "biased experts" in family.traits else "mlp.gate"
    return LAYER | {"ffn_norm": NORM_NAMES[family.norms][1], "ffn_gate_inp": router}


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
    """What a configuration says of weights of which `file_tensors` keeps blocks, for `weight_bits_of_config`."""
    if not keeps_blocks(header):
        return {}
    return {"quantization_config": {"quant_method": "gguf", "bits": asdict(weight_bits_of(header).stored)}}


def keeps_blocks(header: GGUFHeader) -> bool:
    """Whether matrices of `BLOCK_FORMATS` stay in blocks: those of a dense model."""
    return stored_as(header).blocks


def file_tensors(path: Path, header: GGUFHeader, shape: ModelShape) -> Iterator[dict[str, Tensor]]:
    """The tensors of a file, a layer at a time; without layers of multi-token prediction behind those of `shape`.

    A dense model's blocks are in parts with the names of `stored_name`, its numbers of the file's type; gpt-oss's
    experts are uint8 if all are in MXFP4. All else is decoded to float32, as values of fewer bits need more than 16.
    """
    keeps, family = keeps_blocks(header), families()[stored_as(header).family]
    names, change = _names(family), _change(header, shape, family.norm_offset)
    read = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name != ROPE_FACTORS]
    read = sorted((tensor for tensor in read if _layer_of(tensor) < shape.layers), key=_layer_of)
    for index, layer in groupby(read, key=_layer_of):
        tensors: dict[str, Tensor] = {}
        experts: dict[str, Any] = {}
        for tensor in layer:
            if "_exps." in tensor.name:
                experts[tensor.name.partition("ffn_")[2]] = tensor
                continue
            name, kind = _hub_name(tensor.name, names), int(tensor.tensor_type)
            if keeps and kind in BLOCK_FORMATS:
                for part, values in _weight(tensor).parts.items():
                    tensors[stored_name(name, kind, part)] = change(name, values).contiguous()
            else:
                number = NUMBERS.get(kind, torch.float32) if keeps else torch.float32
                tensors[name] = change(name, _dequantized(tensor)).to(number).contiguous()
        if experts:
            place = f"model.layers.{index}.mlp.experts."
            tensors |= {place + name: each for name, each in _experts(experts, header).items()}
        yield tensors


def _weight(tensor: Any) -> GgufWeight:
    """A tensor's blocks, of which few rows are taken apart at a time: that takes several bytes per weight."""
    rows, kind = max(1, SLAB_ELEMENTS // int(tensor.shape[0])), int(tensor.tensor_type)
    slabs = (torch.tensor(tensor.data[first : first + rows]) for first in range(0, len(tensor.data), rows))
    (weight,) = stacked(gguf_weight(kind, slab) for slab in slabs)
    assert isinstance(weight, GgufWeight), "of one type"
    return weight


def _experts(stored: Mapping[str, Any], header: GGUFHeader) -> dict[str, Tensor]:
    """The stacks of a layer's experts. Gates and ups of gpt-oss alternate, and those in float32 are transposed."""
    gate, up, down = (stored[f"{part}_exps.weight"] for part in ("gate", "up", "down"))
    if "gate_exps.bias" not in stored:
        return {
            "gate_up_proj": torch.cat([_dequantized(gate), _dequantized(up)], dim=1),
            "down_proj": _dequantized(down),
        }
    gates, ups, downs = (_dequantized(stored[f"{part}_exps.bias"]) for part in ("gate", "up", "down"))
    tensors = {"gate_up_proj_bias": _alternating(gates, ups), "down_proj_bias": downs}
    if keeps_experts(header):
        parts = (_blocks(tensor) for tensor in (gate, up, down))
        for name, *triple in zip(("blocks", "scales"), *parts, strict=True):
            tensors |= {f"gate_up_proj_{name}": _alternating(*triple[:2]), f"down_proj_{name}": triple[2]}
        return tensors
    both = _alternating(_dequantized(gate), _dequantized(up))
    return tensors | {"gate_up_proj": both.mT.contiguous(), "down_proj": _dequantized(down).mT.contiguous()}


def _change(header: GGUFHeader, shape: ModelShape, offset: float) -> Callable[[str, Tensor], Tensor]:
    """What undoes the changes of llama.cpp's converter to a tensor, or a part of its blocks, by transformers' name."""
    heads = {"q_proj": shape.q_heads, "k_proj": shape.kv_heads} if stored_as(header).neighbours else {}
    state = shape.states[0][0] if shape.states else None

    def change(name: str, tensor: Tensor) -> Tensor:
        count, part = heads.get(name.split(".")[-2]), name.partition("linear_attn.")[2].removesuffix(".weight")
        if count is not None:
            return _halves_apart(tensor, count)
        if offset and name.endswith("norm.weight") and not part:
            return tensor - offset
        return _state_tensor(part, tensor, state) if part and state else tensor

    return change


def _state_tensor(part: str, tensor: Tensor, state: State) -> Tensor:
    """A tensor of Qwen3.5's recurrent state."""
    if part in ("in_proj_z", "in_proj_a", "in_proj_b", "dt_bias", "A_log"):
        tensor = _grouped(tensor, state)
    elif part == "out_proj":
        tensor = _grouped(tensor.T, state).T
    elif part in ("in_proj_qkv", "conv1d"):
        kept = 2 * state.key_width
        tensor = torch.cat([tensor[:kept], _grouped(tensor[kept:], state)])
    if part == "A_log":
        tensor = (-tensor).log()
    return tensor[:, None] if part == "conv1d" else tensor


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
        raise ValueError(f"tensor {brief(name)} has no known meaning")
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
