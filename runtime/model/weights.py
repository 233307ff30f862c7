"""The decoder's weights as plain tensors, with projections of the same input fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.runtime.model.linear import Dense, Linear
from ridgeplan.runtime.model.mlp import GatedMLP


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer. qkv: projections to queries, keys and values, stacked in this order.

    qk_norm: [q_heads + kv_heads, head_dim], for families that normalize queries and keys.
    """

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    mlp: GatedMLP

    def with_projections(self, change: Callable[[Linear], Linear]) -> LayerWeights:
        """The same layer with `change` applied to each projection."""
        return dataclasses.replace(
            self,
            qkv=change(self.qkv),
            output=change(self.output),
            mlp=self.mlp.with_projections(change),
        )


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """All weights; `head` may share the embedding's storage."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear

    @property
    def bytes(self) -> int:
        """Storage in bytes; tensors that share storage count once."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.tensors()}.values())

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> DecoderWeights:
        """The same weights with `change` applied to each tensor."""
        changed: DecoderWeights = _with_tensors(self, change)
        return changed

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in no particular order; some may share storage."""
        stack: list[object] = [self]
        while stack:
            item = stack.pop()
            if isinstance(item, Tensor):
                yield item
            elif isinstance(item, tuple):
                stack.extend(item)
            elif dataclasses.is_dataclass(item):
                stack.extend(vars(item).values())


def decoder_weights(shape: ModelShape, state: dict[str, Tensor], device: torch.device) -> DecoderWeights:
    """Fuses a transformers state dict, emptying it layer by layer so that it is not held twice."""
    embedding = _own(state.pop("model.embed_tokens.weight"), device)
    head = state.pop("lm_head.weight", None)
    layers = tuple(_layer(shape, state, f"model.layers.{index}.", device) for index in range(shape.layers))
    head_weight = embedding if shape.tied_embeddings or head is None else _own(head, device)
    return DecoderWeights(embedding, layers, _own(state.pop("model.norm.weight"), device), Dense(head_weight))


def _with_tensors(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, tuple):
        return tuple(_with_tensors(one, change) for one in item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in dataclasses.fields(item)]
        return dataclasses.replace(item, **{name: _with_tensors(getattr(item, name), change) for name in names})
    return item


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy, as a single view would keep the whole mapped checkpoint in memory."""
    return tensor.to(device, copy=True)


def _layer(shape: ModelShape, state: dict[str, Tensor], prefix: str, device: torch.device) -> LayerWeights:
    def fused(*names: str) -> Dense:
        weight = torch.cat([state.pop(f"{prefix}{name}.weight") for name in names])
        biases = [state.pop(f"{prefix}{name}.bias", None) for name in names]
        present = [bias for bias in biases if bias is not None]
        return Dense(weight.to(device), torch.cat(present).to(device) if present else None)

    def norm(name: str) -> Tensor:
        return _own(state.pop(f"{prefix}{name}.weight"), device)

    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=_qk_norm(shape, state, prefix, device),
        output=fused("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        mlp=GatedMLP(fused("mlp.gate_proj", "mlp.up_proj"), fused("mlp.down_proj")),
    )


def _qk_norm(shape: ModelShape, state: dict[str, Tensor], prefix: str, device: torch.device) -> Tensor | None:
    """Qwen3's norms, one row per query head and KV head, so that one operation applies both."""
    if f"{prefix}self_attn.q_norm.weight" not in state:
        return None
    q_norm, k_norm = (state.pop(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
    rows = [q_norm.expand(shape.q_heads, -1), k_norm.expand(shape.kv_heads, -1)]
    return torch.cat(rows).to(device)
