"""Memory layout of one layer's hierarchical KV cache: two planes of 4-bit codes with 16-bit scales.

B batch rows, Hkv KV heads, G tokens per group, D head_dim:

    key_upper, key_lower      uint8   [B, Hkv, groups, G, D/2]   channel j low nibble, channel j + D/2 high
    key_scale, key_min        float16 [B, Hkv, groups, D]        one pair per channel and group
    value_upper, value_lower  uint8   [B, Hkv, groups, D, G/2]   token j low nibble, token j + G/2 high
    value_scale, value_min    float16 [B, Hkv, groups, G]        one pair per token

A byte pairs the two halves of the packed axis, so unpacking never interleaves. Values are stored transposed, so that
both dot products of attention read codes contiguously along the contraction. The planes are separate, so a draft that
reads upper codes never touches the lower ones.

Latent rows (MLA) are keys alone: values are the same latents. Their heads are parts of a latent.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Planes = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # upper and lower codes, scale, minimum
NO_PLANES: Planes = (None, None, None, None)


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """Codes, scales and minima of one layer (shapes above). The lower planes are None if only drafts read the codes.

    Of keys alone, the values' tensors are empty.
    Source: QuantSpec sec. 4.2 (upper codes asymmetric, lower codes the residual in steps of scale / 16).
    Raises ValueError for tensors that are not contiguous, as the kernels compute flat offsets.
    """

    key_upper: Tensor
    key_lower: Tensor | None
    key_scale: Tensor
    key_min: Tensor
    value_upper: Tensor
    value_lower: Tensor | None
    value_scale: Tensor
    value_min: Tensor

    def __post_init__(self) -> None:
        if (self.key_lower is None) != (self.value_lower is None):
            raise ValueError("key_lower and value_lower: give both planes or neither")
        for name, tensor in vars(self).items():
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(f"{name} of a QuantizedKV must be contiguous, not {tensor.stride()}")

    @classmethod
    def allocate(
        cls,
        batch: int,
        kv_heads: int,
        groups: int,
        group: int,
        head_dim: int,
        device: torch.device | str,
        lower: bool,
        values: bool = True,
    ) -> "QuantizedKV":
        """Zero-filled storage for `groups` groups of `group` tokens per row; `lower` adds the lower planes.

        values: whether there are values beside the keys.

        Raises ValueError for an odd `group` or `head_dim`: two codes share a byte.
        """
        if group % 2 or head_dim % 2:
            raise ValueError(f"group and head_dim must be even to share bytes, got {group} and {head_dim}")

        def codes(rows: int, columns: int) -> Tensor:
            return torch.zeros(batch, kv_heads, groups, rows, columns // 2, dtype=torch.uint8, device=device)

        def pairs(count: int) -> Tensor:
            return torch.zeros(batch, kv_heads, groups, count, dtype=torch.float16, device=device)

        value_dim, value_tokens = (head_dim, group) if values else (0, 0)
        return cls(
            key_upper=codes(group, head_dim),
            key_lower=codes(group, head_dim) if lower else None,
            key_scale=pairs(head_dim),
            key_min=pairs(head_dim),
            value_upper=codes(value_dim, group),
            value_lower=codes(value_dim, group) if lower else None,
            value_scale=pairs(value_tokens),
            value_min=pairs(value_tokens),
        )

    def rows(self, rows: slice) -> "QuantizedKV":
        """A view of the codes of some rows of the batch."""
        views: list[Any] = [None if x is None else x[rows] for x in vars(self).values()]
        return QuantizedKV(*views)

    def gathered(self, pages: Tensor) -> "QuantizedKV":
        """A copy of some pages, in this order, as the groups of one row; of codes with one group per row."""
        index, planes = pages.long(), vars(self).values()
        copies: list[Any] = [None if x is None else x[index, :, 0].transpose(0, 1)[None].contiguous() for x in planes]
        return QuantizedKV(*copies)

    @property
    def key_planes(self) -> Planes:
        """Upper and lower codes, scale and minimum of the keys."""
        return self.key_upper, self.key_lower, self.key_scale, self.key_min

    @property
    def value_planes(self) -> Planes:
        """Upper and lower codes, scale and minimum of the values."""
        return self.value_upper, self.value_lower, self.value_scale, self.value_min

    @property
    def batch(self) -> int:
        """Rows: sequences, times layers where those are stored together."""
        return self.key_upper.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.key_upper.shape[1]

    @property
    def groups(self) -> int:
        """Capacity of a row, in groups."""
        return self.key_upper.shape[2]

    @property
    def group(self) -> int:
        """Tokens per group."""
        return self.key_upper.shape[3]

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.key_scale.shape[3]

    @property
    def has_values(self) -> bool:
        """Whether there are values beside the keys."""
        return self.value_scale.shape[3] > 0

    @property
    def planes(self) -> int:
        """1: upper codes only; 2: upper and lower."""
        return 1 if self.key_lower is None else 2

    @property
    def bytes(self) -> int:
        """Storage of all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in vars(self).values() if tensor is not None)


class GroupWrite(NamedTuple):
    """Which groups of which rows `quantize` writes; the arguments are described there and at `quantize_to_pages`."""

    out: QuantizedKV
    group_index: Tensor
    mask: Tensor | None = None
    first_slot: Tensor | None = None
    paged: bool = False


@dataclass(frozen=True, eq=False)
class PageTable:
    """Where sequences lie in a paged cache, whose `QuantizedKV` has a row of one group per page.

    pages: int32 [B, n], the page of each group of a sequence; its rows may be strided. buffers: int32 [B], the row of
    the full-precision store that holds the sequence's recent tokens. Raises ValueError for other dtypes or shapes.
    """

    pages: Tensor
    buffers: Tensor

    def __post_init__(self) -> None:
        for name, tensor, dims in (("pages", self.pages, 2), ("buffers", self.buffers, 1)):
            if tensor.dtype != torch.int32 or tensor.dim() != dims or tensor.stride(-1) != 1:
                shape = list(tensor.shape)
                raise ValueError(f"{name} is {tensor.dtype} {shape}; allowed: packed int32 of {dims} dimensions")
        if len(self.pages) != len(self.buffers):
            raise ValueError(f"pages of {len(self.pages)} sequences and buffers of {len(self.buffers)} disagree")
