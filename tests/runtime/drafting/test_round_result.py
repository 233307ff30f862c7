"""A round's figures and what is read from them on the host."""

import torch

from ridgeplan.runtime.speculation.speculator import RoundFigures, RowResult


def test_rows_read_what_was_packed():
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    kept, accepted, verified = torch.tensor([[2, 0], [1, 0], [2, 0]])
    figures = RoundFigures.of(tokens, kept, accepted, verified, finite=torch.tensor([True, False]))
    assert figures.values.shape == (2, RoundFigures.width(gamma=2))
    assert torch.equal(figures.tokens, tokens)
    assert figures.rows() == [RowResult([5, 6], accepted=1, verified=2), RowResult([], 0, 0, finite=False)]
