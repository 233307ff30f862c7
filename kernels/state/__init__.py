"""Layers with a recurrent state in place of a cache: the gated delta rule with its short convolution and gated norm.

A pass over drafted tokens must not change the state for good, as the target may reject them. So the cache keeps a
layer's latest inputs in a ring by position, and a pass applies accepted tokens to the state one pass late: it replays
from the ring what was accepted since, writes the state, and goes on with its new tokens in registers. Whatever the
number of drafts, a round thus writes the state once; a snapshot after each drafted token would write as many states.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.state.reference import delta_chunks_reference, delta_step_reference, gated_rms_norm_reference
from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.layers import DELTA_RULE, State
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import MAX_STATE_WIDTH, TORCH_STATE_TOKENS, state_ring_rows
from ridgeplan.roofline.passes import state_sizes

MAX_TAPS = 4  # of the convolution; the Triton kernel holds that many inputs in registers


@dataclass(frozen=True, eq=False)
class DeltaVectors:
    """What a layer has beside its projections.

    taps: [channels, W] of the convolution, the last for the token itself. log_decay, step_bias: float32 [Hv], A_log and
    dt_bias. key_heads: Hk, of `key_dim` K; each serves Hv / Hk consecutive value heads. step_limit: largest step size.
    """

    taps: Tensor
    log_decay: Tensor
    step_bias: Tensor
    key_heads: int
    key_dim: int
    step_limit: int = 1

    @property
    def inputs(self) -> int:
        """Numbers that a token brings: channels of the convolution, and two by value head."""
        return len(self.taps) + 2 * len(self.log_decay)

    @property
    def state_sizes(self) -> tuple[int, int, int]:
        """Hv, K and V."""
        value_heads = len(self.log_decay)
        return value_heads, self.key_dim, (len(self.taps) - 2 * self.key_heads * self.key_dim) // value_heads


class StateRows(NamedTuple):
    """One layer's states and latest inputs of the rows of a batch, and where they stand in their texts.

    state: float32 [B, Hv, K, V], after the first `committed` tokens. ring: [B, R, channels + 2 Hv], inputs by position
    modulo R. committed, accepted: int32 [B], tokens of the text that the state holds, and that it may hold.
    """

    state: Tensor
    ring: Tensor
    committed: Tensor
    accepted: Tensor


def delta_step(
    projected: Tensor, rows: StateRows, positions: Tensor, vectors: DeltaVectors, *, backend: Backend = "auto"
) -> Tensor:
    """Outputs [B, T, Hv, V] of the gated delta rule for T new tokens of each row (Yang et al. 2024, equation 10).

    projected: [B, T, at least channels + 2 Hv], contiguous channels: queries, keys and values, then Hv each of step
    sizes (beta before its sigmoid) and decays (a before its softplus); more columns are ignored. positions: int64
    [B, T], consecutive, the first at or after `rows.accepted`: tokens between the two are drafted ones, whose inputs
    the ring holds.

    Tokens `committed` to `accepted` enter `rows.state` in place; those from `accepted` on, new ones included, do not,
    and the new ones' inputs go to the ring. The caller then sets committed to accepted, once all layers have run.
    The convolution has a SiLU; queries and keys are normalized by head, and queries divided by sqrt(K). The state is
    float32, and activations are rounded where transformers does. Raises ValueError when shapes disagree.
    """
    _check(projected, rows, positions, vectors)
    if not uses_gpu_kernel(backend, projected):
        return delta_step_reference(projected, *rows, positions, vectors)
    from ridgeplan.kernels.state.triton import delta_step_triton

    return delta_step_triton(projected, *rows, positions, vectors)


def _check(projected: Tensor, rows: StateRows, positions: Tensor, vectors: DeltaVectors) -> None:
    (batch, tokens, _), taps = projected.shape, vectors.taps.shape[1]
    _check_inputs(projected, rows.ring, rows.state, vectors)
    if rows.ring.shape[1] < state_ring_rows(taps, tokens):
        raise ValueError(f"the ring has {rows.ring.shape[1]} rows; allowed: {state_ring_rows(taps, tokens)} or more")
    if positions.shape != (batch, tokens) or len(rows.committed) != batch or len(rows.accepted) != batch:
        raise ValueError(f"positions are {list(positions.shape)}; allowed: {[batch, tokens]}, as many rows as states")


def _check_inputs(projected: Tensor, kept: Tensor, state: Tensor, vectors: DeltaVectors) -> None:
    """Of the width of new inputs, of those kept of earlier tokens, and of the layer's sizes."""
    value_heads, key_dim, value_dim = state.shape[-3:]
    (channels, taps), width = vectors.taps.shape, projected.shape[-1]
    expected = 2 * vectors.key_heads * key_dim + value_heads * value_dim
    if channels != expected or value_heads % vectors.key_heads:
        raise ValueError(
            f"taps are of {channels} channels; allowed: {expected}, twice {vectors.key_heads} key heads of {key_dim} "
            f"and {value_heads} value heads of {value_dim}, a multiple of the key heads"
        )
    if taps > MAX_TAPS:
        raise ValueError(f"the convolution has {taps} taps; allowed: up to {MAX_TAPS}")
    if kept.shape[-1] != vectors.inputs or width < vectors.inputs:
        raise ValueError(f"inputs are {width} wide and earlier ones {kept.shape[-1]}; allowed: {vectors.inputs}")


def delta_chunks(
    projected: Tensor, earlier: Tensor, state: Tensor, vectors: DeltaVectors, *, backend: Backend = "auto"
) -> Tensor:
    """Outputs [tokens, Hv, V] of a prompt's next tokens, whose state float32 [Hv, K, V] is updated in place.

    projected: [tokens, at least channels + 2 Hv], as for `delta_step`. earlier: [W - 1, channels + 2 Hv], the inputs of
    the tokens before, zeros ahead of the text. The chunked form (Gated DeltaNet, Yang et al. 2024, section 3.3): with
    G the running sum of log decays in a chunk and S the state ahead of it, the updates D of its tokens solve
    (I + A) D = step (V - e^G K S), A[t, i] = step_t e^(G_t - G_i) k_t . k_i for i < t. Heads of more than
    MAX_STATE_WIDTH channels are in torch. Raises ValueError when shapes disagree.
    """
    _check_inputs(projected, earlier, state, vectors)
    if len(earlier) != vectors.taps.shape[1] - 1:
        raise ValueError(f"earlier inputs are of {len(earlier)} tokens; allowed: {vectors.taps.shape[1] - 1}")
    if not uses_gpu_kernel(backend, projected) or max(state.shape[1:]) > MAX_STATE_WIDTH:
        return _in_pieces(projected, earlier, state, vectors)
    from ridgeplan.kernels.state.chunks_triton import delta_chunks_triton

    return delta_chunks_triton(projected, earlier, state, vectors)


def _in_pieces(projected: Tensor, earlier: Tensor, state: Tensor, vectors: DeltaVectors) -> Tensor:
    """The reference in pieces, so that its workspace does not grow with the tokens."""
    if len(projected) <= TORCH_STATE_TOKENS:
        return delta_chunks_reference(projected, earlier, state, vectors)
    taps, outputs = len(earlier), []
    inputs = torch.cat([earlier, projected[:, : earlier.shape[1]]])
    for start in range(0, len(projected), TORCH_STATE_TOKENS):
        piece = projected[start : start + TORCH_STATE_TOKENS]
        outputs.append(delta_chunks_reference(piece, inputs[start : start + taps], state, vectors))
    return torch.cat(outputs)


def delta_chunks_cost(projected: Tensor, state: Tensor, vectors: DeltaVectors) -> Cost:
    """Cost of `delta_chunks`; its kernels write and read factors by chunk in place of the states that count here."""
    return ops.state_chunks(1, len(projected), *vectors.state_sizes, _sizes(state, vectors), projected.element_size())


def _sizes(state: Tensor, vectors: DeltaVectors) -> ops.StateSizes:
    value_heads, key_dim, value_dim = state.shape[-3:]
    heads = {"key_heads": vectors.key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim}
    return state_sizes(State(rule=DELTA_RULE, conv_width=vectors.taps.shape[1], **heads))


def delta_step_cost(projected: Tensor, rows: StateRows, vectors: DeltaVectors, replayed: int, commits: int) -> Cost:
    """Cost of `delta_step` where each row replays `replayed` tokens. commits: 1 if any of them enter the state."""
    batch, tokens, _ = projected.shape
    return ops.state_update(batch, tokens, replayed, commits, _sizes(rows.state, vectors), projected.element_size())


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, backend: Backend = "auto") -> Tensor:
    """RMSNorm of every head of x [..., Hv, V], times weight [V], times silu(gate), gate [..., Hv V], contiguous rows.

    As in transformers the norm is rounded to the dtype before the weight, and the product with the gate is float32.
    Returns [..., Hv V]. Raises ValueError when shapes disagree.
    """
    if weight.shape != x.shape[-1:] or gate.shape != (*x.shape[:-2], x.shape[-2] * x.shape[-1]):
        raise ValueError(f"gate {list(gate.shape)} and weight {list(weight.shape)} do not fit heads {list(x.shape)}")
    if not uses_gpu_kernel(backend, x):
        return gated_rms_norm_reference(x, gate, weight, eps)
    from ridgeplan.kernels.state.triton import gated_rms_norm_triton

    return gated_rms_norm_triton(x, gate, weight, eps)


def gated_rms_norm_cost(x: Tensor) -> Cost:
    """Cost of `gated_rms_norm`."""
    *_, heads, head_dim = x.shape
    return ops.gated_norm(x.numel() // (heads * head_dim), heads, head_dim, x.element_size())
