"""Checkpoints that are read tensor by tensor; packed weights (GPTQ, AWQ, compressed-tensors, FP8) are decoded.

Blocks of a GGUF file, which its conversion keeps, stay so or are decoded.

Every function takes the tensors of a linear layer by the suffix of their names, and returns [outputs, inputs]. Models
in other layouts and sizes are refused by their configuration (`DECODED_BITS` of roofline/catalog/model_shape.py).
Layouts are those that AutoGPTQ, AutoAWQ, compressed-tensors and DeepSeek's fp8 checkpoints publish.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ridgeplan.kernels.linear.gguf import PARTS, GgufWeight
from ridgeplan.roofline.catalog.gguf_types import BLOCK_FORMATS
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.runtime.errors import ModelError, failures_as

Parts = Mapping[str, Tensor]
Settings = Mapping[str, Any]  # `quantization_config` of the checkpoint's config.json
# Beginnings of names of a language model inside another, and those of one by itself.
INNER_NAMES = {r"^language_model\.lm_head\.": "lm_head.", r"^(?:model\.)?language_model\.(?:model\.)?": "model."}
WORD_BITS = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each 4 bits of a word


def decode_gptq(parts: Parts, settings: Settings) -> Tensor:
    """qweight [inputs / pack, outputs]; qzeros [groups, outputs / pack]; scales [groups, outputs]; g_idx [inputs].

    Zeros are stored less 1, but not by `gptq_v2`.
    """
    bits = int(settings["bits"])
    codes, zeros = _fields(parts["qweight"].t(), bits).t(), _fields(parts["qzeros"], bits)
    zeros = zeros + (0 if settings.get("checkpoint_format") == "gptq_v2" else 1)
    group = parts["g_idx"].long() if "g_idx" in parts else _groups(len(codes), len(zeros))
    return ((codes - zeros[group]) * parts["scales"].float()[group]).t()


def decode_awq(parts: Parts, settings: Settings) -> Tensor:
    """qweight [inputs, outputs / 8]; qzeros [groups, outputs / 8]; scales [groups, outputs]."""
    order = torch.tensor(AWQ_COLUMNS).argsort()

    def columns(words: Tensor) -> Tensor:
        return _fields(words, 4).unflatten(1, (-1, 8))[:, :, order].flatten(1)

    codes, zeros = columns(parts["qweight"]), columns(parts["qzeros"])
    group = _groups(len(codes), len(zeros))
    return ((codes - zeros[group]) * parts["scales"].float()[group]).t()


def decode_compressed(parts: Parts, settings: Settings) -> Tensor:
    """compressed-tensors: weight_packed [outputs, inputs / pack], or weight as int8 or fp8 [outputs, inputs].

    weight_scale [outputs, groups], [outputs, 1], [1] or per block; weight_zero_point like it, packed along the outputs
    if the weight is packed. Packed codes are stored with their middle added.
    """
    scale = parts["weight_scale"].float()
    # All groups store weights the same way, as roofline/catalog/weight_formats.py has checked.
    stored = next(iter(settings["config_groups"].values()))["weights"]
    if stored.get("strategy") == "block":
        return parts["weight"].float() * _over_blocks(scale, stored["block_structure"], parts["weight"])
    scale = scale if scale.dim() == 2 else scale.reshape(-1, 1)
    if "weight_packed" not in parts:
        codes, zeros = parts["weight"].float(), parts.get("weight_zero_point", torch.zeros(())).float()
        zeros = zeros if zeros.dim() == 2 else zeros.reshape(-1, 1)
    else:
        outputs, inputs = parts["weight_shape"].tolist()
        bits = int(stored["num_bits"])
        codes = _fields(parts["weight_packed"], bits)[:, :inputs]
        zeros = torch.full((1, 1), float(1 << bits - 1))
        if "weight_zero_point" in parts:
            zeros = _fields(parts["weight_zero_point"].t(), bits).t()[:outputs]
    group = parts["weight_g_idx"].long() if "weight_g_idx" in parts else _groups(codes.shape[1], scale.shape[1])
    zeros = zeros.expand(-1, scale.shape[1])
    return (codes - zeros[:, group]) * scale[:, group]


def decode_fp8(parts: Parts, settings: Settings) -> Tensor:
    """weight [outputs, inputs] in fp8; weight_scale_inv per block, or weight_scale of the whole or of each output."""
    weight = parts["weight"].float()
    if "weight_scale_inv" not in parts:
        scale = parts["weight_scale"].float()
        return weight * (scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(()))
    block = settings.get("weight_block_size") or weight.shape
    return weight * _over_blocks(parts["weight_scale_inv"].float(), block, weight)


# By `quant_method`: the decoder of a module, and the tensors that mark a quantized module.
Decoder = Callable[[Parts, Settings], Tensor]
DECODERS: dict[str, tuple[Decoder, tuple[str, ...]]] = {
    "gptq": (decode_gptq, ("qweight",)),
    "awq": (decode_awq, ("qweight",)),
    "compressed-tensors": (decode_compressed, ("weight_scale",)),
    "fp8": (decode_fp8, ("weight_scale_inv", "weight_scale")),
}


def _fields(words: Tensor, bits: int) -> Tensor:
    """Unsigned fields of `bits` bits of int32 words [rows, n], lowest first: float32 [rows, n * 32 / bits]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words[:, :, None] >> shifts & (1 << bits) - 1).flatten(1).float()


def _groups(inputs: int, groups: int) -> Tensor:
    """The group of each input. Raises ValueError where groups are not of one size."""
    if groups < 1 or inputs % groups:
        raise ValueError(f"{inputs} inputs have {groups} scales; allowed: groups of one size")
    return torch.arange(inputs) // (inputs // groups)


def _over_blocks(scale: Tensor, block: Sequence[int], weight: Tensor) -> Tensor:
    """The scale of every weight, from one for each block of outputs and inputs, of which the last may be cut."""
    for axis, size in enumerate(block):
        scale = scale.repeat_interleave(int(size), dim=axis).narrow(axis, 0, weight.shape[axis])
    return scale


@dataclass(frozen=True, eq=False)
class StoredTensors:
    """A checkpoint's tensors by name, read and decoded on each access. Nothing is cached, to save memory.

    shape: whose sizes matrices have; None for any. files: the file of every stored tensor, and its name there.
    keeps_blocks: whether a GGUF file's weights stay in blocks. unread: tensors that were not read yet.
    """

    source: str
    shape: ModelShape | None
    dtype: torch.dtype
    settings: Settings
    files: dict[str, tuple[Path, str]]
    keeps_blocks: bool = False
    unread: set[str] = field(default_factory=set)

    @classmethod
    def open(
        cls, source: str, shape: ModelShape | None, dtype: torch.dtype, settings: Settings, files: Sequence[Path],
        *, keeps_blocks: bool = False,
    ) -> StoredTensors:  # fmt: skip
        """The tensors in safetensors `files`. Raises ModelError for one that cannot be read."""
        places: dict[str, tuple[Path, str]] = {}
        with failures_as(f"cannot load the model {source}"):
            for path in files:
                with safe_open(path, framework="pt") as file:
                    places |= {_unnested(name): (path, name) for name in list(file.keys())}
        return cls(source, shape, dtype, settings, places, keeps_blocks, set(places))

    def get(self, name: str, *default: Any) -> Any:
        """The tensor, or a default where there is none. Raises ModelError for a missing or a misshapen one."""
        tensor = self._tensor(name)
        if tensor is not None:
            sizes = expected_sizes(self.shape, name) if self.shape else None
            if sizes and tuple(tensor.shape) != sizes:
                raise ModelError(
                    f"in the checkpoint {self.source} the weight {name} is {list(tensor.shape)}; its config.json needs "
                    f"{list(sizes)}"
                )
            return tensor if isinstance(tensor, GgufWeight) or tensor.dtype == torch.uint8 else tensor.to(self.dtype)
        if default:
            return default[0]
        raise ModelError(f"the checkpoint {self.source} lacks the weight {name}")

    pop = get  # nothing is cached that could be dropped

    def _tensor(self, name: str) -> Tensor | GgufWeight | None:
        kind = next((kind for kind in BLOCK_FORMATS if stored_name(name, kind, "scales") in self.files), None)
        if kind is not None:
            names = {part: stored_name(name, kind, part) for part in PARTS}
            weight = GgufWeight(kind, **{part: self._read(each) for part, each in names.items() if each in self.files})
            return weight if self.keeps_blocks else weight.dense(self.dtype)
        module, _, last = name.rpartition(".")
        method = self.settings.get("quant_method", "")
        decode, marks = DECODERS.get(method, (decode_fp8, ()))  # others stay as they are stored
        if last == "weight" and any(f"{module}.{mark}" in self.files for mark in marks):
            stored = [part for part in self.files if part.rpartition(".")[0] == module]
            parts = {part.rpartition(".")[2]: self._read(part) for part in stored}
            with failures_as(f"cannot decode {name} of the checkpoint {self.source}"):
                return decode(parts, self.settings)
        return self._read(name) if name in self.files else None

    def _read(self, name: str) -> Tensor:
        """A copy, which does not keep the whole file mapped."""
        self.unread.discard(name)
        path, stored = self.files[name]
        with failures_as(f"cannot load the model {self.source}"), safe_open(path, framework="pt") as file:
            return file.get_tensor(stored).clone()


def _unnested(name: str) -> str:
    """A tensor's name in a language model by itself."""
    for inside, outside in INNER_NAMES.items():
        name = re.sub(inside, outside, name)
    return name


def stored_name(name: str, kind: int, part: str) -> str:
    """The tensor of one of the `PARTS` of a weight that a GGUF file stores in type `kind`."""
    return f"{name}.{kind}.{part}"


def expected_sizes(shape: ModelShape, name: str) -> tuple[int, ...] | None:
    """The sizes of a matrix, outputs and inputs, a bias or a norm, by its name; None for what is not known."""
    hidden, wide = shape.hidden, shape.intermediate
    output = shape.q_heads * (shape.v_head_dim or shape.head_dim)
    if ".experts." in name:
        wide = shape.expert_intermediate
    elif ".shared_expert" in name:
        wide = shape.shared_experts_intermediate
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    sizes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (shape.vocab, hidden), "lm_head": (shape.vocab, hidden), "q_proj": (shape.q_width, hidden),
        "k_proj": (shape.kv_width, hidden), "v_proj": (shape.kv_width, hidden), "o_proj": (hidden, output),
        "gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide),
        "w1": (wide, hidden), "w3": (wide, hidden), "w2": (hidden, wide), "model.norm": (hidden,),
        **{f"{norm}_layernorm": (hidden,) for norm in norms},
        **({} if shape.wide_qk_norm else {"q_norm": (shape.head_dim,), "k_norm": (shape.head_dim,)}),
    }  # fmt: skip
    module, _, last = name.rpartition(".")
    known = sizes.get(module) or sizes.get(module.rpartition(".")[2])
    return None if known is None or last not in ("weight", "bias") else known if last == "weight" else known[:1]
