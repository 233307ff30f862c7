"""Profiles whose rates are fitted to kept samples again."""

from dataclasses import replace
from pathlib import Path

import pytest

from ridgeplan.roofline.catalog.profile import Profile, RowStep
from ridgeplan.roofline.catalog.profile_lookup import shipped_profiles
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.latency import Machine
from ridgeplan.validate.calibration.calibrate import refit
from ridgeplan.validate.calibration.fit import Ceilings, RoundSample, Sample, Samples, SamplesError, read_samples

KEPT = Path(__file__).parents[3] / "validate" / "results" / "calibration_h200.json"
SAMPLES = Samples.of(
    "a machine", "2026-11-22", Ceilings(1e12, 1e14, 0.7, 0.9),
    {"linear": [Sample(Cost(1.0, 2.0, 3.0), 4e-6, 5, 6.0, 7.0)], "rope": [Sample(Cost(8.0, 9.0), 1e-6, 10)]},
).with_rounds([RoundSample(0, "quantspec", 700, 3, 40, 1e-4, 2e-4, 3e-5)])  # fmt: skip


@pytest.fixture
def shipped() -> Profile:
    (found,) = (profile for profile in shipped_profiles() if profile.hardware.name == "h200")
    return found


def test_the_shipped_profile_is_fitted_to_the_kept_samples(shipped: Profile) -> None:
    """From rates that are all wrong, the times of a step come out as those of the profile that ships."""
    kinds = {one.kind for one in read_samples(KEPT).kernels}
    assert len(kinds) == 12
    wrong = {
        kind: replace(rates, launch_s=1.0, steps=(RowStep(1, launch_s=1.0),)) if kind in {*kinds, "gap"} else rates
        for kind, rates in shipped.classes.items()
    }
    found = refit(replace(shipped, classes=wrong, draft_gap_s=1.0, target_gap_s=1.0), KEPT)
    assert (found.draft_gap_s, found.target_gap_s) == pytest.approx(
        (shipped.draft_gap_s, shipped.target_gap_s), rel=1e-3
    )
    machines = Machine.of(found), Machine.of(shipped)
    for kind in (*kinds, "gap"):
        for rows in (1, 5, 12, 40):
            cost = Cost(read_bytes=3e7)
            times = [
                float(machine.seconds(cost, machine.rates[kind].at_rows(rows), 4096, 5000, 512)) for machine in machines
            ]
            assert times[0] == pytest.approx(times[1], rel=1e-3)


def test_samples_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    path.write_text(SAMPLES.to_json())
    found = read_samples(path)
    assert found == SAMPLES
    (one,) = found.by_kind()["linear"]
    assert (one.cost, one.seconds, one.rows, one.width, one.depth) == (Cost(1.0, 2.0, 3.0), 4e-6, 5, 6.0, 7.0)
    assert one.tiles == 6 / 16


@pytest.mark.parametrize(
    "found, said",
    [
        ("{", "samples .*samples.json"),
        (SAMPLES.to_json().replace('"rows": 5', '"rows": 0'), "rows"),
        (SAMPLES.to_json().replace('"schema": 1', '"schema": 7'), "schema"),
        (SAMPLES.to_json(), "the samples are of a machine, the profile is of NVIDIA H200"),
    ],
    ids=["no JSON", "a size out of range", "another schema", "another machine's"],
)
def test_samples_that_do_not_fit_are_refused(tmp_path: Path, shipped: Profile, found: str, said: str) -> None:
    path = tmp_path / "samples.json"
    path.write_text(found)
    with pytest.raises(SamplesError, match=said):
        refit(shipped, path)


def test_a_missing_file_of_samples_is_named(tmp_path: Path, shipped: Profile) -> None:
    with pytest.raises(SamplesError, match=r"cannot read samples .*none.json"):
        refit(shipped, tmp_path / "none.json")
