"""Predictions of rows that the regression has not seen: neither their model, in any tuning, nor their text."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ridgeplan.planner.acceptance.model import BAND, observation, subject
from ridgeplan.planner.acceptance.regression import fit
from ridgeplan.planner.acceptance.rows import AcceptanceRow, core_name, shipped_rows

BITS = ("kv8", "kv4", "w4", "w4kv4")


@dataclass(frozen=True)
class HeldOut:
    """A row, and what was predicted of it without its model, for a text that is not known."""

    row: AcceptanceRow
    predicted: float
    deviation: float

    @property
    def error(self) -> float:
        return abs(self.predicted - self.row.acceptance)

    @property
    def in_band(self) -> bool:
        log = np.log((1 - self.row.acceptance) / (1 - self.predicted))
        return bool(abs(log) <= BAND * self.deviation)


def without(rows: list[AcceptanceRow], held: list[AcceptanceRow]) -> Iterator[HeldOut]:
    found = fit([observation(row) for row in rows])
    for row in held:
        parts = replace(subject(row), text="").parts
        residual = observation(row).residual
        yield HeldOut(row, 1 - float(found.disagreement(parts)), found.deviation(parts, residual))


@pytest.fixture(scope="module")
def held_out() -> list[HeldOut]:
    rows = shipped_rows()
    return [
        one
        for model, text in sorted({(core_name(row.model), row.text) for row in rows})
        for one in without(
            [row for row in rows if core_name(row.model) != model and row.text != text],
            [row for row in rows if core_name(row.model) == model and row.text == text],
        )
    ]


def test_bands_hold_nine_of_ten_rows(held_out):
    assert np.mean([one.in_band for one in held_out]) >= 0.9
    assert np.mean([one.in_band for one in held_out if one.row.draft in BITS]) >= 0.9


def nearest(row: AcceptanceRow) -> AcceptanceRow:
    """The nearest row of this draft, in octaves of size and context, of another model and another text."""
    others = [
        one
        for one in shipped_rows()
        if one.draft == row.draft and core_name(one.model) != core_name(row.model) and one.text != row.text
    ]
    return min(
        others, key=lambda one: abs(np.log(one.parameters / row.parameters)) + abs(np.log(one.context / row.context))
    )


def test_drafts_of_fewer_bits_are_predicted_better_than_by_the_nearest_row(held_out):
    """These are the drafts that the runtime executes. Texts alone move QuantSpec's rows of one model by up to 0.05."""
    bits = [one for one in held_out if one.row.draft in BITS]
    error = np.mean([one.error for one in bits])
    by_nearest = np.mean([abs(nearest(one.row).acceptance - one.row.acceptance) for one in bits])
    assert error <= 0.025
    assert error < 0.8 * by_nearest


def test_bands_are_not_wide_for_nothing(held_out):
    """A band that is twice as narrow holds much fewer rows than it should."""
    narrow = [
        abs(np.log((1 - one.row.acceptance) / (1 - one.predicted))) <= BAND / 3 * one.deviation for one in held_out
    ]
    assert np.mean(narrow) < 0.8
