"""What it costs to choose which tokens are read: the scores a policy computes, and when.

Costs are per cached token and layer, as multiples of one token's keys in one layer (kv_heads x head_dim elements),
and in bytes of score rows. They follow each paper's description; those policies that the runtime cannot execute
yet are estimated with them and never recommended.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SelectionCost:
    """Work of one selection policy. `one_layer`: scores are computed once, not in every layer."""

    step_keys: float = 0.0  # share of the keys read at every draft (or target) step
    round_score_bytes: float = 0.0  # score bytes written and read once a round, per token and layer
    one_layer: bool = False


NO_SELECTION = SelectionCost()

SELECTION_COSTS: dict[str, SelectionCost] = {
    "all": NO_SELECTION,
    "full": NO_SELECTION,
    "streamingllm": NO_SELECTION,  # sinks and recent tokens: nothing is scored
    "snapkv": NO_SELECTION,  # scored once, in prefill, with the last window's queries
    "quest": SelectionCost(step_keys=2 / 16),  # minimum and maximum key of every page of 16 (Tang et al. 2024)
    "clusterkv": SelectionCost(step_keys=1 / 80),  # one centroid per 80 tokens (Liu et al. 2024)
    "shadowkv": SelectionCost(step_keys=1 / 8),  # one landmark per chunk of 8 (Sun et al. 2024)
    "retrieval-head": SelectionCost(step_keys=1.0, one_layer=True),  # the head's own key cache (SpeContext, 4.3)
    "specextend": SelectionCost(round_score_bytes=3 * 4),  # one fp32 row: written, read twice by top-k
    "specattn": SelectionCost(round_score_bytes=2 * 3 * 4),  # the same for two collected queries (SpecAttn, Eq 3)
}
