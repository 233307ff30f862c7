"""A checkpoint's weights on the host, from which the decoder's are made layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.linear import Dense
from ridgeplan.runtime.model.mlp import GatedMLP
from ridgeplan.runtime.model.packed_checkpoint import PackedTensors
from ridgeplan.runtime.model.weights import DecoderWeights, LayerWeights, tensors_of

Part = TypeVar("Part")
Take = Callable[..., Any]  # the tensor of a name, or a default


@dataclass(frozen=True, eq=False)
class StateDict:
    """A transformers state dict of a model of `shape`. source: where it was read from.

    All methods raise ModelError for weights that are not finite.
    """

    source: str
    shape: ModelShape
    tensors: dict[str, Tensor] | PackedTensors

    def decoder_weights(self, device: torch.device) -> DecoderWeights:
        """All weights on `device`; they are dropped here layer by layer, so that they are not held twice."""
        ends = self.ends(device)
        return dataclasses.replace(ends, layers=tuple(self.layers(device)))

    def ends(self, device: torch.device) -> DecoderWeights:
        """The embedding, the last norm and the head on `device`, without layers."""
        embedding = _own(self.tensors.pop("model.embed_tokens.weight"), device)
        head = self.tensors.pop("lm_head.weight", None)
        head_weight = embedding if self.shape.tied_embeddings or head is None else _own(head, device)
        norm = _own(self.tensors.pop("model.norm.weight"), device)
        return self._finite(DecoderWeights(embedding, (), norm, Dense(head_weight)))

    def layers(self, device: torch.device, keep: bool = False) -> Iterator[LayerWeights]:
        """The layers on `device`, one after another; unless `keep`, each is dropped here."""
        take = self.tensors.get if keep else self.tensors.pop
        for index in range(self.shape.layers):
            yield self._finite(_layer(self.shape, take, f"model.layers.{index}.", device))

    def _finite(self, part: Part) -> Part:
        for tensor in tensors_of(part):
            # The extremes tell, without a copy of the tensor.
            if tensor.is_floating_point() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
                raise ModelError(
                    f"the checkpoint {self.source} holds weights that are NaN or infinite as {tensor.dtype}"
                )
        return part


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy, as a single view would keep the whole mapped checkpoint in memory."""
    return tensor.to(device, copy=True)


def _layer(shape: ModelShape, take: Take, prefix: str, device: torch.device) -> LayerWeights:
    def fused(*names: str) -> Dense:
        weight = torch.cat([take(f"{prefix}{name}.weight") for name in names])
        biases = [take(f"{prefix}{name}.bias", None) for name in names]
        present = [bias for bias in biases if bias is not None]
        return Dense(weight.to(device), torch.cat(present).to(device) if present else None)

    def norm(name: str) -> Tensor:
        return _own(take(f"{prefix}{name}.weight"), device)

    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=_qk_norm(shape, take, prefix, device),
        output=fused("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        mlp=GatedMLP(fused("mlp.gate_proj", "mlp.up_proj"), fused("mlp.down_proj")),
    )


def _qk_norm(shape: ModelShape, take: Take, prefix: str, device: torch.device) -> Tensor | None:
    """Qwen3's norms, one row per query head and KV head, so that one operation applies both."""
    q_norm, k_norm = (take(f"{prefix}self_attn.{name}_norm.weight", None) for name in "qk")
    if q_norm is None:
        return None
    rows = [q_norm.expand(shape.q_heads, -1), k_norm.expand(shape.kv_heads, -1)]
    return torch.cat(rows).to(device)
