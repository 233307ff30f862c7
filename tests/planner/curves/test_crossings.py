"""Where curves cross, against closed forms."""

import math

import numpy as np
import pytest

from ridgeplan.planner.queries.curves import crossings

X = np.geomspace(1, 1024, 11)


def test_power_laws_cross_where_algebra_says() -> None:
    """x and 3 sqrt(x) meet at 9; between points too, as both are straight on log scales."""
    (found,) = crossings(X, {"linear": X, "root": 3 * np.sqrt(X)})
    assert (found.x, found.y) == pytest.approx((9, 9))
    assert (found.before, found.after) == ("linear", "root")  # the lower one before and after


def test_three_curves_cross_in_pairs_in_order() -> None:
    found = crossings(X, {"one": X, "flat": np.full(11, 10.0), "root": 2 * np.sqrt(X)})
    assert [round(one.x, 6) for one in found] == [4, 10, 25]


@pytest.mark.parametrize("other", [X + 1, np.where(X < 100, np.nan, X / 2), np.full(11, np.nan)])
def test_no_crossing_where_curves_do_not_meet_or_have_no_values(other: np.ndarray) -> None:
    assert crossings(X, {"one": X, "other": other}) == []
    assert not any(math.isnan(one.x) for one in crossings(X, {"one": X, "other": other}))
