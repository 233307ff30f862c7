"""A pass of drafts through a Llama's modules in vLLM, with this package's kernels in place of vLLM's small ones.

Norms add the residual, the rotary embedding writes keys and values to the open pages, and the product of gate and up
applies SwiGLU. Each lets the next kernel start early, so that products read weights while they end. Other products are
vLLM's modules, with their biases and collectives.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ridgeplan.kernels.layer import add_rms_norm, rope_append
from ridgeplan.kernels.linear import linear_quantized
from ridgeplan.kernels.linear.weights import Int4Weight
from ridgeplan.runtime.vllm.attention import CodesMetadata
from ridgeplan.runtime.vllm.pages import LayerPages

FUSED = ("LlamaForCausalLM",)  # vLLM's classes whose modules `fused_pass` runs


def is_fused(target: Any) -> bool:
    """Whether `fused_pass` computes what `target` does: a Llama whose rotary embedding turns halves of whole heads."""
    if type(target).__name__ not in FUSED:
        return False
    rotaries = [layer.self_attn.rotary_emb for layer in target.model.layers]
    return all(rotary.is_neox_style and rotary.rotary_dim == rotary.head_size for rotary in rotaries)


def fused_pass(target: Any, tokens: Tensor, positions: Tensor, metadata: CodesMetadata) -> Tensor:
    """The last norm's output [rows, hidden] of tokens [rows] at positions [rows], one of each row of the metadata."""
    model, steps, rows = target.model, metadata.steps, len(tokens)
    assert steps is not None, "drafts are steps"
    hidden, update = model.embed_input_ids(tokens), None
    first = model.layers[0].self_attn
    cos, sin = (x.float().contiguous()[:, None] for x in first.rotary_emb.cos_sin_cache[positions].chunk(2, -1))
    slots = _slots_of_all(metadata.slots, _pages(first)).long()[:, None]
    for layer in model.layers:
        attention, pages = layer.self_attn, _pages(layer.self_attn)
        hidden, normed = _norm(layer.input_layernorm, hidden, update)
        qkv, impl = attention.qkv_proj(normed)[0][:, None], attention.attn.impl
        query = rope_append(qkv, (cos, sin), *pages.slots_of_all(rows), slots, impl.num_heads)
        update = attention.o_proj(impl.attend(pages, steps, query, True).flatten(1))[0]
        hidden, normed = _norm(layer.post_attention_layernorm, hidden, update)
        update = _mlp(layer.mlp, normed)
    return _norm(model.norm, hidden, update)[1]


def _pages(attention: Any) -> LayerPages:
    return attention.attn.impl.pages(attention.attn.kv_cache)


def _slots_of_all(slots: Tensor, pages: LayerPages) -> Tensor:
    """Slots as in `LayerPages.slots_of_all`; those of rows without a draft, negative ones, in the last buffer."""
    buffers, kv_heads, count, _ = pages.keys.shape
    slots = slots.where(slots >= 0, (buffers - 1) * count)
    return slots + slots // count * ((kv_heads - 1) * count)


def _norm(norm: Any, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
    return add_rms_norm(hidden, update, norm.weight, norm.variance_epsilon)


def _mlp(mlp: Any, normed: Tensor) -> Tensor:
    """vLLM's MLP; with upper planes of this package's weights, SwiGLU within the first product."""
    product = mlp.gate_up_proj
    if getattr(product, "ridgeplan_upper", None) is None or product.bias is not None:
        update: Tensor = mlp(normed)
        return update
    group, outputs = product.ridgeplan_sizes
    weight = Int4Weight(product.ridgeplan_upper, group, normed.shape[-1], outputs)
    activated: Tensor = mlp.down_proj(linear_quantized(normed, weight, gated=True))[0]
    return activated
