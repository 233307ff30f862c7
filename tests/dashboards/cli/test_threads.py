"""The number of threads on a CPU beside other programs, and the calibrations of each number."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeplan.dashboards.cli import threads
from ridgeplan.dashboards.cli.calibrate import machine_profile
from ridgeplan.dashboards.cli.threads import busy_cores, limit_threads
from ridgeplan.planner.resolution import NotCalibrated, profile_path, this_machine
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.profile import Profile, load_profile, save_profile

IDLE = "cpu  9 9 9 9 9 9 9 9 9 9\n" + "".join(f"cpu{core} 50 0 10 900 40 0 0 0 0 0\n" for core in range(4))
Statistics = Callable[..., None]


def after(*shares: float) -> str:
    """The statistics a second after IDLE, with these shares of the cores busy."""
    lines = [f"cpu{core} {50 + 100 * share:.0f} 0 10 {1000 - 100 * share:.0f} 40 0 0 0 0 0" for core, share in
             enumerate(shares)]  # fmt: skip
    return "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 1 2 3", "ctxt 4"])


@pytest.fixture
def statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Statistics]:
    """Simulates a machine with as many cores as shares, all of which torch computes with."""
    path, before = tmp_path / "stat", torch.get_num_threads()
    monkeypatch.setattr(threads, "STATISTICS", path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def simulate(*shares: float) -> None:
        path.write_text(IDLE)
        torch.set_num_threads(len(shares))
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(len(shares))), raising=False)
        monkeypatch.setattr(threads.time, "sleep", lambda _: path.write_text(after(*shares)))

    yield simulate
    torch.set_num_threads(before)


@pytest.fixture
def cpu_profile(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """A CPU's profile of two threads, in an empty folder of the user; measuring gives it for any number of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ridgeplan.planner.resolution.detect_hardware", lambda: None)
    cpu = replace(profile, hardware=replace(load_hardware("h200"), name="cpu-test", kind="cpu", num_sms=2))

    def calibrate(*_: Any, **__: Any) -> Profile:
        return replace(cpu, hardware=replace(cpu.hardware, num_sms=torch.get_num_threads()))

    monkeypatch.setattr("ridgeplan.validate.calibrate", calibrate)
    return cpu


@pytest.mark.parametrize(
    ("shares", "cores", "busy"),
    [((0, 0), 2, 0), ((1, 0), 2, 1), ((0.3, 0.3), 2, 1), ((0.2, 0.2), 2, 0), ((1, 1, 0.9, 1), 4, 4), ((1, 0), 1, 1)],
)
def test_busy_cores_are_those_that_were_not_idle(shares: tuple[float, ...], cores: int, busy: int) -> None:
    assert busy_cores(IDLE, after(*shares), range(cores)) == busy


def test_guests_and_waits_for_disks_count_once_or_not() -> None:
    first, last = "cpu0 0 0 0 0 0 0 0 0 0 0", "cpu0 50 0 0 10 40 0 0 0 50 0"  # a guest's 50 are among the user's
    assert (
        busy_cores(f"{first}\n{first.replace('cpu0', 'cpu1')}", f"{last}\n{last.replace('cpu0', 'cpu1')}", (0, 1)) == 1
    )


@pytest.mark.parametrize(
    ("shares", "count", "note"),
    [
        ((1, 0), 1, "note: 1 of 2 cores is busy: computing with 1 thread\n"),
        ((1, 0, 1, 0), 2, "note: 2 of 4 cores are busy: computing with 2 threads\n"),
        ((1, 1), 1, "note: 2 of 2 cores are busy: computing with 1 thread\n"),
        ((0, 0.1), None, ""),
    ],
)
def test_torch_computes_with_the_cores_that_are_left(
    statistics: Statistics, shares: tuple[float, ...], count: int | None, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    statistics(*shares)
    assert limit_threads() == count
    assert torch.get_num_threads() == (count or len(shares))
    assert capsys.readouterr().err == note


def test_a_users_number_of_threads_stays(statistics: Statistics, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics(1, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert limit_threads() is None
    assert torch.get_num_threads() == 2


def test_a_machine_with_a_gpu_keeps_its_threads(statistics: Statistics, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics(1, 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert limit_threads() is None


def test_each_number_of_threads_has_a_calibration(
    statistics: Statistics, cpu_profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(cpu_profile)
    statistics(0, 0)
    assert machine_profile() == (cpu_profile, None)
    statistics(1, 0)
    measured, path = machine_profile()
    note = "note: this machine is not calibrated for a thread count of 1; measuring it now, once\n"
    assert note in capsys.readouterr().err
    assert measured.hardware.num_sms == 1
    assert path == profile_path(1)
    assert load_profile(path) == measured
    statistics(1, 0)
    assert machine_profile() == (measured, None)
    assert this_machine() == cpu_profile  # what `plan --gpu auto` reads


def test_a_calibration_of_fewer_threads_serves_planning_only(statistics: Statistics, cpu_profile: Profile) -> None:
    statistics(1, 0)
    with pytest.raises(NotCalibrated):
        this_machine()
    measured, _ = machine_profile()
    assert this_machine() == measured
    statistics(0, 0)
    assert machine_profile()[1] == profile_path()


def test_a_calibration_of_other_threads_is_not_used_silently(
    statistics: Statistics, cpu_profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    four = replace(cpu_profile, hardware=replace(cpu_profile.hardware, num_sms=4))
    save_profile(four)
    statistics(0, 0)
    difference = "calibrated for 4 threads, not for this process's 2"
    assert machine_profile(four) == (four, None)
    assert f"note: the profile is {difference}, so predictions do not hold\n" in capsys.readouterr().err
    assert machine_profile() == (cpu_profile, profile_path())
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert notes == [f"note: this machine is {difference}; measuring it now, once"]


def test_a_disturbed_calibration_is_used_and_not_kept(
    cpu_profile: Profile, monkeypatch: pytest.MonkeyPatch, statistics: Statistics, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {name: replace(rates, spread=2.0) for name, rates in cpu_profile.classes.items()}
    disturbed = replace(cpu_profile, classes=wide)
    monkeypatch.setattr("ridgeplan.validate.calibrate", lambda *_, **__: disturbed)
    statistics(0, 0)
    assert machine_profile() == (disturbed, None)
    assert not profile_path().exists()
    assert "this calibration is not kept, as other programs disturbed it" in capsys.readouterr().err
    statistics(1, 0)  # measuring again would be disturbed again
    assert machine_profile() == (disturbed, profile_path(1))
    assert load_profile(profile_path(1)).disturbed


@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_a_plan_by_a_disturbed_calibration_says_so(
    invoke: Any, cpu_profile: Profile, tmp_path: Path, tiny_folder: Path, spread: float
) -> None:
    classes = {name: replace(rates, spread=spread) for name, rates in cpu_profile.classes.items()}
    path = save_profile(replace(cpu_profile, classes=classes), tmp_path / "own.json")
    result = invoke("run", tiny_folder, "--prompt", "The", "--max-new-tokens", 2, "--profile", path)
    assert (", while other programs ran]" in result.stderr) == (spread > 1)


def test_calibrate_saves_what_fewer_threads_reach_apart(
    invoke: Any, refuses: Any, statistics: Statistics, cpu_profile: Profile
) -> None:
    statistics(1, 0)
    answer = json.loads(invoke("calibrate", "--quick", "--json").stdout)
    assert (answer["path"], answer["profile"]["hardware"]["num_sms"]) == (str(profile_path(1)), 1)
    statistics(0, 0)
    only = ("calibrate", "--only", "linear", "--output", profile_path(1))
    assert "calibrated for 1 thread, not for this process's 2; allowed: --only with as many" in refuses(*only)
