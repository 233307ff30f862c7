"""A round's results: one tensor with named views on the device, and a small record per row on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RoundFigures:
    """A round's figures in one tensor, int64 [rows, gamma + 5], so that a single copy transfers them to the host."""

    values: Tensor

    @classmethod
    def of(cls, tokens: Tensor, kept: Tensor, accepted: Tensor, verified: Tensor, finite: Tensor) -> RoundFigures:
        """From tokens [rows, gamma + 1], counts [rows], and whether the target's logits were finite, bool [rows]."""
        return cls(torch.cat([tokens, torch.stack([kept, accepted, verified, finite], dim=1)], dim=1))

    @staticmethod
    def width(gamma: int) -> int:
        """Figures per row: its tokens, three counts, and whether the target's logits were finite."""
        return gamma + 5

    @property
    def tokens(self) -> Tensor:
        """int64 [rows, gamma + 1], of which a row keeps the first `kept`."""
        return self.values[:, :-4]

    @property
    def kept(self) -> Tensor:
        """int64 [rows], tokens appended to the text; 0 for an inactive row."""
        return self.values[:, -4]

    @property
    def accepted(self) -> Tensor:
        """int64 [rows], drafts that the target agreed with."""
        return self.values[:, -3]

    @property
    def verified(self) -> Tensor:
        """int64 [rows], drafts that were compared with the target."""
        return self.values[:, -2]

    @property
    def finite(self) -> Tensor:
        """int64 [rows], 1 where all of the target's logits were finite."""
        return self.values[:, -1]

    def rows(self) -> list[RowResult]:
        """The result of each row, on the host."""
        views = (self.tokens, self.kept, self.accepted, self.verified, self.finite)
        columns = zip(*(view.tolist() for view in views), strict=True)
        return [
            RowResult(tokens[:kept], accepted, verified, bool(finite))
            for tokens, kept, accepted, verified, finite in columns
        ]


@dataclass(frozen=True)
class RowResult:
    """One row's part of a round: the tokens that it keeps, and the number of its accepted and verified drafts.

    finite: whether all of the target's logits were finite.
    """

    tokens: list[int]
    accepted: int
    verified: int
    finite: bool = True


NOTHING = RowResult([], 0, 0)  # the result of a finished row


@dataclass(frozen=True)
class RoundResult:
    """One round on the host.

    gamma: drafts of each row. seconds: device time of drafting, of verification with rejection sampling, and of
    keeping; "idle" is the device's wait since the previous round.
    """

    rows: list[RowResult]
    seconds: dict[str, float]
    gamma: int = 0
