"""gpt-oss in GGUF files: configuration and tensors under transformers' names, experts in MXFP4 as they are stored.

transformers knows neither the names of the experts' tensors that llama.cpp writes nor their blocks. A block of a GGUF
file has its power of two ahead of 16 bytes, each of a number and the one 16 after it (block_mxfp4 of
ggml/src/ggml-common.h); transformers' `blocks` have neighbours in a byte, and `scales` apart.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from ridgeplan.roofline.catalog.gguf import KEPT_TYPE, GGUFHeader, config_of_header, keeps_experts

BLOCK_BYTES = 17
REST = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.router",
}  # fmt: skip


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
        tensors[_hub_name(name)] = _dequantized(stored[name])
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


def _hub_name(name: str) -> str:
    """transformers' name of a tensor. Raises ValueError for one that the family does not have."""
    *place, part, last = name.split(".")
    if not place and part in REST:
        return f"{REST[part]}.{last}"
    if place[:1] != ["blk"] or (part not in LAYER and part != "attn_sinks"):
        raise ValueError(f"tensor {name} has no known meaning")
    return f"model.layers.{place[1]}." + ("self_attn.sinks" if part == "attn_sinks" else f"{LAYER[part]}.{last}")


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
