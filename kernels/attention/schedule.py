"""How the CUDA kernel of decode attention is cut over a device: variants, resident blocks, shared memory.

Figures behind the numbers are in the log of attention_cuda.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

GROUP = 128
BLOCKS = {8: 3, 16: 3, 24: 3, 32: 2, 64: 2}  # resident per multiprocessor, by rows
LEAST_UNITS = 4  # of a block: where there are less, fewer blocks are resident
LEAST_BLOCKS = 3  # resident per multiprocessor
FILLED = 0.9  # of the resident blocks, at least
MAX_BLOCKS = 65535  # so that the kernel cuts its work in 32-bit arithmetic
RESERVED_BYTES = 1024  # of a block's shared memory, for the driver
MAX_ITEMS = 12  # of a ring: more hide no more latency
FOLDED = 16384  # elements of partials of a KV head that its last block merges; more are left to a kernel of their own
FOLDED_HEADS = 4096  # counters of arrived blocks: (batch row, KV head) pairs whose merge may be folded in


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is specialized for. bits: 0 without codes; rows: of queries, a key of BLOCKS."""

    head_dim: int
    bits: int
    bf16: bool
    rows: int

    @property
    def blocks(self) -> int:
        """Resident blocks per multiprocessor.

        Four hide the latencies of INT4, whose units are short; full precision, all copies, takes few and deep rings.
        """
        if self.bits == 0:
            return 2 if self.head_dim == 128 or self.rows == 64 else 3
        return 4 if self.rows == 8 and (self.bits == 4 or self.head_dim == 128) else BLOCKS[self.rows]

    @property
    def slots(self) -> int:
        """Full-precision tokens of a unit: about the bytes of a group."""
        return 32 if self.bits == 4 else 64

    @property
    def item_bytes(self) -> int:
        """One item of the ring: a group's keys or values with metadata, or as much of full-precision tokens."""
        return self.slots * 2 * self.head_dim + 512

    def items(self, block_bytes: int) -> int:
        """Depth of the ring in a block that may use `block_bytes` of shared memory."""
        return min(MAX_ITEMS, (block_bytes - self.shared_bytes(0) - self.static_bytes(MAX_ITEMS)) // self.item_bytes)

    def shared_bytes(self, items: int) -> int:
        """Dynamic shared memory of a block: the ring, staged queries and weights."""
        return items * self.item_bytes + self.rows * (2 * self.head_dim + 2 * GROUP)

    def static_bytes(self, items: int) -> int:
        """At most the static shared memory: barriers, what rows are copied from, what warps tell each other."""
        return 8 * items + 256 + 64 * self.rows

    def options(self, items: int, entry: str) -> list[str]:
        """Compiler options that specialize one of the kernels, "attend" or "merge"."""
        macros = {
            "HEAD_DIM": self.head_dim,
            "BITS": self.bits,
            "BF16": int(self.bf16),
            "TILES": self.rows // 8,
            "BLOCKS": self.blocks,
            "ITEMS": items,
            "SLOTS": self.slots,
        }
        return [f"-D{name}={value}" for name, value in macros.items()] + [f"-DENTRY_{entry.upper()}"]


@dataclass(frozen=True)
class Occupancy:
    """How blocks of a variant fill a device."""

    variant: Variant
    num_sms: int
    processor_bytes: int  # of shared memory

    @cached_property
    def items(self) -> int:
        """Depth of a block's ring, with which the variant's blocks are resident."""
        return self.variant.items(self.processor_bytes // self.variant.blocks - RESERVED_BYTES)

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory that a block needs."""
        return self.variant.shared_bytes(self.items)

    @cached_property
    def most_shared_bytes(self) -> int:
        """At least what a block is ever launched with, padding included."""
        return max(self.shared_bytes, self.processor_bytes // LEAST_BLOCKS - RESERVED_BYTES)

    def residency(self, units: int) -> tuple[int, int]:
        """Blocks that the device is to hold at once, and dynamic shared memory of each: padded where more would fit.

        units: of the call, at most. What a block does before its first unit and after its last takes as long as
        several, so that short rows want fewer blocks.
        """
        most = self.variant.blocks
        blocks = min(most, max(LEAST_BLOCKS, units // (self.num_sms * LEAST_UNITS)))
        room_bytes = self.processor_bytes // blocks - RESERVED_BYTES - self.variant.static_bytes(MAX_ITEMS)
        return blocks * self.num_sms, self.shared_bytes if blocks == most else room_bytes // 16 * 16

    def grid(self, kv_rows: int, row_units: int) -> tuple[int, int]:
        """Blocks for `kv_rows` (batch row, KV head) pairs of at most `row_units` units each, and their dynamic shared
        memory.

        As many as are resident, or a few less where rows of one length then divide evenly. Not many less: blocks that
        start early, as those before them end, would crowd on some processors.
        """
        resident, shared_bytes = self.residency(kv_rows * row_units)
        even = resident // kv_rows * kv_rows
        return min(MAX_BLOCKS, even if even >= FILLED * resident else resident), shared_bytes


def folds(blocks: int, kv_rows: int, elements: int) -> bool:
    """Whether a row's last block merges its partials, of `elements` each; else a kernel of their own does."""
    return kv_rows <= FOLDED_HEADS and -(-blocks // kv_rows) * elements <= FOLDED
