"""A plan in numbers: lengths, formats, budgets and acceptance. Rates are in latency.py."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from ridgeplan.roofline.cost import Term, indicator, is_symbolic, maximum, minimum
from ridgeplan.roofline.execution import mean_quantized_tokens, prompt_chunks

UNLIMITED_TOKENS = float(1 << 40)  # a budget that never binds

UNLIMITED_BYTES = float(1 << 60)

HEAD_VOCAB = 32000  # tokens that a draft head predicts, of EAGLE-3's heads for Llama-3.1-8B

# Share of an offloaded layer's budget that the previous step already loaded, as published (SpeContext, section 5.4 and
# Fig 6b). Policies were measured to have less (roofline/plan/policies/selections.py).
ELASTIC_OVERLAP = 0.9


@dataclass(frozen=True, kw_only=True)
class PassStrategy:
    """What one kind of pass reads, and how it selects the tokens that it attends to.

    Weight bytes are per parameter and include scales and zeros. A pass that attends to every token selects nothing: its
    fields of selection are 0, and its pages and runs 1 token.
    """

    weight_bytes: Term
    head_bytes: Term
    dense: Term  # 16-bit weights, not quantized ones
    head_dense: Term
    bits: Term  # of the KV codes that the pass reads
    page_tokens: Term = 1  # selected tokens of a KV head that are adjacent on the device
    host_run_tokens: Term = 1  # the same on the host, where tokens of several heads may be adjacent, too
    projected_params: Term = 0  # of projections that only the selection uses
    scored_keys: Term = 0  # keys of one layer scored per cached token and step, summed over layers
    logit_bytes: Term = 0  # written, and read again, per cached token and query
    scans_two_bit: Term = 0  # selects by 2-bit keys: drafts within their attention, the target in separate kernels
    top_k_launches: Term = 0  # of a step; a selection once a round needs one for all layers
    ranked_scores: Term = 0  # by top-k, per cached token and query, summed over layers
    score_bytes: Term = 0  # moved per cached token and query, summed over layers
    small_kernels: Term = 0  # launched for each query's selection besides
    unbudgeted_tokens: Term = 0  # read beside the budget


@dataclass(frozen=True, kw_only=True)
class TargetStrategy(PassStrategy):
    """The target's pass: verification of a round's drafts, or a plain step."""

    budget: Term = UNLIMITED_TOKENS
    table_saved_bytes: Term = 0  # per parameter of the embedding's table, less than in full precision
    selects: Term = 0  # each query attends to its own selection
    selected_before_pass: Term = 0  # the selection is known before the first layer
    shared_across_layers: Term = 0  # all layers attend to the same tokens
    experts_share: Term = 1  # of the dense library's rate that routed experts of prompts reach on a GPU
    grouped_experts: Term = 0  # prompts' routed experts are grouped products where there are enough rows
    grouped_rows: Term = 0  # of each expert, from which on they are
    expert_extra_rows: Term = 0  # of each expert, in whose time these take it
    copies_experts: Term = 0  # these take dense copies of codes
    keeps_generated: Term = 0  # selects among the prompt's tokens, and attends to all generated ones


@dataclass(frozen=True, kw_only=True)
class DraftStrategy(PassStrategy):
    """A draft step."""

    has_weights: Term = 0  # a separate copy of the weights
    ratio: Term = 1  # share of the cached tokens that drafts read
    min_tokens: Term = 0  # read at least
    loads: Term = 0  # selected tokens are loaded from the host
    round_score_bytes: Term = 0  # moved per cached token, once a round, summed over layers
    query_score_bytes: Term = 0  # written and held per cached token for each drafted token, summed over layers


@dataclass(frozen=True, kw_only=True)
class OffloadStrategy:
    """Layers whose KV is on the host."""

    active: Term = 0
    budget: Term = UNLIMITED_TOKENS
    lower_only: Term = 0  # only the lower codes leave the device
    prefetch: Term = 1  # layers copied ahead
    all_at_once: Term = 0  # all layers leave as soon as one must (a placement decided before generation)
    adaptive: Term = 0  # layers leave while tokens are generated (SpeContext, Algorithm 2), not all before
    memory_limit_bytes: Term = UNLIMITED_BYTES  # of the device, beyond which layers leave
    overlap: Term = ELASTIC_OVERLAP  # share of a step's selection that the previous step had selected too
    slot_table_bytes: Term = 0  # of tables that list the tokens in slots; per token, layer and sequence


@dataclass(frozen=True, kw_only=True)
class EvictionStrategy:
    """Eviction of a prompt's tokens during prefill."""

    budget: Term = UNLIMITED_TOKENS  # tokens of a prompt that stay, the mean over the layers
    scored_queries: Term = 0  # queries whose attention scores a prompt's tokens
    appended_tokens: Term = 0  # run after a prompt to score it, and dropped
    chunk: Term = UNLIMITED_TOKENS  # maximum tokens of a prompt between two evictions of every layer


@dataclass(frozen=True)
class PromptChunks:
    """The chunks in which a prompt goes through all layers, where every layer evicts after each chunk; else one chunk.

    tokens: of each chunk; longest: of the longest. held: tokens of earlier chunks in a layer that a chunk attends to,
    the mean over the chunks. evicting: chunks after which tokens are evicted. candidates: tokens of a layer of which
    an eviction chooses those that stay.
    """

    count: Term
    tokens: Term
    longest: Term
    held: Term
    evicting: Term
    candidates: Term


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A plan in numbers. Every term is a number, an array with one entry per plan, or a sympy symbol.

    Flags are 0 or 1. Bits of codes are 0 where full precision is read. Budgets are in tokens; UNLIMITED_TOKENS means
    none.
    """

    batch: Term
    context: Term
    new_tokens: Term
    target: TargetStrategy
    draft: DraftStrategy
    offload: OffloadStrategy = field(default_factory=OffloadStrategy)
    eviction: EvictionStrategy = field(default_factory=EvictionStrategy)
    # KV cache
    stores_full_kv: Term = 1  # the whole context is stored in full precision
    code_planes: Term = 0  # 4-bit planes stored: 0, 1 (upper) or 2 (upper and lower)
    kv_group: Term = 128  # tokens
    # What selections keep on the device
    held_keys: Term = 0  # in multiples of one layer's keys, summed over layers
    held_plane_bits: Term = 0  # of codes stored by token, per element of the keys, summed over layers
    held_score_bytes: Term = 0  # scores, per cached token
    # Speculation
    gamma: Term = 0
    acceptance: Term = 1  # conditional acceptance
    reserved_gamma: Term = 0  # drafts that memory is reserved for, where an adaptive gamma may grow
    # A drafter below the self-drafts
    proposals: Term = 0  # that it makes at a time
    cascade_passes: Term = 0  # of the self-draft, each of which verifies proposals; 0 where the target does
    hit: Term = 0  # share of the passes before which it has proposals
    proposal_acceptance: Term = 0  # by the self-draft, conditional; that by the target is `acceptance`
    uses_head: Term = 0  # a trained drafter proposes, not a lookup
    proposes_block: Term = 0  # it proposes all tokens in one step
    head_window: Term = UNLIMITED_TOKENS  # latest tokens that a head reads
    head_vocab: Term = HEAD_VOCAB  # tokens that it predicts
    mtp_head_params: Term = 0  # parameters of an MTP head, a layer of the model; 0 for an EAGLE-3 head
    adaptation: Term = 1  # times a round's tokens that rounds yield where each text has the kind that suits it

    def with_terms(self, **terms: Term) -> Strategy:
        """The strategy with other terms. A part's terms have its name before theirs: `draft_ratio`, `offload_budget`.

        Raises ValueError for a name that is not one of `TERM_NAMES`.
        """
        changes: dict[str, dict[str, Term]] = defaultdict(dict)
        for name, term in terms.items():
            if name not in TERM_NAMES:
                raise ValueError(f"{name!r} is not a term of a strategy; allowed: {', '.join(sorted(TERM_NAMES))}")
            part, field_name = TERM_NAMES[name]
            changes[part][field_name] = term
        parts = {part: replace(getattr(self, part), **part_terms) for part, part_terms in changes.items() if part}
        return replace(self, **changes[""], **parts)

    @property
    def kept_tokens(self) -> Term:
        """Tokens of a prompt that stay in the cache."""
        return minimum(self.context, self.eviction.budget)

    @property
    def evicts(self) -> Term:
        """1 where a prompt loses any token, else 0."""
        return minimum(maximum(self.context - self.kept_tokens, 0), 1)

    @property
    def appended_tokens(self) -> Term:
        """Tokens that prefill runs after a prompt, or after each chunk of it that evicts, and then drops."""
        return self.evicts * self.eviction.appended_tokens

    @cached_property
    def prompt_chunks(self) -> PromptChunks:
        """The chunks of one prompt."""
        context, kept, chunk = self.context, self.kept_tokens, self.eviction.chunk
        if not is_symbolic(chunk) and np.all(np.asarray(chunk) >= UNLIMITED_TOKENS):
            return PromptChunks(1, context, context, 0, 1, context)
        count = 1 + self.evicts * (prompt_chunks(context, chunk) - 1)
        tokens = context / count
        filling = minimum(kept // tokens, count - 1)  # chunks after which a layer still has room
        held = (tokens * filling * (filling + 1) / 2 + kept * (count - 1 - filling)) / count
        return PromptChunks(count, tokens, -(-context // count), held, count - filling, minimum(kept + tokens, context))

    @property
    def scoring_queries(self) -> Term:
        """The last queries of the text so far, whose attention scores tokens for an eviction."""
        return minimum(self.eviction.scored_queries, self.scored_tokens)

    @property
    def scored_tokens(self) -> Term:
        """Tokens of a layer that an eviction scores, with those appended to score them."""
        return self.prompt_chunks.candidates + self.eviction.appended_tokens

    @property
    def scored_pairs(self) -> Term:
        """Pairs of a scoring query and a token that it sees, of one query head, for each eviction."""
        return self.evicts * (self.scoring_queries * self.scored_tokens - self.scoring_queries**2 / 2)

    @property
    def final_tokens(self) -> Term:
        """Tokens of a sequence in the cache when generation ends."""
        return self.kept_tokens + self.new_tokens

    def target_candidates(self, cached: Term) -> Term:
        """Of `cached` tokens those that the target selects from: the prompt's, if it keeps generated ones."""
        return cached - self.target.keeps_generated * maximum(cached - self.kept_tokens, 0)

    def target_selected(self, cached: Term) -> Term:
        """Of `cached` tokens those that the target selects, or all that it may."""
        return minimum(self.target_candidates(cached), self.target.budget + self.target.unbudgeted_tokens)

    def target_loaded(self, cached: Term) -> Term:
        """Of `cached` tokens those that the target selects and a layer on the host does not hold on the device.

        Its recent tokens, which count inside the budget, stay there.
        """
        candidates = self.target_candidates(cached)
        recent = candidates - mean_quantized_tokens(candidates, self.kv_group)
        return maximum(self.target_selected(cached) - recent, 0)

    def target_tokens(self, cached: Term) -> Term:
        """Of `cached` tokens those that a query of the target reads: selected, and generated if it keeps these."""
        return self.target_selected(cached) + cached - self.target_candidates(cached)

    def streamed_share(self, cached: Term) -> Term:
        """Share of what a query of the target reads that is one run: generated tokens in full precision on the device.

        As codes, or in slots for layers on the host, they are listed as selected tokens are.
        """
        generated = cached - self.target_candidates(cached)
        return self.stores_full_kv * (1 - self.target_loads) * generated / self.target_tokens(cached)

    @property
    def target_reads_all(self) -> Term:
        """1 where the target attends to every token, 0 where it has a budget."""
        return indicator(UNLIMITED_TOKENS, self.target.budget)

    @property
    def target_loads(self) -> Term:
        """1 where the target's selected tokens are loaded from the host, else 0."""
        return self.offload.active * self.target.selects

    @property
    def loads_codes(self) -> Term:
        """1 where these are codes, stored on the host token by token, else 0."""
        return self.target_loads * (1 - self.stores_full_kv)

    @property
    def kv_reads(self) -> Term:
        """How often a pass of the target reads KV: once for all queries, or once per query that selects."""
        return 1 + self.target.selects * self.gamma

    @property
    def proposing(self) -> Term:
        """1 with a drafter, else 0."""
        return minimum(self.proposals, 1)

    @property
    def cascades(self) -> Term:
        """1 where the self-draft verifies proposals before the target does, else 0."""
        return minimum(self.cascade_passes, 1)

    @property
    def draft_passes(self) -> Term:
        """Passes of the self-draft in a round: one a draft without a drafter."""
        return self.cascade_passes + (1 - self.proposing) * self.gamma

    @property
    def draft_queries(self) -> Term:
        """Tokens per sequence in a pass of the self-draft."""
        return 1 + self.cascades * self.proposals

    @property
    def queries(self) -> Term:
        """Tokens per sequence in the target's pass: gamma drafts and the token before them."""
        return self.gamma + 1

    @property
    def max_queries(self) -> Term:
        """Tokens per sequence in the target's largest pass, for which memory is reserved."""
        return maximum(self.gamma, self.reserved_gamma) + 1


PARTS = {"target": TargetStrategy, "draft": DraftStrategy, "offload": OffloadStrategy, "eviction": EvictionStrategy}

# Every term by its name in `Strategy.with_terms`: the part that holds it ("" for the strategy itself), and its field.
TERM_NAMES = {item.name: ("", item.name) for item in fields(Strategy) if item.name not in PARTS} | {
    f"{part}_{item.name}": (part, item.name) for part, kind in PARTS.items() for item in fields(kind)
}
