"""The shipped start ends where a fit from nothing does, and is used for the rows that it is of only."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ridgeplan.planner.acceptance import shipped_rows
from ridgeplan.planner.acceptance.model import observation, shipped_fit
from ridgeplan.planner.acceptance.regression import CONVERGED, START, Fit, Start, digest, fit, start_json, start_of


@pytest.fixture(scope="module")
def from_nothing() -> Fit:
    return fit([observation(row) for row in shipped_rows()])


def test_it_ends_where_a_fit_from_nothing_does(from_nothing: Fit) -> None:
    shipped = shipped_fit()
    assert list(shipped.index) == list(from_nothing.index)
    assert np.abs(shipped.mean - from_nothing.mean).max() < CONVERGED
    assert np.sqrt(np.diag(shipped.covariance)) == pytest.approx(np.sqrt(np.diag(from_nothing.covariance)), abs=0.01)
    assert shipped.variances == pytest.approx(from_nothing.variances, rel=0.05)


def test_the_file_is_of_the_shipped_rows(from_nothing: Fit) -> None:
    """Where this fails after rows have changed, write start.json anew: planner/acceptance/regression.py says how."""
    assert START.read_text(encoding="utf-8").count(digest(shipped_rows())) == 1
    start = start_of(shipped_rows())
    assert list(start.effects) == list(from_nothing.index)
    assert list(start.effects.values()) == pytest.approx(from_nothing.mean.tolist(), abs=CONVERGED)


def test_other_rows_start_from_nothing() -> None:
    first, *others = shipped_rows()
    changed = replace(first, acceptance=first.acceptance / 2)
    assert start_of((changed, *others)) == start_of(others) == Start()


def test_a_file_written_now_is_read_back(from_nothing: Fit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ridgeplan.planner.acceptance.regression.START", tmp_path / "start.json")
    (tmp_path / "start.json").write_text(start_json(from_nothing, shipped_rows()), encoding="utf-8")
    found = start_of(shipped_rows())
    assert list(found.effects) == list(from_nothing.index)
    assert list(found.effects.values()) == pytest.approx(from_nothing.mean.tolist(), abs=1e-6)
    assert found.variances == pytest.approx(from_nothing.variances, abs=1e-6)
