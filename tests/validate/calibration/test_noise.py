"""When readings of a calibration agree, and what happens to classes whose readings do not. All times are made up."""

import gc
import statistics
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.profile import MAX_SPREAD, Profile, Rates
from ridgeplan.roofline.cost import Cost
from ridgeplan.validate.calibration.fit import Ceilings, KernelTiming
from ridgeplan.validate.calibration.noise import (
    CPU_PASSES,
    MAX_READINGS,
    QUICK_READINGS,
    NoiseCheck,
    NoisyMachine,
    Reading,
    distance,
    require_plausible,
    slowdown,
    steady_reading,
    upper_quartile,
)
from ridgeplan.validate.timing import Bench, KernelCall

RATES = Rates(0.8, 0.5, 1e-6, 0.03)
SLOWED = "other programs, or a virtual machine's neighbours, slowed readings: "


def reading(*seconds: float) -> tuple[Reading, int]:
    """The reading from these times, which come in pairs, and how many of them were taken."""
    left = list(seconds)
    return steady_reading(lambda: [left.pop(0), left.pop(0)]), len(seconds) - len(left)


def test_two_readings_that_agree_are_enough() -> None:
    seconds, taken = reading(1.0, 1.05, 0.1, 0.1)
    assert (seconds.seconds, taken) == (1.0, 2)
    assert seconds.spread == pytest.approx(0.05)


def test_a_slow_reading_is_repeated_until_two_agree() -> None:
    seconds, taken = reading(9.0, 1.0, 5.0, 1.02, 0.1, 0.1)
    assert (seconds.seconds, taken) == (1.0, 4)
    assert seconds.spread == pytest.approx(0.02)


def test_readings_that_never_agree_end() -> None:
    seconds, taken = reading(32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0)
    assert (seconds, taken) == (Reading(1.0, 1.0), MAX_READINGS)


def test_a_quick_calibration_takes_the_quieter_half_of_readings_that_never_agree() -> None:
    left = [2.0**power for power in range(QUICK_READINGS)]
    reading = steady_reading(lambda: [left.pop(), left.pop()], quick=True)
    assert reading.seconds == pytest.approx(6.0)  # the median of 1, 2, 4, 8, 16 and 32
    assert reading.spread == pytest.approx(statistics.stdev([1, 2, 4, 8, 16, 32]) / 6)
    assert not left


def test_a_quick_calibration_accepts_more_noise_and_says_so() -> None:
    check = NoiseCheck(quick=True)
    assert check.note() is None
    check.record("linear", [0.4])
    check.record("rope", [0.05])
    assert check.note() == f"{SLOWED}readings of 1 of 2 kernel classes differ by up to 40%, so their bands are wider"
    assert check.widened("linear", RATES).spread == pytest.approx((0.03**2 + 0.4**2) ** 0.5)
    with pytest.raises(NoisyMachine, match="readings of 'attention' differ by 60%; allowed: 50%, or any"):
        check.record("attention", [0.6])


def test_a_class_faster_than_a_matmul_is_refused_whatever_is_allowed() -> None:
    def profile(compute: float, launch_s: float = 5e-7) -> Profile:
        rates = replace(RATES, compute_utilization=compute, launch_s=launch_s)
        return Profile(load_hardware("h200"), "a machine", {"torch": "none"}, "2026-11-24", {"linear": rates})

    require_plausible(profile(1.4))
    require_plausible(profile(2.94, launch_s=1e-5))  # by a busy moment of the matmul's own measurement
    with pytest.raises(
        NoisyMachine,
        match=r"'linear' seems to compute at 294% of a large matmul's speed, launched in 0.5 us; allowed: 200%",
    ):
        require_plausible(profile(2.94))


def test_a_class_whose_fit_says_nothing_is_left_to_a_relative() -> None:
    check = NoiseCheck(allowed=True)
    misfit = replace(RATES, spread=0.97)
    assert check.fitting({"linear": RATES, "rope": misfit}, {}) == {"linear": RATES}
    assert check.note() == f"{SLOWED}related classes stand for rope (its fit is off by 97%)"
    assert check.fitting({"linear": misfit}, {}) == {"linear": misfit}  # nothing can stand for it
    with pytest.raises(NoisyMachine, match=r"'linear' \(its fit is off by 97%; allowed: 75%, or any with --allow-nois"):
        NoiseCheck().fitting({"linear": misfit}, {})


def test_a_class_far_slower_than_the_machine_is_left_to_a_relative() -> None:
    """Its fit holds: all of its calls were slowed alike. 1 MB at 10 GB/s and a launch of 0.1 ms take 0.2 ms."""
    ceilings = Ceilings(1e10, 1e12)
    calls = {"linear": [1e-4, 1e-3], "attention_int4": [8e-3, 9e-3]}
    slowdowns = {
        kind: slowdown([KernelTiming(Cost(read_bytes=1e6), seconds) for seconds in of_kind], ceilings)
        for kind, of_kind in calls.items()
    }
    assert slowdowns == {"linear": pytest.approx(0.5), "attention_int4": pytest.approx(40)}
    check = NoiseCheck()
    assert check.fitting(dict.fromkeys(calls, RATES), slowdowns) == {"linear": RATES}
    assert check.note() == f"{SLOWED}related classes stand for attention_int4 (40 times slower than the machine)"
    with pytest.raises(NoisyMachine, match=r"'linear' \(40 times slower than the machine; allowed: 20 times, or any"):
        check.fitting({"linear": RATES}, {"linear": 40.0})


def test_the_distance_is_that_of_the_two_fastest() -> None:
    assert distance([3.0, 2.5, 2.0, 100.0]) == 0.25


def test_a_quarter_of_noisy_calls_does_not_condemn_a_class() -> None:
    assert upper_quartile([0.5, 0.0, 0.0, 0.0, 0.0]) == 0.0
    assert upper_quartile([0.5]) == 0.5


def test_a_noisy_class_is_refused_with_one_line() -> None:
    check = NoiseCheck()
    check.record("linear", [0.02, 0.03, 0.02, 0.03, 0.3])
    with pytest.raises(NoisyMachine, match=r"readings of 'attention' differ by 30%; .*--allow-noisy") as refused:
        check.record("attention", [0.3, 0.3, 0.02, 0.3])
    assert "\n" not in str(refused.value)


def test_where_it_is_allowed_the_band_widens_by_the_noise() -> None:
    check = NoiseCheck(allowed=True)
    check.record("attention", [0.4, 0.4])
    check.record("linear", [0.04])
    assert check.noisy("attention")
    assert check.widened("attention", RATES).spread == pytest.approx((0.03**2 + 0.4**2) ** 0.5)
    assert check.widened("linear", RATES) == RATES
    check.record("gather", [1e6])
    assert check.widened("gather", RATES).spread == MAX_SPREAD


CPU = Bench(torch.device("cpu"), torch.empty(0), 0, 0.5)


def test_what_is_kept_of_calls_comes_with_their_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "readings", lambda _, call: [3.0, 2.0, 2.1] if call.name == "slow" else [1.0, 1.0])
    calls = (KernelCall("linear", name, Cost(), lambda _: None, rows=5) for name in ("slow", "fast"))
    slow, fast = NoiseCheck().readings(CPU, calls, lambda call: (call.name, call.rows))
    assert (slow[0], slow[1].seconds) == (("slow", 5), 2.0)
    assert slow[1].spread == pytest.approx(0.05)
    assert fast == (("fast", 5), Reading(1.0, 0.0))


def passes_of(
    check: NoiseCheck, monkeypatch: pytest.MonkeyPatch, **seconds: list[float]
) -> tuple[dict[str, list[tuple[str, float]]], list[str]]:
    """The samples of classes with one call each, which takes these seconds in each pass, and what was read."""
    left = {kind: list(of_kind) for kind, of_kind in seconds.items()}
    monkeypatch.setattr(Bench, "readings", lambda _, call: [left[call.kind].pop(0)] * 2)

    def classes() -> dict[str, list[KernelCall]]:
        return {kind: [KernelCall(kind, "a call", Cost(), lambda _: None)] for kind in seconds}

    steps: list[tuple[str, int, int]] = []
    samples = check.by_kind(CPU, [*seconds], classes, lambda call: call.name, lambda *step: steps.append(step))
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
    assert all(done < total for _, done, total in steps)
    return samples, [what for what, *_ in steps]


def test_a_class_that_was_slowed_as_a_whole_is_read_again_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All readings of attention agree in the first pass, 40 times too slow."""
    check = NoiseCheck(quick=True)
    samples, read = passes_of(check, monkeypatch, attention=[40.0, 1.0, 1.02], rope=[2.0, 2.1])
    assert samples == {"attention": [("a call", 1.0)], "rope": [("a call", 2.0)]}
    assert read == ["attention", "rope", "attention, pass 2", "rope, pass 2", "attention, pass 3"]
    assert check.spreads == {"attention": pytest.approx(0.02), "rope": pytest.approx(0.05)}


def test_of_passes_that_never_agree_a_quick_calibration_keeps_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = {"attention": [40.0, 8.0, 1.0]}
    with pytest.raises(NoisyMachine, match="readings of 'attention' differ by 50%; allowed: 10%, 50% with --quick"):
        passes_of(NoiseCheck(), monkeypatch, **passes)
    check = NoiseCheck(quick=True)
    samples, read = passes_of(check, monkeypatch, **passes)
    assert (samples, len(read)) == ({"attention": [("a call", 1.0)]}, CPU_PASSES)
    assert check.note() == f"{SLOWED}readings of 1 of 1 kernel classes differ by up to 50%, so their bands are wider"


def test_a_quick_calibration_reads_no_class_again_once_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading takes 35 s: the second pass over attention ends after 105 s, and no two passes agree."""
    now = 0.0

    def read(_: Bench, call: KernelCall) -> list[float]:
        nonlocal now
        now += 35.0
        return [now, now]

    monkeypatch.setattr(Bench, "readings", read)
    calls = {kind: [KernelCall(kind, "a call", Cost(), lambda _: None)] for kind in ("attention", "rope")}

    def names(check: NoiseCheck) -> list[str]:
        nonlocal now
        now, named = 0.0, list[str]()
        check.by_kind(CPU, [*calls], lambda: calls, lambda call: call.name, lambda what, *_: named.append(what))
        return named

    quick = NoiseCheck(quick=True, allowed=True, clock=lambda: now)
    assert names(quick) == ["attention", "rope", "attention, pass 2"]
    assert quick.read_once == ["rope"]
    assert quick.note() == (
        f"{SLOWED}readings of 1 of 2 kernel classes differ by up to 50%, so their bands are wider; "
        "1 of 2 classes were read only once in 90 s"
    )
    assert quick.widened("rope", RATES).spread == pytest.approx((0.03**2 + 1.0**2) ** 0.5)  # one pass says little
    assert quick.widened("attention", RATES).spread == pytest.approx((0.03**2 + 0.5**2) ** 0.5)
    whole = NoiseCheck(allowed=True, clock=lambda: now)
    assert len(names(whole)) == 2 * CPU_PASSES and not whole.read_once


def test_a_reading_is_not_repeated_where_it_is_late() -> None:
    left = [1.0, 9.0, 1.0, 1.0]
    late = steady_reading(lambda: [left.pop(0), left.pop(0)], quick=True, late=lambda: True)
    assert (late, len(left)) == (Reading(1.0, 8.0), 2)


def test_calls_are_dropped_once_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds its inputs, which may be gigabytes on a GPU."""
    monkeypatch.setattr(Bench, "readings", lambda *_: [1.0, 1.0])
    alive: list[weakref.ref[KernelCall]] = []

    def calls() -> Iterator[KernelCall]:
        for _ in range(3):
            gc.collect()
            assert sum(reference() is not None for reference in alive) <= 1
            call = KernelCall("linear", "", Cost(), lambda _: None)
            alive.append(weakref.ref(call))
            yield call

    NoiseCheck().readings(CPU, calls(), lambda call: call.name)


def test_a_calls_times_are_read_in_two_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1 1 1 9 | 2 2 2 9 the lower quartiles are 1 and 2."""
    monkeypatch.setattr(Bench, "_times", lambda *_: [1.0, 1.0, 1.0, 9.0, 2.0, 2.0, 2.0, 9.0])
    assert CPU.readings(KernelCall("linear", "", Cost(), lambda _: None)) == [1.0, 2.0]
