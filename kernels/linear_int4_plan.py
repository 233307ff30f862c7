"""How the CUDA kernel of products with 4-bit weights is cut over a machine: blocks, clusters, shared memory.

Figures behind CUTS and the depth of the ring are in the log of linear_int4_cuda.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.kernels.int4_weight import PAIR_BYTES, ROWS

WARPS = 8
SPLITS = (1, 2, 4)
MAX_ROWS = 64  # of x: beyond, reading the codes once for every 16 rows costs more than a dense copy
LEAST_ITEMS = 2  # of a block's ring: one on its way while the other is in work
MOST_ITEMS = 3
RESERVED_BYTES = 1024 + 128  # of a block's shared memory: the driver's and the kernel's static variables


@dataclass(frozen=True)
class Cut:
    """How a product is spread over multiprocessors."""

    rows: int  # the most rows of x that a block takes
    splits: int  # blocks of a cluster, which cut the inputs between them
    blocks: int  # of a multiprocessor
    item_inputs: int  # of 16 outputs, whose codes one bulk copy brings


# In order of preference: the first that leaves room for x is taken.
CUTS = (
    Cut(rows=2, splits=1, blocks=2, item_inputs=2048),
    Cut(rows=16, splits=1, blocks=1, item_inputs=4096),
    Cut(rows=16, splits=2, blocks=1, item_inputs=4096),
    Cut(rows=16, splits=4, blocks=1, item_inputs=4096),
)


@dataclass(frozen=True)
class Machine:
    """What a device holds: shared memory of a multiprocessor, and clusters (one block a multiprocessor) at once."""

    shared_bytes: int
    clusters: tuple[int, ...]  # of as many blocks as the entry of SPLITS says


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is specialized for."""

    group: int
    bf16: bool
    tiles: int  # 8-row tiles of x per block
    cut: Cut

    @property
    def item_bytes(self) -> int:
        """One bulk copy."""
        return self.cut.item_inputs // self.group * (8 * self.group + PAIR_BYTES)

    @property
    def options(self) -> tuple[str, ...]:
        macros = {
            "GROUP": self.group,
            "BF16": int(self.bf16),
            "TILES": self.tiles,
            "SPLITS": self.cut.splits,
            "WARPS": WARPS,
            "BLOCKS": self.cut.blocks,
            "ITEM_INPUTS": self.cut.item_inputs,
            "MOST_ITEMS": MOST_ITEMS,
        }
        return tuple(f"-D{name}={value}" for name, value in macros.items())


@dataclass(frozen=True)
class Plan:
    """A product's launch: `chunks` passes over the codes, of at most `chunk_rows` rows of x, side by side."""

    variant: Variant
    rows: int
    outputs: int
    inputs: int
    chunk_rows: int
    machine: Machine

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)

    @property
    def clusters(self) -> int:
        """That share the row tiles of the weight in a pass: what is resident at once, or fewer where tiles are few."""
        cut = self.variant.cut
        resident = cut.blocks * self.machine.clusters[SPLITS.index(cut.splits)] // self.chunks
        return min(max(1, resident), -(-self.outputs // ROWS))

    @property
    def other_bytes(self) -> int:
        """Shared memory beside the ring: sums of warps, of groups and of the cluster, and rows of x."""
        cut, tile_bytes = self.variant.cut, 4 * ROWS * 8 * self.variant.tiles
        units = -(-self.inputs // self.variant.group // cut.splits)
        own_tiles = -(-self.outputs // ROWS // self.clusters)
        met_bytes = -(-own_tiles // cut.splits) * cut.splits * tile_bytes if cut.splits > 1 else 0
        x_bytes = self.chunk_rows * (2 * units * self.variant.group + 64)
        return WARPS * tile_bytes + units * tile_bytes // ROWS + met_bytes + x_bytes

    @property
    def items(self) -> int:
        """Bulk copies that the ring has room for."""
        room_bytes = self.machine.shared_bytes // self.variant.cut.blocks - RESERVED_BYTES
        return min(MOST_ITEMS, (room_bytes - self.other_bytes) // self.variant.item_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.other_bytes + self.items * self.variant.item_bytes


def make_plan(rows: int, outputs: int, inputs: int, group: int, bf16: bool, machine: Machine) -> Plan | None:
    """The fewest passes over the codes whose share of x fits shared memory; None if none does."""
    for most_rows in (16, 8, 4, 2, 1):
        chunk_rows = min(rows, most_rows)
        for cut in CUTS:
            variant = Variant(group, bf16, 1 if chunk_rows <= 8 else 2, cut)
            plan = Plan(variant, rows, outputs, inputs, chunk_rows, machine)
            if chunk_rows <= cut.rows and plan.items >= LEAST_ITEMS:
                return plan
    return None
