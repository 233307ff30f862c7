"""How a CUDA linear kernel is cut over a machine: blocks, clusters, shared memory.

Figures behind the numbers are in the logs of linear_int4_cuda.py and linear_dense_cuda.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ridgeplan.roofline.execution import CUDA_FUSED_SWIGLU_ROWS

ROWS = 16  # outputs of a row tile
SIZES = (1, 2, 4, 8)  # of clusters
BUFFERS = 2  # of a row tile's sums, as in linear_roles.cu
X_PARTS = 4  # in which many rows of x arrive
FEW_ROWS = 1  # of x: so few arrive at once, and each block fetches its own
FEW_TILES = 4  # row tiles per block: a short product, which gains nothing from more copies under way
MOST_ITEMS = 16  # slots of a ring
MOST_GATED_ROWS = CUDA_FUSED_SWIGLU_ROWS  # of x: more may take shorter rings or several passes, for a small kernel less
RESERVED_BYTES = 2 * 1024  # of a block's shared memory: the driver's and the kernel's static variables
BESIDE_BYTES = 6 * 1024  # of a multiprocessor's, for blocks of a small kernel that waits for this one


@dataclass(frozen=True)
class Format:
    """How a kernel takes weights and what it wants under way; bytes are of a row tile."""

    source: str  # the file that knows more
    unit_inputs: int  # that a warp takes at once
    unit_bytes: int
    padding_bytes: int  # of a slot of the ring
    sum_bytes: int  # of sums of x, per unit and column
    warps: int  # that multiply, per block
    calm_bytes: int  # under way while x is awaited
    flight_bytes: int  # afterwards, in a short product
    long_flight_bytes: int  # and in a long one
    lead: int  # items left to be copied when the next kernel may start
    equal_items: int  # of a row tile: up to so many are made about equal, more are whole but the last
    macros: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """How a product may be spread over multiprocessors."""

    splits: int  # blocks of a cluster, which cut the inputs between them
    item_inputs: int  # at most, in one slot of the ring
    least_items: int  # that the ring must have room for beside x
    most_inputs: int = 1 << 30  # of a weight


@dataclass(frozen=True)
class Machine:
    """What a device holds: shared memory of a multiprocessor, and clusters (one block a multiprocessor) at once."""

    shared_bytes: int
    clusters: tuple[int, ...]  # of as many blocks as the entry of SIZES says


@dataclass(frozen=True)
class Plan:
    """A product's launch: `chunks` passes over the weight, of at most `chunk_rows` rows of x, side by side.

    gated: the first half of the outputs are gates, which a block takes tile by tile with the tile that each lets
    through, and y is half as wide.
    """

    weights: Format
    cut: Cut
    machine: Machine
    bf16: bool
    rows: int
    outputs: int
    inputs: int
    chunk_rows: int
    gated: bool = False

    @cached_property
    def tiles(self) -> int:
        """8-row tiles of x per block."""
        return -(-self.chunk_rows // 8)

    @cached_property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)

    @cached_property
    def shares(self) -> int:
        """Blocks of a cluster that fetch x together."""
        return 2 if self.cut.splits == 1 and self.chunk_rows > FEW_ROWS else 1

    @cached_property
    def groups(self) -> int:
        """Blocks, or clusters that cut the inputs, which share row tiles: all resident at once, or one a tile."""
        return min(max(1, self.resident // self.chunks), -(-self._together // self.shares)) * self.shares

    @cached_property
    def _together(self) -> int:
        """Row tiles, or pairs of a gate's and what it lets through, that groups share."""
        return -(-self.outputs // (2 * ROWS if self.gated else ROWS))

    @cached_property
    def resident(self) -> int:
        """Clusters that the machine holds at once."""
        return self.machine.clusters[SIZES.index(self.cut.splits * self.shares)]

    @cached_property
    def own_tiles(self) -> int:
        """Row tiles of a block, at most."""
        return -(-self._together // self.groups) * (2 if self.gated else 1)

    @cached_property
    def own_units(self) -> int:
        """Of the inputs of a block, at most."""
        return -(-self.inputs // self.weights.unit_inputs // self.cut.splits)

    @cached_property
    def item_inputs(self) -> int:
        """Of a slot of the ring."""
        own_inputs, step = self.own_units * self.weights.unit_inputs, max(64, self.weights.unit_inputs)
        count = -(-own_inputs // self.cut.item_inputs)
        if count > self.weights.equal_items:
            return self.cut.item_inputs
        return -(-own_inputs // (count * step)) * step

    @cached_property
    def item_bytes(self) -> int:
        units = self.item_inputs // self.weights.unit_inputs
        return units * self.weights.unit_bytes + self.weights.padding_bytes

    @cached_property
    def warps(self) -> int:
        """That multiply: as many as the format says, or one less where that takes whole items evenly."""
        most, units = self.weights.warps, self.item_inputs // self.weights.unit_inputs
        return most - 1 if units % most and units % (most - 1) == 0 and units >= 2 * most else most

    @cached_property
    def other_bytes(self) -> int:
        """Shared memory beside the ring: sums of warps, of units and of the cluster, and rows of x."""
        columns = 8 * self.tiles
        met_tiles = -(-self.own_tiles // self.cut.splits) * self.cut.splits if self.cut.splits > 1 else 0
        x_bytes = self.chunk_rows * (2 * self.own_units * self.weights.unit_inputs + 64)
        sum_bytes = self.own_units * self.weights.sum_bytes * columns
        return (BUFFERS * self.warps + met_tiles) * 4 * ROWS * columns + sum_bytes + x_bytes

    @cached_property
    def items(self) -> int:
        """Slots that the ring has room for."""
        room_bytes = self.machine.shared_bytes - BESIDE_BYTES - RESERVED_BYTES - self.other_bytes
        return min(MOST_ITEMS, room_bytes // self.item_bytes)

    @cached_property
    def fits(self) -> bool:
        has_room = self.items >= self.cut.least_items and self.chunks <= self.resident
        meets = self.cut.splits == 1 and self.outputs % (2 * ROWS) == 0 and self.rows <= MOST_GATED_ROWS
        return has_room and (meets or not self.gated) and self.inputs <= self.cut.most_inputs

    @cached_property
    def shared_bytes(self) -> int:
        return self.other_bytes + self.items * self.item_bytes

    @cached_property
    def calm(self) -> int:
        """Items under way at once while x is awaited."""
        return min(self.items, max(1, self.weights.calm_bytes // self.item_bytes))

    @cached_property
    def flight(self) -> int:
        """Items under way at once afterwards."""
        is_short = self.own_tiles <= FEW_TILES
        flight_bytes = self.weights.flight_bytes if is_short else self.weights.long_flight_bytes
        return min(self.items, max(1, flight_bytes // self.item_bytes))

    @cached_property
    def options(self) -> tuple[str, ...]:
        """Of the compiler."""
        own_inputs = self.own_units * self.weights.unit_inputs
        macros = {
            "BF16": int(self.bf16),
            "TILES": self.tiles,
            "SPLITS": self.cut.splits,
            "SHARES": self.shares,
            "X_PARTS": min(X_PARTS, -(-own_inputs // self.item_inputs)) if self.chunk_rows > FEW_ROWS else 1,
            "WARPS": self.warps,
            "ITEM_INPUTS": self.item_inputs,
            "MOST_ITEMS": MOST_ITEMS,
            "GATED": int(self.gated),
        }
        return (*(f"-D{name}={value}" for name, value in macros.items()), *self.weights.macros)
