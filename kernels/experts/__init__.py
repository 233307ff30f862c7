"""Routed experts: the choice of experts by a router's logits, and gated MLPs of few rows that read only experts hit.

Expert ids stay on the device and all shapes are static, so a pass with experts can be captured in a CUDA graph. A pair
is a row with one of its experts, pair row * K + i for the row's i-th expert. Pairs of an expert are taken together in
blocks, so an expert's weights are read once for all rows that hit it. A stack of quantized weights is one `Int4Weight`,
`Int8Weight` or `Mxfp4Weight` with the outputs of all experts, expert after expert.

Not here: the router's product, shared experts (runtime/model/experts.py), a CPU's products (the same).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.device.cuda import has_wgmma
from ridgeplan.kernels.linear import QuantizedWeight
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight, Mxfp4Weight
from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.layers import Routing
from ridgeplan.roofline.cost import Cost

ExpertStack = QuantizedWeight | Mxfp4Weight  # the rows of all experts
ExpertWeight = Tensor | ExpertStack  # [experts, outputs, inputs], or a stack of codes
BLOCK_ROWS = 16  # pairs of a block; MANY_BLOCK_ROWS from as many pairs per expert on
MANY_BLOCK_ROWS = 64
MAX_COUNTED_PAIRS = 1024  # with more, sorting them is faster than every block counting them


@dataclass(frozen=True)
class Activation:
    """gate * sigmoid(alpha * gate) * (up + offset), with gate at most `limit` and up within it; by default SwiGLU.

    gpt-oss has alpha 1.702, limit 7 and offset 1.
    """

    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """float32 [..., I] of gate_up [..., 2 I]: the gate first, then up."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.offset)


SWIGLU = Activation()


class Blocks(NamedTuple):
    """Pairs by expert. experts: int32 [blocks], -1 behind the last block; pairs: int32 [blocks, rows], padded with
    the number of pairs."""

    experts: Tensor
    pairs: Tensor


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Experts int64 [rows, per_token] and their weights float32 [rows, per_token] by logits [rows, experts].

    bias: float32 [experts], added to scores in the choice only. Raises ValueError for groups that do not divide the
    experts, and for a bias of another size.
    """
    experts = logits.shape[1]
    if experts % routing.groups or not routing.per_token <= experts:
        raise ValueError(f"{experts} experts; allowed: at least {routing.per_token}, a multiple of {routing.groups}")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias {list(bias.shape)} does not fit {experts} experts")
    if not uses_gpu_kernel(backend, logits) or routing.groups > 1:
        return route_reference(logits, routing, bias)
    from ridgeplan.kernels.experts.triton import route_triton

    return route_triton(logits, routing, bias)


def route_reference(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same in plain torch, without a wait for the device."""
    scores = logits.float().sigmoid() if routing.sigmoid else logits.float().softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.unflatten(1, (routing.groups, -1))
        best = grouped.topk(routing.group_members, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(routing.kept_groups, dim=-1).indices, 1).bool()
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = choice.topk(routing.per_token, dim=-1).indices
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=routing.min_sum)
    return chosen, weights * routing.scale


def expert_blocks(experts: Tensor, count: int, rows: int, *, backend: Backend = "auto") -> Blocks:
    """Blocks of `rows` pairs of experts int64 [rows, per_token], ids below `count`."""
    if not uses_gpu_kernel(backend, experts) or experts.numel() > MAX_COUNTED_PAIRS:
        return expert_blocks_reference(experts, count, rows)
    from ridgeplan.kernels.experts.triton import expert_blocks_triton

    return expert_blocks_triton(experts, count, rows)


def expert_blocks_reference(experts: Tensor, count: int, rows: int) -> Blocks:
    """The same in plain torch, without a wait for the device."""
    ids = experts.flatten()
    order = ids.argsort(stable=True)
    hits = torch.zeros(count, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))
    ends = (-(-hits // rows)).cumsum(0)  # blocks up to and with an expert's
    block = torch.arange(max_blocks(len(ids), count, rows), device=ids.device)
    expert = torch.searchsorted(ends, block, right=True)
    known = expert.clamp(max=count - 1)
    first = rows * (block - ends[known] + -(-hits[known] // rows))  # the block's first pair among its expert's
    place = first[:, None] + torch.arange(rows, device=ids.device)
    inside = (place < hits[known][:, None]) & (expert < count)[:, None]
    at = (hits.cumsum(0) - hits)[known][:, None] + place
    pairs = torch.where(inside, order[at.clamp(max=len(ids) - 1)], len(ids))
    return Blocks(torch.where(expert < count, expert, -1).int(), pairs.int())


def max_blocks(pairs: int, experts: int, rows: int) -> int:
    """The largest number of blocks that so many pairs may need: every expert hit may leave one partly filled."""
    return min(pairs, pairs // rows + min(experts, pairs))


def supports_grouped(x: Tensor) -> bool:
    """Whether grouped products of rows like x are fast. torch has them from 2.10 on; the first fail on Blackwell."""
    return x.is_cuda and has_wgmma(x.device) and x.dtype == torch.bfloat16 and hasattr(functional, "grouped_mm")


def routed_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    count: int,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = SWIGLU,
    addend: Tensor | None = None,
    prompt: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """The weighted sum of each row's experts, plus `addend`: [rows, hidden] in x's dtype, sums in float32.

    x: [rows, hidden]; experts, weights: [rows, per_token], as `route` returns them; gate_up: weights of `count` experts
    from hidden to 2 x intermediate, gates first; down: back to hidden; biases: [count, outputs]. Of the weights only
    those of experts hit are read. Few rows of codes and MXFP4 run in CUDA C++ on Hopper and newer. prompt: whether
    these are rows of a prompt, whose products may wait for the device and take dense copies. Raises ValueError for
    weights that do not fit x or each other.
    """
    hidden = x.shape[1]
    (gate_outputs, inputs), (outputs, middle) = (expert_sizes(weight, count) for weight in (gate_up, down))
    if inputs != hidden or outputs != hidden or gate_outputs != 2 * middle:
        raise ValueError(
            f"experts of {gate_outputs} x {inputs} and {outputs} x {middle} do not fit rows of {hidden}: allowed are "
            "2 x intermediate by hidden, and hidden by intermediate"
        )
    if not uses_gpu_kernel(backend, x):
        return routed_mlp_reference(
            x, experts, weights, gate_up, down, count, gate_up_bias, down_bias, activation, addend
        )
    from ridgeplan.kernels.experts.cuda import block_rows, expert_products, find_experts_kernels
    from ridgeplan.kernels.experts.grouped import routed_mlp_grouped, takes_grouped
    from ridgeplan.kernels.experts.triton import expert_products_triton, weighted_sum_triton

    x, stacks, biases, per_token = x.contiguous(), (gate_up, down), (gate_up_bias, down_bias), experts.shape[1]
    if prompt and backend == "auto" and takes_grouped(x, gate_up, experts.numel(), count):
        return routed_mlp_grouped(x, experts, weights, stacks, biases, count, activation, addend)
    kernels = find_experts_kernels(x, stacks, per_token, count) if backend == "auto" else None
    if kernels is not None:
        blocks = expert_blocks(experts, count, block_rows(len(x)))
        parts = expert_products(x, blocks, kernels, stacks, biases, experts.numel(), activation).unsqueeze(0)
    else:
        rows = MANY_BLOCK_ROWS if experts.numel() >= MANY_BLOCK_ROWS * count else BLOCK_ROWS
        blocks = expert_blocks(experts, count, rows, backend=backend)
        parts = expert_products_triton(x, blocks, stacks, biases, count, experts.numel(), activation)
    return weighted_sum_triton(parts, weights, addend, x.dtype)


def routed_mlp_reference(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    count: int,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = SWIGLU,
    addend: Tensor | None = None,
) -> Tensor:
    """The same in plain torch, in float32, a loop over the experts hit."""
    out = torch.zeros_like(x, dtype=torch.float32) if addend is None else addend.float()
    for expert in experts.unique().tolist():
        row, place = (experts == expert).nonzero(as_tuple=True)
        hidden = functional.linear(x[row].float(), _dense(gate_up, expert, count), _row(gate_up_bias, expert))
        hidden = functional.linear(activation(hidden), _dense(down, expert, count), _row(down_bias, expert))
        out = out.index_add(0, row, hidden * weights[row, place, None])
    return out.to(x.dtype)


def expert_of(weight: ExpertStack, expert: int, count: int) -> ExpertStack:
    """One expert's weight of a stack, a view."""
    if isinstance(weight, Mxfp4Weight):
        return Mxfp4Weight(*(part.unflatten(0, (count, -1))[expert] for part in (weight.codes, weight.scales)))
    if isinstance(weight, Int8Weight):
        return Int8Weight(*(expert_plane(plane, expert, count) for plane in weight.planes))
    return expert_plane(weight, expert, count)


def expert_plane(weight: Int4Weight, expert: int, count: int) -> Int4Weight:
    """One expert's 4-bit weight of a stack, a view."""
    tiles = len(weight.packed) // count
    packed = weight.packed[expert * tiles : (expert + 1) * tiles]
    return Int4Weight(packed, weight.group, weight.inputs, weight.outputs // count)


def expert_sizes(weight: ExpertWeight, count: int) -> tuple[int, int]:
    """Outputs and inputs of each of `count` experts. Raises ValueError where a stack does not hold them."""
    if isinstance(weight, Tensor):
        if weight.dim() != 3 or len(weight) != count:
            raise ValueError(f"a weight of {list(weight.shape)} does not hold {count} experts")
        return weight.shape[1], weight.shape[2]
    if weight.outputs % (16 * count):
        raise ValueError(
            f"a stack of {weight.outputs} outputs does not hold {count} experts of a multiple of 16 outputs"
        )
    return weight.outputs // count, weight.inputs


def _dense(weight: ExpertWeight, expert: int, count: int) -> Tensor:
    return weight[expert].float() if isinstance(weight, Tensor) else expert_of(weight, expert, count).dequantize()


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert].float()


def routed_mlp_cost(
    x: Tensor, per_token: int, count: int, expert_params: int, weight_bytes: float, skew: float = 0
) -> Cost:
    """Cost of `routed_mlp` on x with experts of `expert_params` parameters of `weight_bytes` each.

    Of the experts hit it counts the expected number, under loads of this skew.
    """
    rows, hidden = x.shape
    return ops.experts(rows, hidden, expert_params, count, per_token, weight_bytes, x.element_size(), skew)
