"""Decode attention in plain torch: the kernels' reference, and the CPU implementation.

As in the kernels, scales and minima are applied outside the dot products, so codes are not dequantized one by one.
With x = step * code + zero, the scores of a group's keys are (q * step) . code + q . zero, and its values contribute
(p * step) . code + p . zero.
"""

import torch
from torch import Tensor

from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.reference import affine, unpack


def decode_attention_reference(inputs: AttentionInputs) -> Tensor:
    """See `ridgeplan.kernels.attention.decode_attention`; one batch row at a time, in float32."""
    q, keys, codes, ratio, pages = inputs.q, inputs.keys, inputs.text_codes, inputs.ratio, inputs.pages
    batch, queries, _, head_dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts, ends = inputs.begin.tolist(), inputs.end.tolist()
    visible = inputs.groups.tolist() if inputs.groups is not None else [0] * batch
    for b in range(batch):
        # Rows of one KV head: its query heads x the queries, with the queries innermost.
        rows = (q[b].float() * inputs.scale).view(queries, kv_heads, ratio, head_dim).permute(1, 2, 0, 3)
        rows = rows.reshape(kv_heads, ratio * queries, head_dim)
        span = slice(starts[b], max(starts[b], min(ends[b] + queries - 1, capacity)))
        buffer = b if pages is None else int(pages.buffers[b])
        scores = _full_scores(rows, keys[buffer, :, span], ends[b] - starts[b], queries, inputs)
        quantized = None
        if codes is not None and visible[b]:
            place = (codes, b) if pages is None else (codes.gathered(pages.pages[b, : visible[b]]), 0)
            quantized = _QuantizedRow(*place, visible[b], inputs.lower)
        sinks = None if inputs.sinks is None else inputs.sinks.view(kv_heads, ratio).repeat_interleave(queries, dim=1)
        values = inputs.values[buffer, :, span].float()
        result = _attend(rows, scores, values, quantized, inputs.soft_cap, sinks)
        out[b] = result.view(kv_heads, ratio, queries, head_dim).permute(2, 0, 1, 3).reshape(q.shape[1:])
    return out


def _full_scores(rows: Tensor, keys: Tensor, visible: int, queries: int, inputs: AttentionInputs) -> Tensor:
    """Scores [Hkv, rows, slots] of full-precision keys; query t sees the first visible + t, and the last `window`."""
    scores, window = soft_capped(rows @ keys.float().mT, inputs.soft_cap), inputs.window
    if queries > 1:
        limit = visible + torch.arange(rows.shape[1], device=rows.device) % queries
        slots = torch.arange(keys.shape[1], device=rows.device)
        scores.masked_fill_(slots >= limit[:, None], -torch.inf)
        if window is not None:
            scores.masked_fill_(slots < limit[:, None] - window, -torch.inf)
    return scores


def _attend(
    rows: Tensor,
    scores: Tensor,
    values: Tensor,
    quantized: "_QuantizedRow | None",
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax over quantized and full-precision tokens together -> [Hkv, rows, head_dim]; zeros without tokens.

    sinks: a logit of each row [Hkv, rows] that has no value.
    """
    count = 0
    if quantized is not None:
        front = soft_capped(quantized.key_scores(rows), soft_cap)
        count = front.shape[-1]
        scores = torch.cat([front, scores], dim=-1)
    if scores.shape[-1] == 0:
        return torch.zeros_like(rows)
    # The finite floor gives rows without visible tokens a weight of exp(-inf) = 0 instead of NaN.
    row_max = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks[..., None].float())
    weights = torch.exp(scores - row_max)
    out = weights[..., count:] @ values
    if quantized is not None:
        out += quantized.value_sums(weights[..., :count])
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += torch.exp(sinks[..., None].float() - row_max)
    return out / total.clamp_min(torch.finfo(torch.float32).tiny)


def soft_capped(scores: Tensor, cap: float) -> Tensor:
    """cap * tanh(scores / cap); 0 for no cap."""
    return (scores / cap).tanh() * cap if cap else scores


class _QuantizedRow:
    """The first `groups` quantized groups of codes of a row: products of all heads' rows with keys and values."""

    def __init__(self, codes: QuantizedKV, row: int, groups: int, lower: bool) -> None:
        self.codes, self.lower, self.at = codes, lower, (row, slice(None), slice(groups))

    def key_scores(self, rows: Tensor) -> Tensor:
        """rows [Hkv, R, D] -> scores [Hkv, R, groups * G]."""
        step, zero = affine(self.codes.key_scale[self.at], self.codes.key_min[self.at], self.lower)
        scaled = rows[:, None] * step[:, :, None]
        scores = self._dot(scaled, self.codes.key_upper, self.codes.key_lower)
        scores += (zero @ rows.mT)[..., None]
        return scores.transpose(1, 2).flatten(2)

    def value_sums(self, weights: Tensor) -> Tensor:
        """weights [Hkv, R, groups * G] -> weighted sums of values [Hkv, R, D]."""
        step, zero = affine(self.codes.value_scale[self.at], self.codes.value_min[self.at], self.lower)
        grouped = weights.unflatten(-1, step.shape[1:]).transpose(1, 2)
        sums = self._dot(grouped * step[:, :, None], self.codes.value_upper, self.codes.value_lower).sum(1)
        return sums + weights @ zero.flatten(1)[..., None]

    def _dot(self, left: Tensor, upper: Tensor, lower: Tensor | None) -> Tensor:
        """left [Hkv, groups, R, n] . codes [Hkv, groups, m, n] -> [Hkv, groups, R, m], n packed in halves."""
        first, second = unpack(upper[self.at], lower[self.at] if self.lower and lower is not None else None)
        half = first.shape[-1]
        return left[..., :half] @ first.mT + left[..., half:] @ second.mT
