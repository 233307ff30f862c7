"""Calls of sparse drafts: scores, choice, attention to chosen tokens, and the random caches that they read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ridgeplan.kernels import selection
from ridgeplan.kernels.attention import decode_attention, scores_cost
from ridgeplan.kernels.attention.scores import ScoreRequest, What
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys, pack_draft_planes
from ridgeplan.kernels.sparse_attention import (
    progressive_attention,
    progressive_cost,
    sparse_attention_cost,
    sparse_decode_attention,
)
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.latency import scan_kind
from ridgeplan.validate.kernel_calls.attention import BUFFER_SLOTS, DecodeSize, Heads, fill_with_noise, random_codes
from ridgeplan.validate.kernel_calls.case import BenchCase, Peers, RoofShare, SpeedUp, fresh, relative_error
from ridgeplan.validate.kernel_calls.sizes import GROUP, SparseSize
from ridgeplan.validate.timing import Bench, KernelCall

RATIO = 0.07  # of the tokens: what drafts read in calibration
BENCH_SPLITS = 16  # of the bench's declared costs
QUERIES = 8  # of a verification
PAGE = 16  # tokens
FULL_INT4, WITHOUT = "all upper codes", "without scores"
BANDWIDTH_SHARE = 0.6  # of the contiguous kernel's, for the bytes that chosen tokens need
MAX_OF_INT4 = {1: 0.35, 4: 0.30}  # progressive attention over attention to all upper codes, by batch
MAX_COLLECTING = 1.02  # verification with scores over one without


def chosen_tokens(ratio: float, tokens: int) -> int:
    """Tokens that a KV head chooses."""
    return max(1, int(ratio * tokens))


@dataclass(frozen=True, eq=False)
class SparseDraft:
    """Queries [B, T, Hq, D] that read some tokens of one of several caches, and their recent tokens [B, Hkv, N, D].

    codes, planes: of all caches, [variants * B] rows. chosen: tokens that a KV head reads.
    """

    size: DecodeSize
    chosen: int
    q: Tensor
    keys: Tensor
    values: Tensor
    codes: QuantizedKV
    planes: DraftPlanes

    @classmethod
    def random(cls, bench: Bench, size: DecodeSize) -> SparseDraft:
        """One query of each sequence over random codes; the variants' 2-bit keys exceed the device's caches."""
        heads = size.heads
        variants = bench.variants(size.batch * heads.kv_heads * size.quantized_tokens * heads.head_dim / 2)
        codes = random_codes(bench, size, variants)
        planes = DraftPlanes.allocate(codes)
        for plane in (planes.key_two_bit, planes.value_rows):
            fill_with_noise(bench, plane)
        q = bench.random(size.batch, 1, heads.q_heads, heads.head_dim)
        keys, values = bench.random(2, size.batch, heads.kv_heads, size.full_tokens, heads.head_dim)
        return cls(size, chosen_tokens(RATIO, size.quantized_tokens), q, keys, values, codes, planes)

    @classmethod
    def quantized(cls, bench: Bench, size: SparseSize, queries: int = 1, lower: bool = False) -> SparseDraft:
        """Codes of random keys and values, with enough variants for their 2-bit keys to exceed the GPU's caches."""
        head_shape = (size.kv_heads, size.tokens, size.head_dim)
        rows = size.batch * bench.variants(size.batch * math.prod(head_shape) / 4)
        # Sharp queries, as models have: tokens at the edge of what is chosen weigh little.
        q = 4 * fresh(bench, size.batch, queries, size.q_heads, size.head_dim)
        codes = QuantizedKV.allocate(
            rows, size.kv_heads, size.tokens // GROUP, GROUP, size.head_dim, bench.device, lower
        )
        first, chosen = torch.zeros(1, dtype=torch.int32, device=bench.device), chosen_tokens(size.ratio, size.tokens)
        for row in range(rows):
            keys, values = fresh(bench, 2, 1, *head_shape)
            if size.clustered:
                neighbors = slice(size.tokens // 2, size.tokens // 2 + chosen)
                keys[0, :, neighbors] += _towards(q[row % size.batch], size.kv_heads)
            quantize(keys, values, codes.rows(slice(row, row + 1)), first)
        planes = DraftPlanes.allocate(codes)
        pack_draft_planes(codes, planes, first.expand(rows).contiguous(), codes.groups)
        keys, values = fresh(bench, 2, size.batch, size.kv_heads, BUFFER_SLOTS, size.head_dim)
        heads = Heads(size.q_heads, size.kv_heads, size.head_dim)
        decode = DecodeSize(
            size.name, heads, size.batch, size.tokens, queries, 8 if lower else 4, size.tokens, BUFFER_SLOTS
        )
        return cls(decode, chosen, q, keys, values, codes, planes)

    @property
    def variants(self) -> int:
        """Number of caches."""
        return self.codes.batch // self.size.batch

    def integers(self, value: int) -> Tensor:
        """int32 [B] filled with `value`."""
        return torch.full((self.size.batch,), value, dtype=torch.int32, device=self.q.device)

    @cached_property
    def window(self) -> tuple[Tensor, Tensor]:
        """begin and end of the recent tokens."""
        return self.integers(0), self.integers(self.keys.shape[2] - self.size.queries + 1)

    @cached_property
    def groups(self) -> Tensor:
        """All groups of each row."""
        return self.integers(self.codes.groups)

    @cached_property
    def k(self) -> Tensor:
        """How many tokens each row chooses."""
        return self.integers(self.chosen)

    def cache(self, variant: int) -> tuple[QuantizedKV, DraftPlanes]:
        """The codes and planes of one cache."""
        rows = slice(variant * self.size.batch, (variant + 1) * self.size.batch)
        return self.codes.rows(rows), self.planes.rows(rows)

    def full(self, variant: int) -> Tensor:
        """Attention to all upper codes, the kernel that sparse drafts are compared with."""
        codes, _ = self.cache(variant)
        return decode_attention(self.q, self.keys, self.values, *self.window, codes, self.groups)

    def choose(self, variant: int, backend: Backend = "auto") -> Tensor:
        """The choice by 2-bit keys [B, Hkv, chosen]."""
        keys = TwoBitKeys.of(*self.cache(variant))
        return selection.two_bit_top_k(self.q, keys, self.groups, self.k, max_k=self.chosen, backend=backend)[0]

    def progressive(self, variant: int, backend: Backend = "auto") -> Tensor:
        """Scan, choice and attention in one kernel."""
        return progressive_attention(
            self.q, self.keys, self.values, *self.window, *self.cache(variant), self.groups, self.k,
            max_k=self.chosen, backend=backend,
        )  # fmt: skip

    def choice_call(self) -> KernelCall:
        """The choice by 2-bit keys.

        Its error is the share of the best tokens' scores that the chosen tokens miss. Where scores differ by less than
        the kernel's rounding steps it selects other tokens, which costs hardly any score.
        """
        size, heads = self.size, self.size.heads
        cost = selection.two_bit_top_k_cost(self.q, TwoBitKeys.of(*self.cache(0)), size.quantized_tokens, self.chosen)
        kind = scan_kind("two_bit_scan", *astuple(heads))
        return KernelCall(kind, size.name, cost, self.choose, self.variants, error=self._lost_scores)

    def progressive_call(self, splits: int, peers: Peers | None = None) -> KernelCall:
        """The whole attention of one draft query.

        Its error is measured on `with_clear_choice`: where scores nearly tie, the kernels may choose different tokens.
        """
        size, heads = self.size, self.size.heads
        tokens = size.quantized_tokens, self.chosen, size.full_tokens
        cost = progressive_cost(self.q, self.cache(0)[0], *tokens, splits)
        kind = scan_kind("progressive_attention", *astuple(heads))

        def error() -> float:
            draft = self.with_clear_choice()
            return relative_error(draft.progressive(0), draft.progressive(0, "reference"))

        return KernelCall(kind, size.name, cost, self.progressive, self.variants, error=error, peers=peers or {})

    def with_clear_choice(self) -> SparseDraft:
        """A draft of the same size with one cache, of which all kernels choose the same tokens.

        An equal number of tokens in each group have keys along their KV head's queries, and all others score powers of
        two lower. So neither scores compared in coarse steps nor shares of k for parts of a row select other tokens.
        """
        batch, heads, q = self.size.batch, self.size.heads, self.q
        groups, group, head_dim = self.codes.groups, self.codes.group, heads.head_dim
        per_group = max(1, self.chosen // groups)
        direction = torch.randn(batch, heads.kv_heads, 1, head_dim, device=q.device)
        queries = direction + torch.randn_like(q.float()).view(*direction.shape[:2], -1, head_dim) / 4
        codes = QuantizedKV.allocate(batch, heads.kv_heads, groups, group, head_dim, q.device, lower=False)
        first = torch.zeros(1, dtype=torch.int32, device=q.device)
        for row in range(batch):
            keys, values = torch.randn(2, heads.kv_heads, groups, group, head_dim, device=q.device)
            places = torch.rand(keys.shape[:3], device=q.device).topk(per_group).indices
            selected = torch.zeros(keys.shape[:3], device=q.device).scatter_(2, places, 1)[..., None]
            # Logits of about 5, where those of other tokens have a standard deviation of 1/4.
            keys = keys / 4 + 5 * head_dim**-0.5 * direction[row, :, None] * selected
            keys, values = (x.flatten(1, 2)[None].to(q.dtype) for x in (keys, values))
            quantize(keys, values, codes.rows(slice(row, row + 1)), first)
        planes = DraftPlanes.allocate(codes)
        pack_draft_planes(codes, planes, first.expand(batch).contiguous(), groups)
        q = queries.view_as(q).to(q.dtype)
        return replace(self, chosen=per_group * groups, q=q, codes=codes, planes=planes)

    def _lost_scores(self) -> float:
        scores = selection.two_bit_scores(self.q, TwoBitKeys.of(*self.cache(0)), self.groups, backend="reference").exp()

        def total(chosen: Tensor) -> Tensor:
            return (scores * torch.zeros_like(scores).scatter_(2, chosen.long(), 1)).sum()

        return 1 - float(total(self.choose(0)) / total(self.choose(0, "reference")))


def _towards(q: Tensor, kv_heads: int) -> Tensor:
    """A quarter of each KV head's mean query [Hkv, 1, D], which raises keys' logits by some standard deviations."""
    return q.unflatten(1, (kv_heads, -1)).mean((0, 2))[:, None] / 4


@dataclass(frozen=True, eq=False)
class SparseAttention:
    """Attention to an index list of tokens or pages of a draft's upper codes, of one length for every KV head.

    full: keys and values of all tokens in full precision instead, [variants, 2, B, Hkv, tokens, D].
    """

    draft: SparseDraft
    index: Tensor
    count: Tensor
    page: int
    full: Tensor | None = None

    @classmethod
    def draw(cls, draft: SparseDraft, page: int = 1, full: Tensor | None = None) -> SparseAttention:
        """Random distinct tokens or pages in ascending order, as top-k leaves them."""
        size, device = draft.size, draft.q.device
        sets, count = (size.batch, size.heads.kv_heads), max(1, draft.chosen // page)
        pages = torch.rand(*sets, size.quantized_tokens // page, device=device).topk(count).indices.sort(-1).values
        return cls(draft, pages.int(), torch.full(sets, count, dtype=torch.int32, device=device), page, full)

    def __call__(self, variant: int) -> Tensor:
        return self._attend(variant, "auto")

    def gathered(self, variant: int) -> Tensor:
        """The same in torch: gathers keys and values that are already dequantized, for scaled_dot_product_attention."""
        keys, values = self._dense
        places = self.index.long()[..., None] * self.page + torch.arange(self.page, device=self.index.device)
        places = places.flatten(2)[..., None].expand(-1, -1, -1, keys.shape[3])
        gathered = keys.gather(2, places), values.gather(2, places)
        return scaled_dot_product_attention(self.draft.q.transpose(1, 2), *gathered, enable_gqa=True)

    def error(self) -> float:
        """Relative error against the reference."""
        return relative_error(self(0), self._attend(0, "reference"))

    def cost(self, splits: int) -> Cost:
        """The declared cost, without the merge of the splits."""
        size, bits = self.draft.size, ops.UPPER_BITS if self.full is None else 0
        choice = self.index, self.page
        return sparse_attention_cost(self.draft.q, size.heads.kv_heads, *choice, size.full_tokens, bits, GROUP, splits)

    def call(self, cost: Cost, peers: Peers | None = None) -> KernelCall:
        """The call. cost: with the merge of the splits, if the caller counts it."""
        draft, pages = self.draft, f", pages of {self.page}" if self.page > 1 else ""
        kind, variants = "sparse_attention", draft.variants
        if self.full is not None:
            kind, variants = "sparse_attention_full", len(self.full)
        return KernelCall(kind, f"{draft.size.name}{pages}", cost, self, variants, error=self.error, peers=peers or {})

    def _attend(self, variant: int, backend: Backend) -> Tensor:
        draft, (begin, end) = self.draft, self.draft.window
        if self.full is not None:
            (keys, values), old = self.full[variant], draft.size.quantized_tokens
            return sparse_decode_attention(
                draft.q, keys, values, begin + old, end + old, self.index, self.count, page=self.page,
                backend=backend,
            )  # fmt: skip
        codes, planes = draft.cache(variant)
        return sparse_decode_attention(
            draft.q, draft.keys, draft.values, begin, end, self.index, self.count, codes, draft.groups,
            value_rows=planes.value_rows, page=self.page, backend=backend,
        )  # fmt: skip

    @cached_property
    def _dense(self) -> tuple[Tensor, Tensor]:
        size, q = self.draft.size, self.draft.q
        shape = (size.batch, size.heads.kv_heads, size.quantized_tokens, size.heads.head_dim)
        keys, values = torch.randn(2, *shape, dtype=q.dtype, device=q.device)
        return keys, values


def top_k_call(name: str, scores: Tensor, chosen: int) -> KernelCall:
    """The choice of the `chosen` best of each row of scores [variants, rows, tokens]; its peer is torch's, unordered.

    Its error is the share of the chosen tokens that differ from the reference's.
    """
    rows, tokens = scores.shape[1:]
    lengths, k = (torch.full((rows,), value, dtype=torch.int32, device=scores.device) for value in (tokens, chosen))

    def choose(variant: int, backend: Backend = "auto") -> Tensor:
        return selection.top_k(scores[variant], lengths, k, chosen, backend=backend)[0]

    def error() -> float:
        return float((choose(0) != choose(0, "reference")).float().mean())

    peers: Peers = {"torch.topk": lambda variant: scores[variant].topk(chosen, sorted=False).indices}
    return KernelCall(
        "top_k", name, selection.top_k_cost(scores[0], chosen), choose, len(scores), error=error, peers=peers
    )


def two_bit_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[BenchCase]:
    """The choice by 2-bit keys."""
    for size in sizes:
        yield BenchCase("two_bit", SparseDraft.quantized(bench, size).choice_call(), RoofShare(0.7))


def progressive_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[BenchCase]:
    """Scan, choice and attention of one draft query, against attention to all upper codes."""
    for size in sizes:
        draft = SparseDraft.quantized(bench, size)
        target = SpeedUp(1 / MAX_OF_INT4.get(size.batch, 0.35))
        call = draft.progressive_call(BENCH_SPLITS, {FULL_INT4: draft.full})
        yield BenchCase("progressive", call, target, (FULL_INT4,))


def top_k_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[BenchCase]:
    """The choice of each KV head's best tokens, against torch's."""
    for size in sizes:
        rows = size.batch * size.kv_heads
        scores = torch.randn(bench.variants(4 * rows * size.tokens), rows, size.tokens, device=bench.device)
        name = f"{rows} rows, {size.tokens} scores, {size.ratio:.0%}"
        call = top_k_call(name, scores, chosen_tokens(size.ratio, size.tokens))
        yield BenchCase("top_k", call, SpeedUp(1.0))


def page_scores_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[BenchCase]:
    """Quest's bounds of pages."""
    return (BenchCase("page_scores", _page_scores_call(bench, size), RoofShare(0.6)) for size in sizes)


def _page_scores_call(bench: Bench, size: SparseSize) -> KernelCall:
    bounds = selection.page_bounds(fresh(bench, size.batch, size.kv_heads, size.tokens, size.head_dim), PAGE)
    caches = torch.stack([bounds] * bench.variants(bounds.nbytes))
    q = fresh(bench, size.batch, 1, size.q_heads, size.head_dim)
    pages = torch.full((size.batch,), bounds.shape[2], dtype=torch.int32, device=bench.device)
    name = f"{size.q_heads}/{size.kv_heads} x {size.head_dim}, B{size.batch}, {size.tokens} tokens, pages of {PAGE}"

    def scan(variant: int, backend: Backend = "auto") -> Tensor:
        return selection.page_scores(q, caches[variant], pages, backend=backend)

    def error() -> float:
        return relative_error(scan(0), scan(0, "reference"))

    return KernelCall("page_scores", name, selection.page_scores_cost(q, bounds), scan, len(caches), error=error)


def sparse_attention_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[BenchCase]:
    """Attention to chosen tokens and to pages of 16, against all upper codes and against a gather by torch.

    The target: at least `BANDWIDTH_SHARE` of the contiguous kernel's bytes per second, for the bytes that are needed.
    """
    for size in sizes:
        draft = SparseDraft.quantized(bench, size)
        all_codes = draft.size.cost(draft.q, BENCH_SPLITS)
        for page in (1, PAGE):
            attention = SparseAttention.draw(draft, page)
            cost = attention.cost(BENCH_SPLITS)
            target = SpeedUp(BANDWIDTH_SHARE * float(all_codes.read_bytes / cost.read_bytes))
            call = attention.call(cost, {FULL_INT4: draft.full, "torch gather + SDPA": attention.gathered})
            yield BenchCase("sparse_attention", call, target, (FULL_INT4,))


def scores_call(draft: SparseDraft, what: What, peers: Peers) -> KernelCall:
    """A verification of several queries over INT8 that leaves the scores of the first and the last one.

    It is costed as attention to all codes and the scores. Its error is that of the scores against the reference's, from
    the queries' own log-sum-exps.
    """
    size, q = draft.size, draft.q
    out = torch.zeros(size.batch, size.heads.kv_heads, size.quantized_tokens, device=q.device)
    lse = torch.zeros(size.batch, size.heads.q_heads, device=q.device)
    request = ScoreRequest(out, "ends", what, lse)

    def error() -> float:
        _verify(draft, request, 0)
        expected = replace(request, out=torch.zeros_like(out), lse=lse.clone())
        _verify(draft, expected, 0, "reference")
        _verify(draft, request, 0)
        return relative_error(out, expected.out)

    cost = size.cost(q, BENCH_SPLITS) + scores_cost(request, q, size.quantized_tokens)
    name = f"{size.name.rpartition(',')[0]}, {QUERIES} queries, INT8, {what}"
    return KernelCall(size.kind, name, cost, partial(_verify, draft, request), draft.variants, error=error, peers=peers)


def _verify(draft: SparseDraft, request: ScoreRequest | None, variant: int, backend: Backend = "auto") -> Tensor:
    codes, _ = draft.cache(variant)
    return decode_attention(
        draft.q, draft.keys, draft.values, *draft.window, codes, draft.groups, lower=True, scores=request,
        backend=backend,
    )  # fmt: skip


def scores_cases(bench: Bench, sizes: Iterable[SparseSize]) -> Iterator[BenchCase]:
    """Verification of 8 queries that leaves the first and last one's scores, against one that does not."""
    kinds: tuple[What, ...] = ("logits", "probabilities")
    for size in sizes:
        draft = SparseDraft.quantized(bench, size, QUERIES, lower=True)
        peers = {WITHOUT: partial(_verify, draft, None)}
        for what in kinds:
            yield BenchCase("scores", scores_call(draft, what, peers), SpeedUp(1 / MAX_COLLECTING), (WITHOUT,))
