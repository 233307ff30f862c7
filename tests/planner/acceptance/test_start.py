"""Where the regression starts changes how soon it ends, not where."""

from pathlib import Path

import numpy as np
import pytest

from ridgeplan.planner.acceptance import shipped_rows
from ridgeplan.planner.acceptance.model import observation, shipped_fit
from ridgeplan.planner.acceptance.regression import CONVERGED, Fit, Start, fit
from ridgeplan.planner.acceptance.start import shipped_start, start_json


@pytest.fixture(scope="module")
def from_nothing() -> Fit:
    return fit([observation(row) for row in shipped_rows()])


def test_the_shipped_start_ends_where_a_fit_from_nothing_does(from_nothing: Fit) -> None:
    """Where this fails after rows have changed, write start.json anew (planner/acceptance/start.py)."""
    shipped = shipped_fit()
    assert list(shipped.index) == list(from_nothing.index)
    assert np.abs(shipped.mean - from_nothing.mean).max() < CONVERGED
    assert np.sqrt(np.diag(shipped.covariance)) == pytest.approx(np.sqrt(np.diag(from_nothing.covariance)), abs=0.01)


def test_the_file_holds_the_effects_of_all_rows(from_nothing: Fit) -> None:
    assert set(shipped_start().effects) == set(from_nothing.index)
    held = {effect for effect, value in zip(from_nothing.index, from_nothing.mean, strict=True) if value == 0}
    assert held == {effect for effect, value in shipped_start().effects.items() if value == 0}


def test_a_start_of_fewer_rows_ends_at_the_same_effects(from_nothing: Fit) -> None:
    """As after rows were added: effects that the start lacks begin at their priors."""
    rows = [observation(row) for row in shipped_rows()]
    earlier = fit(rows[: len(rows) // 2])
    known = dict(zip(earlier.index, map(float, earlier.mean), strict=True))
    later = fit(rows, start=Start(known, earlier.variances))
    predicted = [[float(one.disagreement(row.parts)) for row in rows] for one in (later, from_nothing)]
    assert np.log(predicted[0]) == pytest.approx(np.log(predicted[1]), abs=0.03)


def test_a_file_written_now_is_read_back(from_nothing: Fit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ridgeplan.planner.acceptance.start.START", tmp_path / "start.json")
    (tmp_path / "start.json").write_text(start_json(from_nothing), encoding="utf-8")
    found = shipped_start()
    assert list(found.effects) == list(from_nothing.index)
    assert list(found.effects.values()) == pytest.approx(from_nothing.mean.tolist(), abs=1e-6)
    assert found.variances == pytest.approx(from_nothing.variances, abs=1e-6)
