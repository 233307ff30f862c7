"""SpeContext's memory model as published: Eq 6 to 8, the thresholds of Algorithm 1, the policy of Algorithm 2.

It reproduces the paper, as printed and as we read it (docs/papers.md). Plans are priced by
`ridgeplan.roofline.memory`, which includes formats and workspaces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeplan.roofline.cost import Term


@dataclass(frozen=True)
class SpeContextMemory:
    """SpeContext's memory model, Table 1's symbols: Eq 6 and 7, and Algorithm 1's thresholds.

    `retrieval_layers` is the '+1' of Eq 6, the retrieval head's cache in units of a layer: the paper counts 1, but
    the pruned head keeps only keys, so 0.5 is exact (SpeContext-4). `repeat_buffers` is alpha: one layer of repeat_kv
    per group of heads in the paper, 0 with kernels that group heads (SpeContext-4). `paper_form` drops the factor 4 of
    Algorithm 1's offload term, as line 3 of the paper does (SpeContext-1).
    """

    model_bytes: Term
    retrieval_model_bytes: Term
    layers: int
    kv_heads: Term
    head_dim: Term
    requests: Term
    budget_tokens: Term
    retrieval_layers: Term = 0.5
    repeat_buffers: Term = 0
    runtime_factor: Term = 1.3  # runtime buffers are 30% of the models, section 6.2
    kv_bytes: Term = 4  # a key and a value element in 16 bits
    paper_form: bool = False

    @property
    def fixed_bytes(self) -> Term:
        """1.3 (M_O + M_D)."""
        return self.runtime_factor * (self.model_bytes + self.retrieval_model_bytes)

    @property
    def extra_layers(self) -> Term:
        """The layers that Eq 6 adds to the model's: 1 + alpha."""
        return self.retrieval_layers + self.repeat_buffers

    @property
    def row_bytes(self) -> Term:
        """Bytes of one token in one layer for all requests: 4 R H D."""
        return self.kv_bytes * self.requests * self.kv_heads * self.head_dim

    def all_bytes(self, tokens: Term) -> Term:
        """Eq 6: everything on the GPU at sequence length `tokens`."""
        return self.part_bytes(tokens, 0)

    def part_bytes(self, tokens: Term, cpu_layers: Term) -> Term:
        """Eq 7: `cpu_layers` layers keep only the budget on the GPU."""
        gpu_layers = self.layers - cpu_layers
        return self.fixed_bytes + self.row_bytes * (
            (gpu_layers + self.extra_layers) * tokens + cpu_layers * self.budget_tokens
        )

    def thresholds(self, gpu_memory_bytes: float, reserved_tokens: int = 0) -> tuple[int, ...]:
        """Algorithm 1: S_0..S_L; from length S_i on, more than i layers must be on the CPU.

        Lengths never fall along the list and are never negative (SpeContext-3): offloading a layer frees memory only
        where sequences are longer than the budget. `reserved_tokens` keeps gamma + 1 slots free (SpeContext-2).
        """
        lengths: list[int] = []
        for cpu_layers in range(self.layers + 1):
            length = self._threshold(gpu_memory_bytes, cpu_layers) - reserved_tokens
            lengths.append(max(length, lengths[-1] if lengths else 0))
        return tuple(lengths)

    def _threshold(self, gpu_memory_bytes: float, cpu_layers: int) -> int:
        factor = self.row_bytes / self.kv_bytes if self.paper_form else self.row_bytes
        offloaded = cpu_layers * self.budget_tokens * factor
        gpu_layers = self.layers + self.extra_layers - cpu_layers
        if gpu_layers == 0:
            return 0
        return math.floor((gpu_memory_bytes - self.fixed_bytes - offloaded) / (gpu_layers * self.row_bytes))


def layers_to_offload(thresholds: tuple[int, ...], tokens: int) -> int:
    """Algorithm 2, lines 4 to 7: layers on the CPU at length `tokens`, at most all.

    The off-by-one of the paper's text is not followed (SpeContext-2).
    """
    return min(sum(tokens >= threshold for threshold in thresholds), len(thresholds) - 1)
