"""What a KV cache holds: sizes, format, and which codes drafts read."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.planner.plan import DraftCodes, KVFormat, Plan
from ridgeplan.roofline.execution import quantized_groups


@dataclass(frozen=True)
class KVCacheConfig:
    """A cache for `batch` rows of up to `context` tokens each, generated ones included.

    group: tokens that are quantized together. gamma: tokens that a round drafts, which need slots too.
    """

    batch: int
    context: int
    format: KVFormat = KVFormat.FULL
    group: int = 128
    gamma: int = 0
    draft_codes: DraftCodes = DraftCodes.FULL

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
        )

    @property
    def quantized(self) -> bool:
        """Whether any codes are stored."""
        return self.format is not KVFormat.FULL

    @property
    def buffered(self) -> bool:
        """Whether old tokens exist as codes only, upper and lower, and full-precision slots are a buffer for recent
        ones.
        """
        return self.format in (KVFormat.INT8, KVFormat.HIERARCHICAL)

    @property
    def drafts_read_upper(self) -> bool:
        """Whether drafts read the upper codes alone."""
        return self.draft_codes is DraftCodes.UPPER

    @property
    def slots(self) -> int:
        """Full-precision slots of a row: two groups in a buffer, else the context, and one round's tokens."""
        kept = 2 * self.group if self.buffered else self.context
        return kept + self.gamma + 1

    @property
    def groups(self) -> int:
        """Groups of codes that a row is allocated."""
        return max(1, self.quantized_groups(self.context + self.gamma + 1))

    def quantized_groups(self, tokens: int) -> int:
        """Groups of a row of `tokens` tokens that are held as codes; `Cache.quantized` is the same on the device."""
        return quantized_groups(tokens, self.group) if self.quantized else 0
