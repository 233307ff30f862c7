"""The tensors of one call of decode attention, for tests of its kernels."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache.layout import PageTable, QuantizedKV


@dataclass(frozen=True)
class Problem:
    """The arguments of `decode_attention`."""

    q: Tensor
    keys: Tensor
    values: Tensor
    begin: Tensor
    end: Tensor
    codes: QuantizedKV | None
    groups: Tensor | None
    lower: bool
    pages: PageTable | None = None

    @property
    def inputs(self) -> AttentionInputs:
        return AttentionInputs(**vars(self))

    def run(
        self,
        splits: int | None = None,
        backend: Backend = "auto",
        *,
        scores: ScoreRequest | None = None,
        **softmax: Any,
    ) -> Tensor:
        return decode_attention(
            self.q, self.keys, self.values, self.begin, self.end, self.codes, self.groups,
            lower=self.lower, splits=splits, scores=scores, pages=self.pages, backend=backend, **softmax,
        )  # fmt: skip
