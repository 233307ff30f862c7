"""Configuration of a KV cache: sizes, format, and which codes drafts read."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.planner.plan import DraftCodes, KVFormat, Plan
from ridgeplan.roofline.execution import quantized_groups


@dataclass(frozen=True)
class KVCacheConfig:
    """A cache for `batch` rows of up to `context` tokens each, including generated ones.

    group: tokens that are quantized together. gamma: drafts per round, which need slots too. draft_planes: whether
    codes are also kept by token, for drafts that choose by them or gather them.
    """

    batch: int
    context: int
    format: KVFormat = KVFormat.FULL
    group: int = 128
    gamma: int = 0
    draft_codes: DraftCodes = DraftCodes.FULL
    draft_planes: bool = False

    @classmethod
    def of(cls, plan: Plan) -> KVCacheConfig:
        """The cache that executes a plan."""
        workload, speculation = plan.workload, plan.speculation
        return cls(
            batch=workload.batch,
            context=workload.final_context,
            format=plan.kv.format,
            group=plan.kv.group,
            gamma=speculation.gamma,
            draft_codes=speculation.codes,
            draft_planes=plan.gathers_codes,
        )

    @property
    def buffered(self) -> bool:
        """`format.buffered`: full-precision slots are a buffer for recent tokens."""
        return self.format.buffered

    @property
    def drafts_read_upper(self) -> bool:
        """Whether drafts read the upper codes alone."""
        return self.draft_codes is DraftCodes.UPPER

    @property
    def drafts_read_codes(self) -> bool:
        """Whether drafts read old tokens as codes, upper ones alone or both."""
        return self.buffered or self.drafts_read_upper

    @property
    def slots(self) -> int:
        """Full-precision slots per row: two groups for a buffer, else the context, plus one round's tokens."""
        kept = 2 * self.group if self.buffered else self.context
        return kept + self.gamma + 1

    @property
    def groups(self) -> int:
        """Groups of codes allocated per row."""
        return max(1, self.quantized_groups(self.context + self.gamma + 1))

    def quantized_groups(self, tokens: int) -> int:
        """Groups held as codes for a row of `tokens` tokens; `Cache.quantized` is the device version, in tokens."""
        return quantized_groups(tokens, self.group) if self.format.quantized else 0
