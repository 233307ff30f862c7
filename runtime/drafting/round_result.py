"""What a round tells the host: one tensor with named views on the device, a small record for each row on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RoundFigures:
    """A round's figures, int64 [rows, gamma + 5], in one piece so that one copy brings them to the host."""

    values: Tensor

    @classmethod
    def of(cls, tokens: Tensor, kept: Tensor, accepted: Tensor, judged: Tensor, finite: Tensor) -> RoundFigures:
        """From tokens [rows, gamma + 1], counts [rows], and whether the target's logits are numbers, bool [rows]."""
        return cls(torch.cat([tokens, torch.stack([kept, accepted, judged, finite], dim=1)], dim=1))

    @staticmethod
    def width(gamma: int) -> int:
        """Figures of a row: its tokens, three counts, and whether they stand on finite logits."""
        return gamma + 5

    @property
    def tokens(self) -> Tensor:
        """int64 [rows, gamma + 1], of which a row keeps the first `kept`."""
        return self.values[:, :-4]

    @property
    def kept(self) -> Tensor:
        """int64 [rows], tokens that enter the text; 0 for a row that is not active."""
        return self.values[:, -4]

    @property
    def accepted(self) -> Tensor:
        """int64 [rows], drafts that the target agreed with."""
        return self.values[:, -3]

    @property
    def judged(self) -> Tensor:
        """int64 [rows], drafts that were compared with the target."""
        return self.values[:, -2]

    @property
    def finite(self) -> Tensor:
        """int64 [rows], 1 where all of the target's logits are numbers."""
        return self.values[:, -1]

    def rows(self) -> list[RowResult]:
        """The result of each row, on the host."""
        views = (self.tokens, self.kept, self.accepted, self.judged, self.finite)
        columns = zip(*(view.tolist() for view in views), strict=True)
        return [
            RowResult(tokens[:kept], accepted, judged, bool(finite))
            for tokens, kept, accepted, judged, finite in columns
        ]


@dataclass(frozen=True)
class RowResult:
    """One row's part of a round: the tokens that it keeps, and how many of its drafts were accepted and judged.

    finite: whether the target's logits, on which all of this stands, are numbers.
    """

    tokens: list[int]
    accepted: int
    judged: int
    finite: bool = True


NOTHING = RowResult([], 0, 0)  # the result of a row that is done


@dataclass(frozen=True)
class RoundResult:
    """One round on the host.

    seconds: of drafting, verification with rejection sampling, and keeping, by the device's clock; "idle" is the
    device's wait since the round before.
    """

    rows: list[RowResult]
    seconds: dict[str, float]
