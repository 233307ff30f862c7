"""Scores that a verification pass leaves for the next round's selection (SpecAttn, equations 2 and 3)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.kv_cache.reference import dequantize_reference

Rows = Literal["ends", "last", "all", "each"]
What = Literal["logits", "probabilities"]


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """Asks `decode_attention` to write each earlier token's score into `out`, float32 [B, Hkv, N], contiguous.

    A score is the sum over the query heads of the KV head and over the query `rows`: "ends" the first and the last
    (equation 3; of one query, that one), "last", or "all" (equation 2). `what` is summed: "logits", scale * q . k, as
    in the paper, or "probabilities", exp(logit - lse).

    With rows "each", every query leaves a score of its own, for callers that learn only later which queries count:
    `out` is float32 [B, Hkv, T or more, N], and query t writes to its third index t.

    Scores are written in the same pass that finds the log-sum-exp of all that a query sees, so that is not known yet.
    Probabilities refer to `lse`, float32 [B, Hq], contiguous, instead: for each query head, what the call before left
    there, its last query's. Of two calls with one query each, the same, the second has exact ones. Where the last query
    sees nothing, `lse` stays.

    Entry n is token n of the row's first groups[b] quantized groups, for calls with codes; without codes it is slot n
    of the full-precision store, for begin[b] <= n < end[b]. Other entries are not written.

    For a set shared by all heads of a layer, sum `out` over the KV heads. Raises ValueError for another dtype, layout
    or choice, or probabilities without `lse`.
    """

    out: Tensor
    rows: Rows = "ends"
    what: What = "logits"
    lse: Tensor | None = None

    def __post_init__(self) -> None:
        if self.rows not in ("ends", "last", "all", "each"):
            raise ValueError(f"rows {self.rows!r} is none of: ends, last, all, each")
        sizes = ("B", "Hkv", "T", "N") if self.rows == "each" else ("B", "Hkv", "N")
        if self.out.dtype != torch.float32 or self.out.dim() != len(sizes) or not self.out.is_contiguous():
            allowed = f"contiguous float32 [{', '.join(sizes)}]"
            raise ValueError(f"scores go to {allowed}, not {self.out.dtype} {list(self.out.shape)}")
        if self.what not in ("logits", "probabilities"):
            raise ValueError(f"what {self.what!r} is none of: logits, probabilities")
        if self.what == "probabilities" and self.lse is None:
            raise ValueError("probabilities need lse, the log-sum-exps of the call before")
        if self.lse is not None and (self.lse.dtype != torch.float32 or not self.lse.is_contiguous()):
            raise ValueError(f"lse is contiguous float32 [B, Hq], not {self.lse.dtype} {self.lse.shape}")

    def step(self, queries: int) -> int:
        """Distance between summed queries of `queries`, counted down from the last one."""
        return {"all": 1, "each": 1, "last": queries, "ends": max(1, queries - 1)}[self.rows]

    def summed(self, queries: int) -> list[int]:
        """Numbers of the summed queries, of `queries`."""
        return list(range(queries - 1, -1, -self.step(queries)))

    @property
    def by_query(self) -> Tensor:
        """`out` as [B, Hkv, 1 or T or more, N], a view."""
        return self.out if self.rows == "each" else self.out[:, :, None]

    def stored_rows(self, queries: int) -> int:
        """Scores of each token that a call with `queries` queries writes."""
        return queries if self.rows == "each" else 1

    def keep_lse(self, lse: Tensor) -> None:
        """Stores the last query's log-sum-exps `lse` [B, Hq] in `self.lse`, except -inf, where it sees nothing."""
        if self.lse is not None and self.what == "probabilities":
            self.lse.copy_(torch.where(lse.isfinite(), lse, self.lse))

    def require(self, batch: int, queries: int, q_heads: int, kv_heads: int, tokens: int) -> None:
        """Raises ValueError where `out` has no room for `tokens` tokens of these rows and heads, or `lse` for these."""
        rows, stored = self.by_query.shape[2], self.stored_rows(queries)
        if self.out.shape[:2] != (batch, kv_heads) or self.out.shape[-1] < tokens or rows < stored:
            each = f"{stored} or more, " if self.rows == "each" else ""
            raise ValueError(
                f"scores {list(self.out.shape)} do not fit; allowed: [{batch}, {kv_heads}, {each}{tokens} or more]"
            )
        if self.lse is not None and self.lse.shape != (batch, q_heads):
            raise ValueError(f"lse {list(self.lse.shape)} does not fit; allowed: [{batch}, {q_heads}]")


def collect_scores_reference(request: ScoreRequest, inputs: AttentionInputs) -> None:
    """Writes what `ScoreRequest` describes, in plain torch."""
    q, keys, begin, end, codes = inputs.q, inputs.keys, inputs.begin, inputs.end, inputs.text_codes
    for b in range(len(q)):
        first, last = int(begin[b]), min(int(end[b]) + q.shape[1] - 1, keys.shape[2])
        seen = keys[b, :, first : max(first, last)].float()
        count = 0
        if codes is not None and inputs.groups is not None:
            count = int(inputs.groups[b]) * codes.group
            earlier = dequantize_reference(codes.rows(slice(b, b + 1)), inputs.lower, torch.float32)[0][0, :, :count]
            seen = torch.cat([earlier, seen], dim=1)
        heads = (
            (q[b].float() * inputs.scale).unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)
        )  # [Hkv, heads, T, D]
        logits = heads @ seen.mT[:, None]
        if inputs.soft_cap:
            logits = (logits / inputs.soft_cap).tanh() * inputs.soft_cap
        summed = logits[:, :, sorted(request.summed(q.shape[1]))]
        if request.lse is not None and request.what == "probabilities":
            earlier_lse = request.lse[b].view(keys.shape[1], -1, 1, 1)
            summed = (summed - earlier_lse).exp()
            if seen.shape[1]:
                request.lse[b] = logits[:, :, -1].logsumexp(-1).flatten()
        sums = summed.sum(1)  # [Hkv, queries, tokens]
        out = request.by_query[b, :, : request.stored_rows(q.shape[1])]
        if request.rows != "each":
            sums = sums.sum(1, keepdim=True)
        if codes is not None:
            out[..., :count] = sums[..., :count]
        else:
            stop = max(first, min(int(end[b]), keys.shape[2]))
            out[..., first:stop] = sums[..., : stop - first]
