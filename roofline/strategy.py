"""A plan in numbers: lengths, formats, budgets and acceptance. Speeds are in latency.py."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.roofline.cost import Term, maximum, minimum

UNLIMITED_TOKENS = float(1 << 40)  # a budget that never binds

UNLIMITED_BYTES = float(1 << 60)

# Share of an offloaded layer's budget that the previous step already loaded, as published (SpeContext, section 5.4 and
# Fig 6b). What was measured of each policy is less (planner/policies/selection).
ELASTIC_OVERLAP = 0.9


@dataclass(frozen=True)
class Strategy:
    """A plan's axes. Every field is a number, an array with one entry per plan, or a sympy symbol.

    Flags are 0 or 1. Bits of codes are 0 where full precision is read. Budgets are in tokens; UNLIMITED_TOKENS means
    none.
    """

    batch: Term
    context: Term
    new_tokens: Term
    # Weights: bytes per parameter, scales and zeros included
    target_weight_bytes: Term
    draft_weight_bytes: Term
    target_head_bytes: Term  # of 8-bit weights it is quantized, too; otherwise it is full precision
    draft_head_bytes: Term
    has_draft_weights: Term  # drafts have a copy of the weights of their own
    target_dense: Term  # 16-bit weights, not quantized ones
    target_head_dense: Term
    draft_dense: Term
    # KV cache
    stores_full_kv: Term  # the whole context is stored in full precision
    code_planes: Term  # 4-bit planes stored: 0, 1 (upper) or 2 (upper and lower)
    kv_group: Term  # tokens
    target_bits: Term  # bits of the codes that a pass reads
    draft_bits: Term
    eviction_budget: Term  # of a prompt's tokens, the mean over the layers
    scored_queries: Term  # queries whose attention scores a prompt's tokens
    appended_tokens: Term  # run after a prompt to score it, and dropped
    # Offload
    offload: Term
    offload_budget: Term
    offload_lower: Term  # lower codes alone leave the device
    offload_prefetch: Term  # layers copied ahead
    draft_loads: Term  # drafts have what they choose loaded to the device
    # Sparse attention: tokens read at a step, and the traffic of choosing them
    target_budget: Term
    draft_ratio: Term  # share of the cached tokens
    draft_floor_tokens: Term  # which drafts read at least
    target_ahead: Term  # its choice is known before its first layer
    target_page_tokens: Term  # selected tokens of a KV head that lie together on the device; 1 where none are selected
    draft_page_tokens: Term
    target_run_tokens: Term  # the same on the host, where those of several heads may lie together, too
    draft_run_tokens: Term
    target_scored_keys: Term  # keys of one layer scored per cached token and step, summed over layers
    draft_scored_keys: Term
    step_score_bytes: Term  # of scores, per cached token and draft step, summed over layers
    round_score_bytes: Term  # per cached token, once a round, summed over layers
    held_keys: Term  # kept to choose by, in multiples of one layer's keys, summed over layers
    held_plane_bits: Term  # of codes kept by token, per element of the keys, summed over layers
    held_score_bytes: Term  # kept scores, per cached token
    # Speculation
    gamma: Term
    acceptance: Term  # conditional acceptance
    offload_all: Term = 0  # all layers leave as soon as one must, as strategies that are decided ahead do
    memory_limit_bytes: Term = UNLIMITED_BYTES  # of the device, for layers to leave
    overlap: Term = ELASTIC_OVERLAP  # share of what a step chooses that the previous one had chosen too
    reserved_gamma: Term = 0  # drafts that memory is kept for, where rounds of an adaptive gamma may have more
    # Choices of what is read
    target_selects: Term = 0  # each of the target's queries reads tokens of its own choice
    target_score_bytes: Term = 0  # of scores, per cached token and query of the target, summed over layers
    target_alike: Term = 0  # all layers read what one choice has
    draft_projected_params: Term = 0  # of projections that drafts choose by, beside the model's
    target_projected_params: Term = 0
    draft_choices: Term = 0  # top-k launches of a step; a choice once a round has one for all layers
    target_choices: Term = 0
    draft_ranked: Term = 0  # scores that top-k ranks, per cached token and choice, summed over layers
    target_ranked: Term = 0
    target_two_bit: Term = 0  # the target chooses by 2-bit keys, in kernels of their own
    draft_two_bit: Term = 0  # drafts choose by 2-bit keys, within their attention
    eviction_chunk: Term = UNLIMITED_TOKENS  # most tokens of a prompt between two evictions of every layer
    slot_table_bytes: Term = 0  # of what says which tokens are in slots, per token on the host, layer and sequence

    @property
    def kept_tokens(self) -> Term:
        """Tokens of a prompt that stay in the cache."""
        return minimum(self.context, self.eviction_budget)

    @property
    def held_tokens(self) -> Term:
        """Tokens of a sequence in the cache when generation ends."""
        return self.kept_tokens + self.new_tokens

    @property
    def target_loads(self) -> Term:
        """1 where the target has tokens of its choice loaded from the host, else 0."""
        return self.offload * self.target_selects

    @property
    def reads(self) -> Term:
        """How often a pass of the target reads KV: once for all of its queries, or by each that chooses its own."""
        return 1 + self.target_selects * self.gamma

    @property
    def queries(self) -> Term:
        """Tokens per sequence in the target's pass: gamma drafts and the token before them."""
        return self.gamma + 1

    @property
    def most_queries(self) -> Term:
        """Tokens per sequence in the target's largest pass, for which memory is kept."""
        return maximum(self.gamma, self.reserved_gamma) + 1
