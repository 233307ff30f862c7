"""A plan in numbers: lengths, formats, budgets and acceptance. Speeds are in latency.py."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.roofline.cost import Term

UNLIMITED_TOKENS = float(1 << 40)  # a budget that never binds


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
    eviction_budget: Term
    # Offload
    offload: Term
    offload_budget: Term
    # Sparse attention: tokens read at a step, and the traffic of choosing them
    target_budget: Term
    draft_ratio: Term  # share of the cached tokens
    target_run_tokens: Term  # selected tokens that lie together, of one KV head
    draft_run_tokens: Term
    target_scored_keys: Term  # keys of one layer scored per cached token and step, summed over layers
    draft_scored_keys: Term
    round_score_bytes: Term  # per cached token, once a round, summed over layers
    # Speculation
    gamma: Term
    acceptance: Term  # conditional acceptance

    @property
    def queries(self) -> Term:
        """Tokens per sequence in the target's pass: gamma drafts and the token before them."""
        return self.gamma + 1
