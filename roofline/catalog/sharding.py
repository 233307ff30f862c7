"""The share of a model that one GPU of several holds: a shape of its own, which all formulas take.

Tensor parallelism shards heads, MLPs and the vocabulary (Megatron-LM, section 3); what does not divide evenly is that
of the GPU with most. A KV head is on several GPUs where there are fewer heads than GPUs, and so is MLA's latent row
on all of them. Pipeline parallelism shards layers. Data parallelism replicates attention and divides the batch;
experts are sharded over all of its ranks, each expert by its width or, with expert parallelism, whole experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

from ridgeplan.roofline.catalog.layers import MLP, Attention, State, counted, trusted
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.parallel import SINGLE, Parallel

VOCABULARY_MULTIPLE = 64  # to which vLLM pads the vocabulary before it shards it
FP8_BLOCK = 128  # rows and columns of the blocks of published fp8 checkpoints, which vLLM and SGLang do not cut


@dataclass(frozen=True, kw_only=True)
class ShardedShape(ModelShape):
    """What one GPU holds of `whole`: a stage of the pipeline, as a shape. Numbers of layers may be fractions."""

    whole: ModelShape
    degrees: Parallel

    @property
    def parallel(self) -> Parallel:
        """The degrees."""
        return self.degrees

    @property
    def blocks(self) -> Any:
        """Residual blocks of a stage."""
        return self.whole.blocks * self._stage_share

    @property
    def _stage_share(self) -> float:
        return self.layers / self.whole.layers

    @cached_property
    def _layers_by_kind(self) -> tuple[Any, Any, Any]:
        shards: tuple[Callable[[Any, Parallel], Any], ...] = (_attention, _state, _mlp)
        kinds = (self.whole.attentions, self.whole.states, self.whole.mlps)
        return tuple(
            counted((shard(layer, self.degrees), self._count(count)) for layer, count in kind)
            for shard, kind in zip(shards, kinds, strict=True)
        )  # type: ignore[return-value]

    def _count(self, layers: int) -> Any:
        """Layers of a kind on a stage, of which all have an even mix."""
        return layers if self.degrees.pipeline == 1 else layers * self._stage_share


@cache
def shard(shape: ModelShape, parallel: Parallel) -> ModelShape:
    """The share of a whole model that one GPU holds; the shape itself on a single GPU."""
    if parallel == SINGLE:
        return shape
    tensor, ranks = parallel.tensor, parallel.expert_ranks
    padded = VOCABULARY_MULTIPLE * _most(shape.vocab, VOCABULARY_MULTIPLE) if tensor > 1 else shape.vocab
    sizes = {item.name: getattr(shape, item.name) for item in fields(ModelShape)}
    sharded = {
        "layers": _most(shape.layers, parallel.pipeline),
        "q_heads": _most(shape.q_heads, tensor),
        "kv_heads": _most(shape.kv_heads, tensor),
        "intermediate": _most(shape.intermediate, tensor),
        "vocab": _most(padded, tensor),
        "shared_experts_intermediate": _most(shape.shared_experts_intermediate, tensor),
        # The first stage has the embedding and the last one the head.
        "tied_embeddings": shape.tied_embeddings or parallel.pipeline > 1,
    }
    if shape.is_moe:
        sharded |= _experts(shape.experts, shape.experts_per_token, shape.expert_intermediate, parallel, ranks)
    return trusted(ShardedShape, **sizes | sharded, whole=shape, degrees=parallel)


def uneven(shape: ModelShape, parallel: Parallel) -> str | None:
    """What vLLM refuses to shard, as it does not divide evenly; None if nothing."""
    heads = {attention.q_heads for attention, _ in shape.attentions}
    kv_heads = {attention.kv_heads for attention, _ in shape.attentions if not attention.is_latent}
    expert_parts = 1 if parallel.expert else parallel.expert_ranks
    mlps = [_mlp(mlp, parallel) for mlp, _ in shape.mlps]
    widths = [width for mlp in mlps for width in (mlp.intermediate, mlp.shared_intermediate, mlp.expert_intermediate)]
    in_blocks = shape.weight_bits.format == "fp8" and shape.weight_bits.mlp > 8  # with the bits of their scales
    checks = {
        f"{min(heads, default=0)} query heads": any(count % parallel.tensor for count in heads),
        f"{min(kv_heads, default=0)} KV heads": any(
            count % parallel.tensor and parallel.tensor % count for count in kv_heads
        ),
        f"recurrent states of {len(shape.states)} kinds": any(
            state.key_heads % parallel.tensor or state.value_heads % parallel.tensor for state, _ in shape.states
        ),
        f"experts of width {shape.expert_intermediate}": shape.is_moe and shape.expert_intermediate % expert_parts,
        f"MLPs in fp8 blocks of {FP8_BLOCK}": in_blocks and any(width % FP8_BLOCK for width in widths),
        f"{shape.experts} experts": parallel.expert and shape.experts % parallel.expert_ranks,
        f"{shape.layers} layers": parallel.pipeline > shape.layers,
    }
    return next((name for name, fails in checks.items() if fails), None)


def _most(count: int, parts: int) -> int:
    """What the part with most has of a number of things."""
    return -(-count // parts)


def _experts(experts: int, per_token: float, width: int, parallel: Parallel, ranks: int) -> dict[str, Any]:
    """A GPU's share of experts: all of them, narrower, or whole ones, of which a token uses as large a share."""
    if not parallel.expert:
        return {"expert_intermediate": _most(width, ranks)}
    held = _most(experts, ranks)
    return {"experts": held, "experts_per_token": per_token * held / experts}


def _attention(attention: Attention, parallel: Parallel) -> Attention:
    tensor = parallel.tensor
    heads = {name: _most(getattr(attention, name), tensor) for name in ("q_heads", "kv_heads", "gate_width")}
    return trusted(Attention, **vars(attention) | heads)


def _state(state: State, parallel: Parallel) -> State:
    heads = {name: _most(getattr(state, name), parallel.tensor) for name in ("key_heads", "value_heads")}
    return trusted(State, **vars(state) | heads)


def _mlp(mlp: MLP, parallel: Parallel) -> MLP:
    widths: dict[str, Any] = {
        name: _most(getattr(mlp, name), parallel.tensor) for name in ("intermediate", "shared_intermediate")
    }
    if mlp.experts:
        sizes = mlp.experts, mlp.experts_per_token, mlp.expert_intermediate
        widths |= _experts(*sizes, parallel, parallel.expert_ranks)
    return trusted(MLP, **vars(mlp) | widths)
