"""The gated delta rule in plain torch: token by token, and in chunks for prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from ridgeplan.kernels.state import DeltaVectors

CHUNK_TOKENS = 64  # of the chunked form: products of this size fill a GPU, and the triangular system stays small
NORM_EPS = 1e-6  # of queries' and keys' normalization


class _Inputs(NamedTuple):
    """Float32 inputs of the rule by token: q, k [..., tokens, Hv, K], v [..., tokens, Hv, V], and by head."""

    q: Tensor
    k: Tensor
    v: Tensor
    step: Tensor
    log_decay: Tensor


def delta_step_reference(
    projected: Tensor,
    state: Tensor,
    ring: Tensor,
    committed: Tensor,
    accepted: Tensor,
    positions: Tensor,
    vectors: DeltaVectors,
) -> Tensor:
    """See `ridgeplan.kernels.state.delta_step`; rows that replay fewer tokens than others wait for them."""
    tokens, taps = projected.shape[1], vectors.taps.shape[1]
    for row, at in enumerate((positions % ring.shape[1]).unbind()):
        ring[row].index_copy_(0, at, projected[row, :, : ring.shape[2]])
    first = positions[:, :1]
    replayed = int((first[:, 0] - committed).max())
    places = first + torch.arange(-replayed - taps + 1, tokens, device=first.device)
    rows = ring.gather(1, (places % ring.shape[1])[..., None].expand(-1, -1, ring.shape[2]))
    inputs = _inputs(rows * (places >= 0)[..., None], vectors, state.shape)
    places = places[:, taps - 1 :, None, None, None]  # by step, against states
    current, outputs = state.clone(), []
    for step in range(replayed + tokens):
        at = places[:, step]
        state.copy_(torch.where(at == accepted[:, None, None, None], current, state))
        updated, output = _update(current, _Inputs(*(part[:, step] for part in inputs)))
        current = torch.where(at >= committed[:, None, None, None], updated, current)
        outputs.append(output)
    return torch.stack(outputs[replayed:], dim=1).to(projected.dtype)


def _inputs(rows: Tensor, vectors: DeltaVectors, sizes: torch.Size) -> _Inputs:
    """The rule's inputs of tokens from rows [..., W - 1 + tokens, channels + 2 Hv], the earlier ones' first."""
    _, value_heads, key_dim, value_dim = sizes
    (channels, taps), key_heads = vectors.taps.shape, vectors.key_heads
    mixed, steering = rows[..., :channels], rows[..., taps - 1 :, channels:]
    # In float32, whatever the dtype, as GPU kernels accumulate; rounded once ahead of the activation.
    convolved = sum(
        mixed[..., tap : mixed.shape[-2] - taps + 1 + tap, :].float() * vectors.taps[:, tap].float()
        for tap in range(taps)
    )
    assert isinstance(convolved, Tensor)
    activated = functional.silu(convolved.to(rows.dtype))
    queries, keys, values = activated.split((key_heads * key_dim,) * 2 + (value_heads * value_dim,), dim=-1)
    q, k = (_normalized(part.unflatten(-1, (key_heads, key_dim)), value_heads) for part in (queries, keys))
    step, decay = steering.split(value_heads, dim=-1)
    log_decay = -vectors.log_decay.exp() * functional.softplus(decay.float() + vectors.step_bias)
    values = values.unflatten(-1, (value_heads, value_dim)).float()
    return _Inputs(q * key_dim**-0.5, k, values, step.sigmoid().float() * vectors.step_limit, log_decay)


def _normalized(heads: Tensor, value_heads: int) -> Tensor:
    """Float32 heads of norm 1, repeated for every value head."""
    heads = heads.float()
    unit = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPS)
    return unit.repeat_interleave(value_heads // heads.shape[-2], dim=-2)


def _update(state: Tensor, token: _Inputs) -> tuple[Tensor, Tensor]:
    """The state [B, Hv, K, V] after a token, and the token's output [B, Hv, V]."""
    state = state * token.log_decay.exp()[..., None, None]
    held = (state * token.k[..., None]).sum(-2)
    state = state + token.k[..., None] * ((token.v - held) * token.step[..., None])[..., None, :]
    return state, (state * token.q[..., None]).sum(-2)


def delta_chunks_reference(projected: Tensor, earlier: Tensor, state: Tensor, vectors: DeltaVectors) -> Tensor:
    """See `ridgeplan.kernels.state.delta_chunks`."""
    tokens, width = len(projected), earlier.shape[1]
    inputs = _inputs(torch.cat([earlier, projected[:, :width]]), vectors, torch.Size((1, *state.shape)))
    padding = -tokens % CHUNK_TOKENS  # with zeros, which neither decay nor update anything
    q, k, v, step, log_decay = (_chunked(part, padding) for part in inputs)
    total = log_decay.cumsum(-1)  # [Hv, chunks, C]
    ratio = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    system = (k @ k.mT * ratio * step[..., None]).tril(-1)
    right = torch.cat([v, k * total.exp()[..., None]], dim=-1) * step[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    within, queries = q @ k.mT * ratio, q * total.exp()[..., None]
    last = total[..., -1:]
    keys_out, decays = k * (last - total).exp()[..., None], last.exp()[..., None]
    outputs = torch.empty_like(v)
    for chunk in range(v.shape[1]):
        updates = values[:, chunk] - keys[:, chunk] @ state
        torch.baddbmm(queries[:, chunk] @ state, within[:, chunk], updates, out=outputs[:, chunk])
        state.mul_(decays[:, chunk]).baddbmm_(keys_out[:, chunk].mT, updates)
    return outputs.flatten(1, 2)[:, :tokens].transpose(0, 1).to(projected.dtype)


def _chunked(part: Tensor, padding: int) -> Tensor:
    """[tokens, Hv, ...] as [Hv, chunks, CHUNK_TOKENS, ...]."""
    part = part.transpose(0, 1)
    part = functional.pad(part, (0, 0) * (part.dim() - 2) + (0, padding))
    return part.unflatten(1, (-1, CHUNK_TOKENS)).contiguous()


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ridgeplan.kernels.state.gated_rms_norm`."""
    normed = functional.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight
    return (normed.flatten(-2) * functional.silu(gate.float())).to(x.dtype)
