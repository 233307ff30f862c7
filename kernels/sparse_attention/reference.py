"""Sparse decode attention in plain torch: chosen tokens are gathered, dequantized and joined with the recent ones."""

import torch
from torch import Tensor

from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.reference import affine, unpack
from ridgeplan.kernels.kv_cache.token_rows import TokenRows


def sparse_decode_attention_reference(
    inputs: AttentionInputs, index: Tensor, count: Tensor, page: int, slots: Tensor | None = None
) -> Tensor:
    """See `ridgeplan.kernels.sparse_attention.sparse_decode_attention`; one batch row at a time, in float32."""
    q, keys, values, codes = inputs.q, inputs.keys, inputs.values, inputs.codes
    out, starts, ends = torch.empty_like(q), inputs.begin.tolist(), inputs.end.tolist()
    beyond = inputs.begin if codes is None or inputs.groups is None else inputs.groups * codes.group
    token_index, heads = expand_pages(index, page), keys.shape[1]
    page_of_token, query = (torch.arange(n, device=q.device) for n in (token_index.shape[2], q.shape[1]))
    seen = (page_of_token // page < count[..., None]) & (token_index < beyond[:, None, None])
    chosen_tokens = torch.where(seen, token_index, 0).long().expand(-1, heads, -1)
    places = None if slots is None else torch.where(seen, expand_pages(slots, page), 0).long().expand(-1, heads, -1)
    for b, tokens in enumerate(chosen_tokens):
        if codes is None:
            chosen = _gathered(keys[b], tokens), _gathered(values[b], tokens)
        elif isinstance(codes, QuantizedKV):
            chosen = gather_codes(codes, b, tokens, inputs.lower)
        else:
            assert places is not None, "rows are found by their slots"
            chosen = gather_rows(codes, b, tokens, places[b])
        recent = slice(starts[b], max(starts[b], min(ends[b] + q.shape[1] - 1, keys.shape[2])))
        recent_seen = torch.arange(recent.start, recent.stop, device=q.device) < ends[b] + query[:, None]
        out[b] = attend_masked(
            q[b] * inputs.scale,
            torch.cat([chosen[0], keys[b, :, recent].float()], dim=1),
            torch.cat([chosen[1], values[b, :, recent].float()], dim=1),
            _visible(seen[b], recent_seen, heads),
        )
    return out


def expand_pages(index: Tensor, page: int) -> Tensor:
    """Token numbers [..., K * page] of page numbers [..., K]."""
    return (index[..., None] * page + torch.arange(page, device=index.device)).flatten(-2)


def _visible(seen: Tensor, recent: Tensor, kv_heads: int) -> Tensor:
    """[Hkv, T, chosen + recent] of chosen tokens [1 or Hkv, chosen] and recent ones [T, recent]."""
    queries = recent.shape[0]
    chosen = seen.expand(kv_heads, -1)[:, None].expand(-1, queries, -1)
    return torch.cat([chosen, recent.expand(kv_heads, -1, -1)], dim=-1)


def attend_masked(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention of scaled queries [T, Hq, D] to float32 keys, values [Hkv, N, D] -> [T, Hq, D].

    visible: bool [Hkv, T, N]. A query that sees nothing gives zeros; what is not visible may be anything, even NaN.
    """
    queries, q_heads, head_dim = q.shape
    heads = q.float().view(queries, keys.shape[0], -1, head_dim).permute(1, 2, 0, 3)  # [Hkv, heads, T, D]
    scores = (heads @ keys.mT[:, None]).masked_fill(~visible[:, None], -torch.inf)
    if scores.shape[-1] == 0:
        return torch.zeros_like(q)
    shift = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(scores - shift)
    safe = torch.where(visible.any(1)[..., None], values, 0)
    out = weights @ safe[:, None] / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return out.permute(2, 0, 1, 3).reshape(queries, q_heads, head_dim).to(q.dtype)


def _gathered(store: Tensor, tokens: Tensor) -> Tensor:
    return store.gather(1, tokens[..., None].expand(-1, -1, store.shape[2])).float()


def gather_codes(codes: QuantizedKV, row: int, tokens: Tensor, lower: bool) -> tuple[Tensor, Tensor]:
    """Dequantized keys and values [Hkv, K, D] in float32 of the tokens [Hkv, K] of a batch row."""
    head = torch.arange(codes.kv_heads, device=tokens.device)[:, None]
    group, place = tokens // codes.group, tokens % codes.group
    low = codes.key_lower[row][head, group, place] if lower and codes.key_lower is not None else None
    halves = unpack(codes.key_upper[row][head, group, place], low)
    step, zero = affine(codes.key_scale[row], codes.key_min[row], lower)
    keys = torch.cat(halves, dim=-1) * step[head, group] + zero[head, group]
    half = codes.group // 2
    low = codes.value_lower[row][head, group, :, place % half] if lower and codes.value_lower is not None else None
    first, second = unpack(codes.value_upper[row][head, group, :, place % half], low)
    step, zero = affine(codes.value_scale[row], codes.value_min[row], lower)
    pair = step[head, group, place][..., None], zero[head, group, place][..., None]
    return keys, torch.where((place < half)[..., None], first, second) * pair[0] + pair[1]


def gather_rows(codes: TokenRows, row: int, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantized keys and values [Hkv, K, D] in float32 of the tokens [Hkv, K] of a batch row, from their slots."""
    head = torch.arange(codes.keys.shape[1], device=tokens.device)[:, None]
    step, zero = affine(codes.key_scale[row], codes.key_min[row], lower=True)
    upper, lower, *_ = (plane[row][head, slots] for plane in codes.key_planes[:2] if plane is not None)
    half, group = codes.head_dim // 2, tokens // codes.group
    keys = torch.cat(unpack(upper[..., :half], lower[..., :half]), dim=-1) * step[head, group] + zero[head, group]
    upper, lower, scale, minimum = (plane[row][head, slots] for plane in codes.value_planes if plane is not None)
    step, zero = affine(scale[..., :1], minimum[..., :1], lower=True)
    return keys, torch.cat(unpack(upper[..., :half], lower[..., :half]), dim=-1) * step + zero
