"""A plan in numbers: the terms that the cost model takes."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.latency import RateTerms

UNLIMITED_TOKENS = float(1 << 40)  # a budget that never binds


@dataclass(frozen=True)
class Strategy:
    """A plan's axes. Every field is a number, an array with one entry per plan, or a sympy symbol.

    Flags are 0 or 1, bits of codes are 0 for full precision, budgets are UNLIMITED_TOKENS where there is none.
    """

    batch: Term
    context: Term
    new_tokens: Term
    # weights: bytes per parameter of a linear layer
    target_weight_bytes: Term
    draft_weight_bytes: Term
    has_draft_weights: Term
    target_dense: Term  # weights of 16 bits; so those of drafts, head included
    draft_dense: Term
    draft_head_bytes: Term  # the target's head is full precision
    target_linear: RateTerms
    draft_linear: RateTerms
    draft_head: RateTerms
    # KV cache
    keeps_full: Term  # the whole context is stored in full precision
    code_planes: Term  # 4-bit planes stored: 0, 1 or 2
    kv_group: Term
    target_bits: Term
    draft_bits: Term
    target_attention: RateTerms
    draft_attention: RateTerms
    eviction_budget: Term
    # placement
    offload: Term
    offload_budget: Term
    # what is read at a step, and what choosing it costs
    target_budget: Term
    draft_ratio: Term
    target_step_keys: Term  # keys scored at a step, in multiples of one layer's, summed over layers
    draft_step_keys: Term
    round_score_bytes: Term  # score bytes of a round per cached token, summed over layers
    # speculation
    gamma: Term
    acceptance: Term
    splits: Term

    @property
    def queries(self) -> Term:
        """Tokens of a sequence in the target's pass: gamma drafts and the token before them."""
        return self.gamma + 1
