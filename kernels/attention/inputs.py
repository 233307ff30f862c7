"""What dense and sparse decode attention read, checked once for every kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import require_lower, require_rows
from ridgeplan.kernels.kv_cache.layout import NO_PLANES, PageTable, Planes, QuantizedKV
from ridgeplan.kernels.kv_cache.token_rows import TokenRows


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The tensors of one call, as `decode_attention` describes them. Raises ValueError where they disagree.

    q: [B, T, Hq, D]. keys, values: [B, Hkv, C, D]. begin, end: int32 [B]. codes, groups: both or neither; groups is
    int32 [B]. lower: whether codes are read as INT8, not as INT4. softmax_scale: None stands for D ** -0.5. pages:
    where the sequences of a paged cache lie; then keys and values have any number of rows, and codes a row per page.
    sinks: [Hq]. soft_cap: 0 for none. window: slots that each query sees, counted back from its own.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    begin: Tensor
    end: Tensor
    codes: QuantizedKV | TokenRows | None = None
    groups: Tensor | None = None
    lower: bool = False
    softmax_scale: float | None = None
    pages: PageTable | None = None
    sinks: Tensor | None = None
    soft_cap: float = 0.0
    window: int | None = None

    def __post_init__(self) -> None:
        q, keys, codes = self.q, self.keys, self.codes
        batch, _, q_heads, head_dim = q.shape
        if self.values.shape != keys.shape:
            raise ValueError(f"keys {list(keys.shape)} and values {list(self.values.shape)} must have one shape")
        paged = self.pages is not None
        if keys.shape[3] != head_dim or not (paged or keys.shape[0] == batch):
            raise ValueError(f"q {list(q.shape)} and keys {list(keys.shape)} disagree in batch or head_dim")
        if q_heads % self.kv_heads:
            raise ValueError(f"{q_heads} query heads are not a multiple of {self.kv_heads} KV heads")
        if (codes is None) != (self.groups is None):
            raise ValueError("codes and groups: give both or neither")
        rows = batch if codes is None or paged else codes.batch
        if codes is not None and (rows, codes.kv_heads, codes.head_dim) != (batch, self.kv_heads, head_dim):
            raise ValueError(
                f"codes of batch {codes.batch}, {codes.kv_heads} KV heads and head_dim {codes.head_dim} "
                f"do not fit q {list(q.shape)} and keys {list(keys.shape)}"
            )
        if self.pages is not None:
            if not isinstance(codes, QuantizedKV) or codes.groups != 1:
                raise ValueError("pages: allowed with codes that have one group per row")
            require_rows(batch, torch.int32, q.device, **{"the table's buffers": self.pages.buffers})
        if self.sinks is not None and self.sinks.shape != (q_heads,):
            raise ValueError(f"sinks are {list(self.sinks.shape)}; allowed: [{q_heads}], one of each query head")
        require_rows(batch, torch.int32, q.device, begin=self.begin, end=self.end, groups=self.groups)
        if codes is not None:
            require_lower(codes, self.lower)

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.keys.shape[1]

    @property
    def ratio(self) -> int:
        """Query heads of each KV head."""
        return self.q.shape[2] // self.kv_heads

    @property
    def text_codes(self) -> QuantizedKV | None:
        """The codes, of a call that reads all of them in the order of the text."""
        assert not isinstance(self.codes, TokenRows), "rows in slots are only read where tokens are chosen"
        return self.codes

    @property
    def group_capacity(self) -> int:
        """Quantized groups of a row, or of a sequence in pages; 0 without codes."""
        if self.pages is not None:
            return self.pages.pages.shape[1]
        return 0 if self.codes is None else self.codes.groups

    @property
    def bits(self) -> int:
        """Bits per code that is read; 0 without codes."""
        return 0 if self.codes is None else 8 if self.lower else 4

    @property
    def key_planes(self) -> Planes:
        """The codes of keys; `NO_PLANES` without codes."""
        return NO_PLANES if self.codes is None else self.codes.key_planes

    @property
    def value_planes(self) -> Planes:
        """The codes of values; `NO_PLANES` without codes."""
        return NO_PLANES if self.codes is None else self.codes.value_planes

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.q.shape[3] ** -0.5 if self.softmax_scale is None else self.softmax_scale
