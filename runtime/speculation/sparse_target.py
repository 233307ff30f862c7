"""Sparse target attention: what the target reads where a policy selects tokens for each of its queries.

Every query of a pass chooses anew, as if its token were decoded alone: with one choice for a whole verification, what
the target reads would depend on where rounds fell, and speculation would change its output. So a pass over gamma + 1
tokens reads gamma + 1 selections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeplan.roofline.plan.plan import DraftCodes
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.policies import draft_policy
from ridgeplan.runtime.policies.base import DraftPolicy, SparsePolicy
from ridgeplan.runtime.retrieval.head import Head


@dataclass(frozen=True, eq=False)
class PerQuerySelection:
    """One query of a pass: its policy, at its own length, and what it reads beside the selection."""

    policy: SparsePolicy
    metadata: AttentionMetadata


class SparseTargetAttention:
    """Attention by a policy's selection, for one cache. steps: of the pass that runs, one for each query.

    The index lists of policies that choose ahead are there before the first layer: `steps[query].policy.select(layer,
    None)` is the same for every layer.
    """

    def __init__(self, policy: SparsePolicy) -> None:
        """policy: over a cache that is read as the target reads it."""
        self.policy = policy
        self.steps: tuple[PerQuerySelection, ...] = ()

    @classmethod
    def of(cls, selection: Any, cache: Cache, head: Head | None) -> SparseTargetAttention | None:
        """For a plan's `attention.chosen`; None where that cannot leave out any token."""
        if not 0 < selection.min_tokens < cache.config.longest:
            return None
        policy = draft_policy(selection, cache.reading(DraftCodes.FULL), head)
        assert isinstance(policy, SparsePolicy), "all others read every token"
        return cls(policy)

    def start(self, rows: int) -> None:
        """Forgets the last generation; the cache has been emptied."""
        self.policy.cache.reset(rows)
        self.policy.start()

    def metadata(self, tokens: Tensor) -> AttentionMetadata:
        """For a pass over tokens [rows, queries] that follow the cached ones."""
        self.policy.before_pass(tokens, 0)
        self.steps = tuple(self._step(query) for query in range(tokens.shape[1]))
        return self.policy.cache.target_metadata(tokens.shape[1]).changed(attend=self._attend)

    def _step(self, query: int) -> PerQuerySelection:
        policy = self.policy.at(query)
        policy.before_round()
        return PerQuerySelection(policy, policy.draft_metadata(0))

    def _attend(self, layer: int, query: Tensor, _: AttentionMetadata) -> Tensor:
        parts = query.split(1, dim=1)
        steps = zip(self.steps, parts, strict=True)
        attended = [step.policy.attend(layer, one, step.metadata.at(layer)) for step, one in steps]
        return torch.cat(attended, dim=1)


def observers(policy: DraftPolicy, reads: SparseTargetAttention | None) -> list[DraftPolicy]:
    """The policies that learn from prompts."""
    return [policy] if reads is None else [policy, reads.policy]
