"""Calibration of this machine: the rates of each kernel class, measured with the package's own kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch

from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.profile import Profile, Rates
from ridgeplan.roofline.execution import rate_rows
from ridgeplan.runtime.progress import OnProgress, silent
from ridgeplan.validate import machine
from ridgeplan.validate.calibration.calls import bench_for, class_calls, portable_calls
from ridgeplan.validate.calibration.fit import Ceilings, KernelTiming, Samples, SamplesError, fit_rates, fit_steps
from ridgeplan.validate.calibration.link import link_classes
from ridgeplan.validate.calibration.noise import CPU_PASSES, NoiseCheck, slowdown
from ridgeplan.validate.calibration.overheads import DISPATCH_TIMES, measured_rounds, with_dispatch, with_rounds
from ridgeplan.validate.calibration.scales import SLOWED, fitted_scales, with_scales
from ridgeplan.validate.calibration.sizes import Suite, suite_for
from ridgeplan.validate.timing import Bench, KernelCall

PORTABLE = "portable"  # all classes of the kernels that older GPUs run
LINK = "link"  # all classes of transfers between a GPU and the host
DISPATCH = "dispatch"  # the host's times to launch passes and layers
LARGE_READ_BYTES = 200e6  # far more than a cache holds


class CalibrationError(ValueError):
    """A calibration that this machine cannot do: of another machine's profile, or of an unknown class or device."""


@torch.inference_mode()
def calibrate(
    quick: bool,
    device: str | None = None,
    on_progress: OnProgress = silent,
    suite: Suite | None = None,
    noise: NoiseCheck | None = None,
    keep: Callable[[Samples], object] | None = None,
) -> Profile:
    """Measures this machine's profile. It takes a few minutes, with `quick` one or two.

    device: by default "cuda" if available, else "cpu". suite: replaces the device's sizes. noise: decides whether noisy
    classes are refused, as by default; it holds every class's spread afterwards. keep: is called with the samples
    before they are fitted.
    Raises ValueError for a device that does not exist, and NoisyMachine where readings do not agree.
    """
    noise = noise or NoiseCheck(quick=quick)
    place = _device(device)
    suite = _fitting(suite or suite_for(place.type, quick), place)
    on_progress("ceilings", 0, 1)
    bench = bench_for(place, suite)
    bandwidth, compute = machine.copy_bytes_per_s(bench), machine.matmul_flops(bench, suite.matmul_size)
    cuda = place.type == "cuda"
    hardware = machine.cuda_hardware(bench, bandwidth, compute) if cuda else machine.cpu_hardware(bandwidth, compute)
    measure = partial(_measured, bench, suite, hardware.num_sms, noise=noise)
    dispatch = partial(with_dispatch, bench, shape=suite.dispatch_shape, layer_counts=suite.dispatch_layers)
    samples = measure(on_progress)
    if not cuda:  # measured again, as other programs may have slowed the first time
        again = machine.copy_bytes_per_s(bench), machine.matmul_flops(bench, suite.matmul_size)
        bandwidth, compute = max(bandwidth, again[0]), max(compute, again[1])
        hardware = machine.cpu_hardware(bandwidth, compute)
    ceilings, classes = _fitted_classes(hardware, (bandwidth, compute), samples, suite, noise)
    profile = Profile(
        hardware=hardware,
        device=machine.device_name(place),
        software=machine.software(),
        date=machine.today(),
        classes=classes,
        asynchronous=cuda,
        portable=_portable(bench, suite, hardware.num_sms, ceilings),
    )
    if cuda:
        profile = _with_link(bench, profile)
    read = CPU_PASSES * len(samples)
    steps = read + 1 + 8 * len(suite.gap_shapes)  # up to 8 rounds of each
    on_progress("launches of layers", read, steps)
    dispatched = dispatch(profile)
    rounds = []
    for sample in measured_rounds(dispatched, suite.gap_shapes, place):
        rounds.append(sample)
        on_progress("whole rounds", read + len(rounds), steps)
    scales = {} if cuda else fitted_scales(dispatched, suite.gap_shapes, rounds)
    if slowed := [kind for kind, scale in scales.items() if scale < SLOWED]:
        repeated = measure(lambda kind, *_: on_progress(f"{kind}, again", steps - 1, steps), kinds=slowed)
        faster = partial(min, key=attrgetter("seconds"))
        samples |= {kind: list(map(faster, samples[kind], of_kind)) for kind, of_kind in repeated.items()}
        _, classes = _fitted_classes(hardware, (bandwidth, compute), samples, suite, noise)
        dispatched = dispatch(replace(profile, classes=classes))
    if keep is not None:
        keep(Samples.of(profile.device, profile.date, ceilings, samples).with_rounds(rounds))
    return with_rounds(dispatched, suite.gap_shapes, rounds)


@torch.inference_mode()
def recalibrate(
    base: Profile,
    kinds: Sequence[str],
    quick: bool,
    on_progress: OnProgress = silent,
    suite: Suite | None = None,
    noise: NoiseCheck | None = None,
) -> Profile:
    """Measures the classes `kinds` of `base`, this machine's profile, again.

    "portable" stands for the classes of older GPUs, "link" for those of the link to the host, "dispatch" for the host's
    times to launch. What is fitted to whole rounds stays as it is; a CPU's classes are scaled by them again.
    Raises CalibrationError for another machine's profile and for an unknown class, and NoisyMachine where readings do
    not agree.
    """
    noise = noise or NoiseCheck(quick=quick)
    place = _device(None)
    device = machine.device_name(place)
    if device != base.device:
        raise CalibrationError(f"the profile is of {base.device}, this machine is {device}; calibrate it in full")
    suite = _fitting(suite or suite_for(place.type, quick), place)
    bench = bench_for(place, suite)
    known = [*class_calls(bench, suite, base.hardware.num_sms), PORTABLE, LINK, DISPATCH]
    if unknown := sorted(set(kinds) - set(known)):
        raise CalibrationError(f"class {unknown[0]!r} is none of: {', '.join(known)}")
    bandwidth, compute = machine.copy_bytes_per_s(bench), machine.matmul_flops(bench, suite.matmul_size)
    samples = _measured(bench, suite, base.hardware.num_sms, on_progress, noise, kinds)
    ceilings, fitted = _fitted_classes(base.hardware, (bandwidth, compute), samples, suite, noise)
    portable = _portable(bench, suite, base.hardware.num_sms, ceilings) if PORTABLE in kinds else base.portable
    profile = replace(
        base,
        software=machine.software(),
        date=machine.today(),
        classes={**base.classes, **fitted},
        portable=dict(portable),
    )
    if DISPATCH in kinds:
        profile = with_dispatch(bench, profile, suite.dispatch_shape, suite.dispatch_layers)
    if place.type == "cuda":
        return _with_link(bench, profile) if LINK in kinds else profile
    scales = fitted_scales(profile, suite.gap_shapes, [*measured_rounds(profile, suite.gap_shapes, place)])
    return with_scales(profile, {kind: scale for kind, scale in scales.items() if kind in kinds})


def merge_recalibrated(saved: Profile, base: Profile, measured: Profile) -> Profile:
    """`saved` with what `recalibrate` measured, where it made `measured` of `base`.

    saved: the profile that the file holds by now, perhaps with other classes that were measured again since.
    Raises CalibrationError where it was calibrated whole since, as the shares are then of other ceilings.
    """
    if saved.hardware != base.hardware or saved.device != base.device:
        raise CalibrationError("the machine was calibrated whole meanwhile; measure the classes again")
    classes = {kind: rates for kind, rates in measured.classes.items() if rates != base.classes.get(kind)}
    changed = {
        name: getattr(measured, name)
        for name in ("portable", "host_link_utilization", "software", "date", *DISPATCH_TIMES)
        if getattr(measured, name) != getattr(base, name)
    }
    return replace(saved, classes={**saved.classes, **classes}, **changed)


def refit(base: Profile, path: Path, suite: Suite | None = None) -> Profile:
    """Fits `base` again to the samples that an earlier full calibration of the same machine left in a file.

    This changes the rates of the classes whose time grows in steps, and the gaps of rounds; on a CPU those of all
    classes, as rounds scale them. Everything else stays as it is. suite: by default the full one of the machine.
    Raises SamplesError for a file that is missing, damaged or of another machine.
    """
    samples = Samples.read(path)
    suite = suite or suite_for("cpu" if base.hardware.kind == "cpu" else "cuda", quick=False)
    if samples.device != base.device:
        raise SamplesError(f"the samples are of {samples.device}, the profile is of {base.device}; allowed: the same")
    hardware, reached = base.hardware, (samples.matmul_utilization, samples.read_utilization)
    ceilings = Ceilings(hardware.bandwidth_bytes_per_s, hardware.compute_flops, *reached, hardware.num_sms)
    fitted = {
        kind: _fitted(kind, of_kind, ceilings, suite)
        for kind, of_kind in samples.by_kind().items()
        if suite.steps_of(kind) is not None or not base.asynchronous
    }
    profile = replace(base, classes={**base.classes, **fitted}, date=max(base.date, samples.date))
    return with_rounds(profile, suite.gap_shapes, samples.rounds)


def _device(name: str | None) -> torch.device:
    available = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    name = name or available[-1]
    if name.partition(":")[0] not in available:
        raise CalibrationError(f"device is {name!r}; allowed here: {', '.join(available)}")
    return torch.device(name)


def _fitting(suite: Suite, place: torch.device) -> Suite:
    """`suite` with a pool of at most a quarter of a GPU's memory; sizes that exceed the pool are left out."""
    if place.type != "cuda":
        return suite
    memory_bytes = torch.cuda.get_device_properties(place).total_memory
    return replace(suite, pool_bytes=min(suite.pool_bytes, memory_bytes // 4))


def _with_link(bench: Bench, profile: Profile) -> Profile:
    """`profile` with the rates of the link to the host, measured on a GPU."""
    copied = machine.host_link_bytes_per_s(bench)
    classes = {**profile.classes, **link_classes(bench.device, copied)}
    return replace(profile, host_link_utilization=copied / profile.hardware.host_link_bytes_per_s, classes=classes)


def _measured(
    bench: Bench,
    suite: Suite,
    num_sms: int,
    on_progress: OnProgress,
    noise: NoiseCheck,
    kinds: Sequence[str] | None = None,
) -> dict[str, list[KernelTiming]]:
    """Samples of all classes, or of `kinds`."""
    classes = partial(class_calls, bench, suite, num_sms)
    chosen = [kind for kind in classes() if kinds is None or kind in kinds]
    readings = noise.by_kind(bench, chosen, classes, untimed, on_progress)
    return {
        kind: [replace(sample, seconds=seconds) for sample, seconds in of_kind] for kind, of_kind in readings.items()
    }


def _fitted_classes(
    hardware: Hardware,
    reached: tuple[float, float],
    by_kind: dict[str, list[KernelTiming]],
    suite: Suite,
    noise: NoiseCheck,
) -> tuple[Ceilings, dict[str, Rates]]:
    """The ceilings and the rates of each class that they fit. reached: bytes/s of a copy, FLOP/s of a large product.

    Nothing is read faster than a copy, a sum or the fastest kernel that reads far more than a cache holds.
    """
    samples = [sample for of_kind in by_kind.values() for sample in of_kind]
    large = [sample.cost.bytes / sample.seconds for sample in samples if sample.cost.bytes > LARGE_READ_BYTES]
    (copied, matmul), peaks = reached, (hardware.bandwidth_bytes_per_s, hardware.compute_flops)
    read_utilization = min(1.0, max(copied, *large, 0.0) / peaks[0])
    ceilings = Ceilings(*peaks, matmul / peaks[1], read_utilization, hardware.num_sms)
    fitted = noise.fitting(
        {kind: _fitted(kind, of_kind, ceilings, suite) for kind, of_kind in by_kind.items()},
        {kind: slowdown(of_kind, ceilings) for kind, of_kind in by_kind.items()},
    )
    return ceilings, {kind: noise.widened(kind, rates) for kind, rates in fitted.items()}


def untimed(call: KernelCall) -> KernelTiming:
    """A call's sizes, not timed yet."""
    return KernelTiming(call.cost, math.nan, call.rows, call.width, call.depth, call.tiles)


def _fitted(kind: str, samples: Sequence[KernelTiming], ceilings: Ceilings, suite: Suite) -> Rates:
    """Rates in steps of rows for the classes that a decode pass's rows and queries go through, if the suite has any."""
    samples = [replace(sample, rows=rate_rows(kind, sample.rows, sample.width, sample.depth)) for sample in samples]
    steps = suite.steps_of(kind)
    return fit_rates(samples, ceilings) if steps is None else fit_steps(samples, ceilings, steps)


def _portable(bench: Bench, suite: Suite, num_sms: int, ceilings: Ceilings) -> dict[str, Rates]:
    """Rates of the kernels that run on GPUs older than Hopper, each reading once."""
    if not suite.portable:
        return {}
    samples: dict[str, list[KernelTiming]] = {}
    for call in portable_calls(bench, suite, num_sms):
        samples.setdefault(call.kind, []).append(replace(untimed(call), seconds=bench.seconds(call)))
    return {kind: _fitted(kind, of_kind, ceilings, suite) for kind, of_kind in samples.items()}
