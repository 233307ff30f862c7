"""What the slots of a layer on the device hold, and what a step loads into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KeysAndValues = tuple[Tensor, Tensor]
MOST_SLOTS = 1 << 14  # of one set; a program holds their times of use in registers
EMPTY = -1


@dataclass(frozen=True, eq=False)
class SlotTable:
    """The contents of the slots of one layer. A unit is a token, or a page of tokens that are chosen together.

    slot_of: int32 [B, sets, units], the slot that holds a unit, or EMPTY. unit_of: int32 [B, sets, slots], the reverse.
    used: int32 [B, sets, slots], the step of a slot's last use. step: int32 [1], steps so far. wanted, loaded: int64
    [B, sets], units that steps have chosen, and those that were missing.
    """

    slot_of: Tensor
    unit_of: Tensor
    used: Tensor
    step: Tensor
    wanted: Tensor
    loaded: Tensor

    @classmethod
    def allocate(cls, batch: int, sets: int, units: int, slots: int, device: torch.device) -> SlotTable:
        """Empty slots. Raises ValueError for more than MOST_SLOTS."""
        if not 0 < slots <= MOST_SLOTS:
            raise ValueError(f"{slots} slots on the device; allowed: 1 to {MOST_SLOTS}")

        def filled(value: int, count: int) -> Tensor:
            return torch.full((batch, sets, count), value, dtype=torch.int32, device=device)

        counters = [torch.zeros(batch, sets, dtype=torch.int64, device=device) for _ in range(2)]
        step = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(filled(EMPTY, units), filled(EMPTY, slots), filled(0, slots), step, *counters)

    def forget(self) -> None:
        """Empties the slots, of which those used last are still the last to be used again."""
        self.slot_of.fill_(EMPTY)
        self.unit_of.fill_(EMPTY)

    def reset(self) -> None:
        """As they were made."""
        self.forget()
        for tensor in (self.used, self.step, self.wanted, self.loaded):
            tensor.zero_()

    def first(self, rows: int) -> SlotTable:
        """The table of the first rows."""
        slot_of, unit_of, used = (x[:rows] for x in (self.slot_of, self.unit_of, self.used))
        return SlotTable(slot_of, unit_of, used, self.step, self.wanted[:rows], self.loaded[:rows])

    @property
    def bytes(self) -> int:
        """Device memory of the table."""
        return sum(tensor.nbytes for tensor in (self.slot_of, self.unit_of, self.used))


@dataclass(frozen=True, eq=False)
class SlotLoads:
    """What one step loads. slots: int32 [B, sets, K], where each chosen unit is once it is done. units, into: int32 [B,
    sets, K], of which the first `count`, int32 [B, sets], are loaded, each into its slot.
    """

    slots: Tensor
    units: Tensor
    into: Tensor
    count: Tensor
