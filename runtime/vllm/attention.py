"""Attention over a paged cache of codes, as a backend of vLLM.

A query reads full pages before its own as INT8 codes (drafts: as INT4), and its own page in full precision, whichever
way it came to be computed: alone, in a chunk of a prompt, after a hit of the prefix cache, or again after a preemption.

Steps that verify drafts may pass the end of a page: those behind it see that page in full precision, as it lies in the
same buffer, and its codes are written again where the tokens that filled it are rejected.

- Steps of one token per sequence, or of one token and its drafts (`StepRows`), run `decode_attention`, in full CUDA
  graphs.
- Prompts (`PromptRow`) run vLLM's FlashAttention twice, over their own pages and over pages before these in full
  precision, and merge the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeplan.kernels.attention import MAX_QUERIES, decode_attention
from ridgeplan.kernels.kv_cache import quantize_to_pages
from ridgeplan.kernels.kv_cache.cuda import GROUP, HEAD_DIMS
from ridgeplan.kernels.kv_cache.layout import PageTable
from ridgeplan.runtime.vllm import api
from ridgeplan.runtime.vllm.pages import LayerPages, OpenPages, codes_of, page_width

CACHE_DTYPE = "int8_per_token_head"  # the dtype of vLLM's whose pages have as many bytes as those of codes
SPARE_SHARE = 4  # buffers beyond those of running sequences: one for every so many
MIN_SPARE = 8
DRAFT_SLOTS = 2 * MAX_QUERIES  # of a buffer, behind the page's end: a step's tokens, and drafts that follow them


class CodesBackend(api.AttentionBackend):
    """vLLM's `--attention-backend CUSTOM`, once `ridgeplan.runtime.vllm.register` was called."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [CACHE_DTYPE]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration that this backend is registered as."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CodesAttention]:
        """The attention of a layer."""
        return CodesAttention

    @staticmethod
    def get_builder_cls() -> type[CodesMetadataBuilder]:
        """The builder of metadata."""
        return CodesMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        """A page is a group."""
        return [GROUP]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Those of the CUDA kernels."""
        return list(HEAD_DIMS)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Tokens of open pages lie outside vLLM's memory, so pages cannot be sent away."""
        return False

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Bytes by page and KV head. Raises ValueError for pages that are no group."""
        if block_size != GROUP:
            raise ValueError(f"--block-size is {block_size}; allowed with ridgeplan's cache: {GROUP}")
        return num_blocks, num_kv_heads, page_width(head_size)


@dataclass(frozen=True, eq=False)
class StepRows:
    """Sequences whose queries `decode_attention` takes: one token each, or a token and its drafts.

    groups, ends: int32 [rows], full pages before a row's own, and one past its first query's slot. tokens: int64 [rows,
    queries], places of the queries in the batch, of which a row with fewer repeats its last; results: int64 [2, n],
    which of the rows' queries, all in one list, count, and their places. None where rows have `queries` tokens each,
    one row after another.
    """

    table: PageTable
    begins: Tensor
    ends: Tensor
    groups: Tensor
    tokens: Tensor | None = None
    results: Tensor | None = None
    queries: int = 1

    def gathered(self, query: Tensor) -> Tensor:
        """The rows' queries [rows, queries, ...]."""
        count = len(self.ends) * self.queries
        return query[:count].unflatten(0, (-1, self.queries)) if self.tokens is None else query[self.tokens]


@dataclass(frozen=True, eq=False)
class PageTurns:
    """Which buffers change their page in a pass with drafts, as `LayerPages.turn` and `LayerPages.fill` take them."""

    turned: Tensor
    filled: Tensor


@dataclass(frozen=True)
class LaterSpans:
    """The queries that see pages before their own: those from `first` on, by page. pages: how many each page sees."""

    first: int
    query_starts: list[int]
    pages: list[int]


@dataclass(frozen=True)
class PromptSpans:
    """A prompt's queries by the page that they lie in, as FlashAttention takes sequences.

    query_starts: where each page's queries begin. own_starts: where its keys do, from the first page's start on. later:
    queries that see pages before their own, if any do.
    """

    query_starts: list[int]
    own_starts: list[int]
    later: LaterSpans | None


@dataclass(frozen=True)
class PromptRow:
    """A sequence's part of a prompt: `tokens` tokens from place `first` of the batch on, after `context` others."""

    row: int
    first: int
    tokens: int
    context: int

    @property
    def spans(self) -> PromptSpans:
        """Its queries by page."""
        earlier, inside = divmod(self.context, GROUP)
        own_starts = [*range(0, inside + self.tokens, GROUP), inside + self.tokens]
        query_starts = [max(0, start - inside) for start in own_starts]
        skipped = 0 if earlier else 1  # the first page's queries see no other page
        starts = query_starts[skipped:]
        pages = [earlier + skipped + page for page in range(len(starts) - 1)]
        later = LaterSpans(starts[0], [start - starts[0] for start in starts], pages) if pages else None
        return PromptSpans(query_starts, own_starts, later)


@dataclass(frozen=True, eq=False)
class CodesMetadata:
    """What a pass needs to know. pages: int32 [rows, n]; buffers: int32 [rows], of open pages.

    slots: int32 [tokens], where in the buffers tokens of `steps` are written, or -1. closing: int32 [tokens], the page
    that is full with the token, or -1. draft: whether codes are read as INT4. turns: with drafts, what happens to
    buffers instead of `closing`.
    """

    pages: Tensor
    buffers: Tensor
    slots: Tensor
    closing: Tensor
    steps: StepRows | None
    prompts: tuple[PromptRow, ...] = ()
    draft: bool = False
    turns: PageTurns | None = None


@dataclass(frozen=True)
class Row:
    """A row of the batch as the host knows it: where its queries begin, their number, and the tokens before them.

    drafts: whether queries may be drafts, so that those of a step may pass the end of a page. Pages are given by their
    index in the sequence, or as -1 where there is none.
    """

    first: int
    queries: int
    context: int
    drafts: bool = False

    @property
    def inside_page(self) -> int:
        """Tokens of the open page before the queries."""
        return self.context % GROUP

    @property
    def is_step(self) -> bool:
        """Whether all queries are in one buffer, few enough for `decode_attention`."""
        in_buffer = self.drafts or self.inside_page + self.queries < GROUP
        return self.queries == 1 or (1 < self.queries <= MAX_QUERIES and in_buffer)

    @property
    def base(self) -> int:
        """The page that the buffer begins with after the pass."""
        turns = self.drafts and self.is_step
        return (self.context if turns else self.context + self.queries) // GROUP

    @property
    def before(self) -> int:
        """The page that is open before the pass."""
        return self.context // GROUP if self.inside_page else -1

    @property
    def after(self) -> int:
        """The page whose tokens the buffer keeps after the pass."""
        keeps = (self.drafts and self.is_step) or (self.context + self.queries) % GROUP
        return self.base if self.queries > 0 and keeps else -1

    @property
    def closes(self) -> int:
        """The page that a step fills."""
        return self.context // GROUP if self.is_step and self.inside_page + self.queries >= GROUP else -1

    @property
    def previous(self) -> int:
        """The page that the buffer may still begin with, as a step has filled it."""
        begins = self.queries > 0 and self.inside_page < MAX_QUERIES
        return self.context // GROUP - 1 if self.drafts and begins else -1

    @property
    def spilled(self) -> int:
        """The page behind the buffer's, if a step writes to it."""
        return self.closes + 1 if self.is_step and self.inside_page + self.queries > GROUP else -1


@dataclass(frozen=True, eq=False)
class LatestRows:
    """The rows of the latest pass, for drafts that follow it: their pages, buffers, and what these begin with."""

    pages: Tensor
    buffers: Tensor
    bases: list[int]


def rows_of(starts: Sequence[int], lengths: Sequence[int], drafts: bool) -> list[Row]:
    """Rows of a batch whose queries begin at `starts` [rows + 1], of sequences of `lengths` tokens with these."""
    counts = [stop - start for start, stop in pairwise(starts)]
    return [
        Row(start, count, max(0, length - count), drafts)
        for start, count, length in zip(starts, counts, lengths, strict=False)
    ]


class CodesMetadataBuilder(api.AttentionMetadataBuilder):
    """Builds `CodesMetadata`, and assigns buffers to open pages."""

    _cudagraph_support: ClassVar[Any] = api.AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.gamma = draft_count(vllm_config.speculative_config)
        self.device = device
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        sequences = vllm_config.scheduler_config.max_num_seqs
        self.open = OpenPages(buffer_count(sequences), device)
        self.capacity = buffer_slots(self.gamma)
        # What graphs read stays in place: each row's buffer, end, and full pages; each token's slot, and the page that
        # it fills; what happens to each buffer.
        self.state = torch.zeros(3, sequences, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(2, sequences * (1 + self.gamma), dtype=torch.int32, device=device)
        self.begins = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.places = torch.arange(1 + self.gamma, device=device)
        count = self.open.count + 1
        self.turns = PageTurns(
            torch.zeros(count, dtype=torch.bool, device=device),
            torch.full((count, 1), -1, dtype=torch.int32, device=device),
        )
        self.layers = vllm_config.compilation_config.static_forward_context, layer_names

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CodesMetadata:
        """The metadata of a pass; see vLLM's `AttentionMetadataBuilder.build`."""
        batch = common_attn_metadata
        pages, count = batch.block_table_tensor, batch.num_reqs
        starts = batch.query_start_loc_cpu.tolist()[: count + 1]
        rows = rows_of(starts, batch.seq_lens_cpu_upper_bound.tolist()[:count], self.gamma > 0)
        named = ["before", "after", "closes", *(("previous", "spilled") if self.gamma else ())]
        index = self._to_device([[getattr(row, what) for row in rows] for what in named])
        before, after, closing, *passed = torch.where(index >= 0, pages.gather(1, index.T.clamp_min(0)).T, -1)
        buffers, turned = self.open.assign(before, after, *passed)
        turns = None
        if self.gamma:
            turns, closed = self.turns, closing
            turns.turned.zero_().scatter_(0, buffers.long(), turned)
            turns.filled[:, 0].fill_(-1).scatter_(0, buffers.long(), closed)
            closing = torch.full_like(closed, -1)
        layers, names = self.layers
        for name in names[:1]:
            layers[name].impl.latest = LatestRows(pages, buffers, [row.base for row in rows])
        uniform = batch.max_query_len in (1, 1 + self.gamma)
        if uniform and all(row.queries in (0, batch.max_query_len) for row in rows):
            return self._uniform(rows, batch.max_query_len, pages, buffers, closing, turns)
        return self._mixed(rows, pages, buffers, closing, batch.num_actual_tokens, turns)

    def _uniform(
        self, rows: Sequence[Row], queries: int, pages: Tensor, buffers: Tensor, closing: Tensor,
        turns: PageTurns | None,
    ) -> CodesMetadata:  # fmt: skip
        """Of a pass with as many tokens of every sequence, or none in rows that pad it."""
        ends = [row.inside_page + 1 if row.queries else 0 for row in rows]
        ends_groups = self._to_device([ends, [row.context // GROUP if row.queries else 0 for row in rows]]).int()
        first = (buffers * self.capacity + ends_groups[0] - 1)[:, None] + self.places[:queries]
        slots = torch.where(ends_groups[:1].T > 0, first, -1)
        state, tokens = self.state[:, : len(rows)], self.tokens[:, : len(rows) * queries]
        state.copy_(torch.stack([buffers, *ends_groups]))
        tokens.copy_(torch.stack([slots, closing[:, None].expand_as(slots)]).flatten(1))
        buffers, ends_, groups = state
        slots, closing = tokens
        steps = StepRows(PageTable(pages, buffers), self.begins[: len(rows)], ends_, groups, queries=queries)
        return CodesMetadata(pages, buffers, slots, closing, steps, turns=turns)

    def _mixed(
        self, rows: Sequence[Row], pages: Tensor, buffers: Tensor, closing: Tensor, tokens: int, turns: PageTurns | None
    ) -> CodesMetadata:
        """Of a pass with prompts, or with unlike numbers of drafts."""
        steps = [i for i, row in enumerate(rows) if row.is_step]
        prompts = [
            PromptRow(i, row.first, row.queries, row.context)
            for i, row in enumerate(rows)
            if row.queries > 0 and not row.is_step
        ]
        offsets, owners = [-1] * tokens, [0] * tokens
        for i in steps:
            for query in range(rows[i].queries):
                offsets[rows[i].first + query], owners[rows[i].first + query] = rows[i].inside_page + query, i
        offset, owner = self._to_device([offsets, owners])
        slots = torch.where(offset >= 0, buffers[owner] * self.capacity + offset, -1).int()
        closes = torch.where(offset >= 0, closing[owner], -1)
        step_rows = self._steps(rows, steps, pages, buffers)
        return CodesMetadata(pages, buffers, slots, closes, step_rows, tuple(prompts), turns=turns)

    def _steps(self, rows: Sequence[Row], steps: Sequence[int], pages: Tensor, buffers: Tensor) -> StepRows | None:
        if not steps:
            return None
        queries = max(rows[i].queries for i in steps)
        tokens = [[rows[i].first + min(query, rows[i].queries - 1) for query in range(queries)] for i in steps]
        ends, groups = [rows[i].inside_page + 1 for i in steps], [rows[i].context // GROUP for i in steps]
        index, places = self._to_device([list(steps)])[0], self._to_device([ends, groups]).int()
        table = PageTable(pages[index], buffers[index])
        counted = [
            (queries * row + query, rows[i].first + query)
            for row, i in enumerate(steps)
            for query in range(rows[i].queries)
        ]
        results = self._to_device([list(column) for column in zip(*counted, strict=True)])
        return StepRows(table, torch.zeros_like(places[0]), places[0], places[1], self._to_device(tokens), results)

    def _to_device(self, values: list[list[int]]) -> Tensor:
        host = torch.tensor(values, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)


def buffer_count(sequences: int) -> int:
    """Buffers of open pages for so many running sequences."""
    return sequences + max(MIN_SPARE, sequences // SPARE_SHARE)


def buffer_slots(gamma: int) -> int:
    """Tokens that a buffer of an open page holds, with `gamma` drafts per round."""
    return GROUP + (DRAFT_SLOTS if gamma else 0)


def draft_count(speculative: Any) -> int:
    """Drafts of a round, 0 without any. Raises ValueError for another proposer's, and for too many."""
    if speculative is None:
        return 0
    if not str(speculative.model).startswith("ridgeplan."):
        raise ValueError(f"drafts by {speculative.method!r} with ridgeplan's cache; allowed: ridgeplan's own, or none")
    count = int(speculative.num_speculative_tokens)
    if not 0 < count < MAX_QUERIES:
        raise ValueError(f"num_speculative_tokens is {count}; allowed with ridgeplan's cache: 1 to {MAX_QUERIES - 1}")
    return count


def refused(**given: Any) -> str | None:
    """Why a layer's attention is not what the backend computes; None if it is."""
    set_options = [name for name, value in given.items() if value is not None and value is not False]
    return f"attention with {', '.join(set_options)} is not carried by ridgeplan's cache" if set_options else None


class CodesAttention(api.AttentionImpl):
    """The attention of a layer; see vLLM's `AttentionImpl`. Raises ValueError for kinds of attention it lacks."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = api.AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, **others: Any,
    ) -> None:  # fmt: skip
        decoder = attn_type == api.AttentionType.DECODER
        reason = refused(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap or None,
            attn_type=None if decoder else attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            **others,
        )
        if reason:
            raise ValueError(reason)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        config = api.get_current_vllm_config()
        self.max_tokens = config.model_config.max_model_len
        slots = buffer_slots(draft_count(config.speculative_config))
        shape = (buffer_count(config.scheduler_config.max_num_seqs) + 1, self.num_kv_heads, slots, head_size)
        # Zeros: slots that no token has written yet are multiplied by probabilities of zero.
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.flash_version = api.get_flash_attn_version(head_size=head_size)
        self.latest: LatestRows | None = None  # of the first layer, what the builder built last
        self._pages: LayerPages | None = None

    def pages(self, cache: Tensor) -> LayerPages:
        """The layer's cache in vLLM's memory `cache`."""
        known = self._pages
        if known is None or known.codes.key_upper.data_ptr() != cache.data_ptr() or known.codes.batch != len(cache):
            known = self._pages = LayerPages(codes_of(cache, self.head_size), self.keys, self.values)
        return known

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: CodesMetadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Stores keys and values [tokens, kv_heads, head_dim] and writes the attention of `query` to `output`."""
        if attn_metadata is None:  # vLLM measures the memory that a pass takes
            self._reserve(query)
            return output.fill_(0)
        metadata, pages = attn_metadata, self.pages(kv_cache)
        out = output.view(-1, self.num_heads, self.head_size)
        turns = metadata.turns
        if turns is not None:
            pages.turn(turns.turned)
        if metadata.steps is not None:
            count = len(metadata.slots)
            pages.append(key[:count], value[:count], metadata.slots, metadata.closing)
            if turns is not None:
                pages.fill(turns.filled)
        prompts = [self._store_prompt(pages, metadata, row, key, value) for row in metadata.prompts]
        for row, recent in zip(metadata.prompts, prompts, strict=True):  # which may read what another has just stored
            part = slice(row.first, row.first + row.tokens)
            out[part] = self._attend_prompt(pages, metadata, row, query[part], *recent)
        if metadata.steps is not None:
            self._step(pages, metadata.steps, query, out, metadata.draft)
        return output

    def _reserve(self, query: Tensor) -> None:
        """Takes the memory of the longest sequence's pages in full precision and as gathered codes, and frees it."""
        width = page_width(self.head_size)
        for dtype, copies in ((query.dtype, 2 * GROUP * self.head_size), (torch.uint8, width)):
            torch.empty(-(-self.max_tokens // GROUP) * self.num_kv_heads, copies, dtype=dtype, device=query.device)

    def attend(
        self, pages: LayerPages, rows: StepRows, query: Tensor, draft: bool, out: Tensor | None = None
    ) -> Tensor:
        """Attention of steps' queries [rows, queries, heads, head_dim] over codes, of drafts over upper ones."""
        return decode_attention(
            query, pages.keys, pages.values, rows.begins, rows.ends, pages.codes, rows.groups,
            lower=not draft, scale=self.scale, pages=rows.table, out=out,
        )  # fmt: skip

    def _step(self, pages: LayerPages, rows: StepRows, query: Tensor, out: Tensor, draft: bool) -> None:
        queries = rows.gathered(query)
        if rows.results is None:
            self.attend(pages, rows, queries, draft, out[: queries.shape[:2].numel()].view(queries.shape))
        else:
            result = self.attend(pages, rows, queries, draft).flatten(0, 1)
            out.index_copy_(0, rows.results[1], result[rows.results[0]])

    def _store_prompt(
        self, pages: LayerPages, metadata: CodesMetadata, row: PromptRow, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Writes full pages as codes, and the rest to the open page. Keys and values from the first page's start on."""
        buffer = metadata.buffers[row.row : row.row + 1].long()
        key, value = (x[row.first : row.first + row.tokens] for x in (key, value))
        earlier, inside = divmod(row.context, GROUP)
        if inside:
            held = (store[buffer][0, :, :inside].transpose(0, 1) for store in (self.keys, self.values))
            key, value = (torch.cat(pair) for pair in zip(held, (key, value), strict=True))
        full = len(key) // GROUP
        if full:
            whole_keys, whole_values = (x[None, : full * GROUP].transpose(1, 2) for x in (key, value))
            table = metadata.pages[row.row : row.row + 1, earlier : earlier + full]
            quantize_to_pages(whole_keys, whole_values, pages.codes, table.contiguous())
        rest = len(key) - full * GROUP
        if rest:
            for store, tokens in ((self.keys, key), (self.values, value)):
                store[buffer, :, :rest] = tokens[None, full * GROUP :].transpose(1, 2)
        return key, value

    def _attend_prompt(
        self, pages: LayerPages, metadata: CodesMetadata, row: PromptRow, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attention of a prompt's tokens, with `key` and `value` from `_store_prompt`."""
        spans = row.spans
        own, own_lse = self._flash(
            query, key, value, spans.query_starts, GROUP, causal=True, cu_seqlens_k=_int32(spans.own_starts, query)
        )
        later = spans.later
        if later is None:
            return own
        stored = pages.read(metadata.pages[row.row, : max(later.pages)], query.dtype)
        order = torch.arange(max(later.pages), dtype=torch.int32, device=query.device)
        before, before_lse = self._flash(
            query[later.first :], *stored, later.query_starts, GROUP * max(later.pages), causal=False,
            seqused_k=_int32([GROUP * count for count in later.pages], query),
            block_table=order.repeat(len(later.pages), 1),
        )  # fmt: skip
        merged = torch.empty_like(before)
        behind, behind_lse = own[later.first :].contiguous(), own_lse[:, later.first :].contiguous()
        api.merge_attn_states(merged, before, before_lse, behind, behind_lse)
        return torch.cat([own[: later.first], merged]) if later.first else merged

    def _flash(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Sequence[int], longest: int, **keys: Any
    ) -> tuple[Tensor, Tensor]:
        """vLLM's FlashAttention -> [tokens, heads, head_dim], and log-sum-exps [heads, tokens]."""
        out, lse = api.flash_attn_varlen_func(
            q=query, k=key, v=value, max_seqlen_q=GROUP, cu_seqlens_q=_int32(starts, query), max_seqlen_k=longest,
            softmax_scale=self.scale, return_softmax_lse=True, fa_version=self.flash_version, **keys,
        )  # fmt: skip
        return out, lse


def _int32(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, pin_memory=like.is_cuda).to(like.device, non_blocking=True)
