"""The kernel classes that a calibration measures, and the profile made from them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import metadata

import torch

from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.profile import Profile, Rates
from ridgeplan.roofline.execution import rate_rows
from ridgeplan.validate import machine
from ridgeplan.validate.calibration.calls import bench_for, class_calls, portable_calls
from ridgeplan.validate.calibration.fit import Ceilings, Sample, Samples, SamplesError, fit_rates, fit_steps
from ridgeplan.validate.calibration.link import link_classes
from ridgeplan.validate.calibration.noise import NoiseCheck
from ridgeplan.validate.calibration.overheads import measured_rounds, with_dispatch, with_fitted_gaps
from ridgeplan.validate.calibration.sizes import Suite, suite_for
from ridgeplan.validate.measure import Progress
from ridgeplan.validate.timing import Bench, KernelCall

Keep = Callable[[Samples], object]  # called with what was measured
PORTABLE = "portable"  # all classes of the kernels that older GPUs run
LINK = "link"  # all classes of transfers between a GPU and the host
LARGE_READ_BYTES = 200e6


class CalibrationError(ValueError):
    """A calibration that this machine cannot do: of another one's profile, of an unknown class or device."""


@torch.inference_mode()
def measure_profile(
    quick: bool, device: str | None, on_progress: Progress, suite: Suite | None, noise: NoiseCheck, keep: Keep
) -> Profile:
    """See `ridgeplan.validate.calibration.calibrate.calibrate`."""
    place = _device(device)
    suite = _fitting(suite or suite_for(place.type, quick), place)
    on_progress("ceilings", 0, 1)
    bench = bench_for(place, suite)
    bandwidth, compute = machine.copy_bytes_per_s(bench), machine.matmul_flops(bench, suite.matmul_size)
    cuda = place.type == "cuda"
    hardware = machine.cuda_hardware(bench, bandwidth, compute) if cuda else machine.cpu_hardware(bandwidth, compute)
    samples = _measured(bench, suite, hardware.num_sms, on_progress, noise)
    ceilings = _ceilings(hardware, bandwidth, compute, (sample for of_kind in samples.values() for sample in of_kind))
    profile = Profile(
        hardware=hardware,
        device=torch.cuda.get_device_name(place) if cuda else machine.cpu_model(),
        software=_software(),
        date=_today(),
        classes={
            kind: noise.widened(kind, _fitted(kind, of_kind, ceilings, suite)) for kind, of_kind in samples.items()
        },
        asynchronous=cuda,
        portable=_portable(bench, suite, hardware.num_sms, ceilings),
    )
    if cuda:
        profile = _with_link(bench, profile)
    on_progress("whole rounds", len(samples), len(samples) + 1)
    dispatched = with_dispatch(bench, profile, suite.dispatch_shape, suite.dispatch_layers)
    rounds = measured_rounds(dispatched, suite.gap_shapes, place)
    keep(Samples.of(profile.device, profile.date, ceilings, samples).with_rounds(rounds))
    return with_fitted_gaps(dispatched, suite.gap_shapes, rounds) if rounds else dispatched


@torch.inference_mode()
def measure_again(
    base: Profile, kinds: Sequence[str], quick: bool, on_progress: Progress, suite: Suite | None, noise: NoiseCheck
) -> Profile:
    """See `ridgeplan.validate.calibration.calibrate.recalibrate`."""
    place = _device(None)
    device = torch.cuda.get_device_name(place) if place.type == "cuda" else machine.cpu_model()
    if device != base.device:
        raise CalibrationError(f"the profile is of {base.device}, this machine is {device}; calibrate it whole")
    suite = _fitting(suite or suite_for(place.type, quick), place)
    bench = bench_for(place, suite)
    known = [*class_calls(bench, suite, base.hardware.num_sms), PORTABLE, LINK]
    if unknown := sorted(set(kinds) - set(known)):
        raise CalibrationError(f"class {unknown[0]!r} is none of: {', '.join(known)}")
    bandwidth, compute = machine.copy_bytes_per_s(bench), machine.matmul_flops(bench, suite.matmul_size)
    samples = _measured(bench, suite, base.hardware.num_sms, on_progress, noise, kinds)
    ceilings = _ceilings(
        base.hardware, bandwidth, compute, (sample for of_kind in samples.values() for sample in of_kind)
    )
    fitted = {kind: noise.widened(kind, _fitted(kind, of_kind, ceilings, suite)) for kind, of_kind in samples.items()}
    portable = _portable(bench, suite, base.hardware.num_sms, ceilings) if PORTABLE in kinds else base.portable
    profile = replace(
        base, software=_software(), date=_today(), classes={**base.classes, **fitted}, portable=dict(portable)
    )
    return _with_link(bench, profile) if LINK in kinds and place.type == "cuda" else profile


def fitted_again(base: Profile, samples: Samples, suite: Suite) -> Profile:
    """`base` with the rates of the classes that have samples and whose time grows in steps, and the gaps of its rounds.

    Everything else stays as it is. Raises SamplesError for samples of another machine.
    """
    if samples.device != base.device:
        raise SamplesError(f"the samples are of {samples.device}, the profile is of {base.device}; allowed: the same")
    hardware, reached = base.hardware, (samples.matmul_utilization, samples.read_utilization)
    ceilings = Ceilings(hardware.bandwidth_bytes_per_s, hardware.compute_flops, *reached, hardware.num_sms)
    stepped = {kind: of_kind for kind, of_kind in samples.by_kind().items() if suite.steps_of(kind) is not None}
    fitted = {kind: _fitted(kind, of_kind, ceilings, suite) for kind, of_kind in stepped.items()}
    profile = replace(base, classes={**base.classes, **fitted}, date=samples.date)
    return with_fitted_gaps(profile, suite.gap_shapes, samples.rounds) if samples.rounds else profile


def _software() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("torch", "ridgeplan")}


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


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
    on_progress: Progress,
    noise: NoiseCheck,
    kinds: Sequence[str] | None = None,
) -> dict[str, list[Sample]]:
    """Samples of all classes, or of `kinds`."""
    classes = class_calls(bench, suite, num_sms)
    chosen = {kind: calls for kind, calls in classes.items() if kinds is None or kind in kinds}
    samples = {}
    for done, (kind, calls) in enumerate(chosen.items()):
        on_progress(kind, done, len(chosen))
        readings = noise.readings(kind, bench, calls, sample_of)
        samples[kind] = [replace(sample, seconds=seconds) for sample, seconds in readings]
    return samples


def _ceilings(hardware: Hardware, copied: float, matmul: float, samples: Iterable[Sample]) -> Ceilings:
    """Nothing is read faster than a copy, a sum or the fastest kernel that reads far more than a cache holds."""
    large = [sample.cost.bytes / sample.seconds for sample in samples if sample.cost.bytes > LARGE_READ_BYTES]
    peaks = hardware.bandwidth_bytes_per_s, hardware.compute_flops
    return Ceilings(*peaks, matmul / peaks[1], min(1.0, max(copied, *large, 0.0) / peaks[0]), hardware.num_sms)


def sample_of(call: KernelCall) -> Sample:
    """A call's sizes, not timed yet."""
    return Sample(call.cost, math.nan, call.rows, call.width, call.depth, call.tiles)


def _fitted(kind: str, samples: Sequence[Sample], ceilings: Ceilings, suite: Suite) -> Rates:
    """Rates in steps of rows for the classes that a decode pass's rows and queries go through, if the suite has any."""
    samples = [replace(sample, rows=rate_rows(kind, sample.rows, sample.width, sample.depth)) for sample in samples]
    steps = suite.steps_of(kind)
    return fit_rates(samples, ceilings) if steps is None else fit_steps(samples, ceilings, steps)


def _portable(bench: Bench, suite: Suite, num_sms: int, ceilings: Ceilings) -> dict[str, Rates]:
    """Rates of the kernels that run on GPUs older than Hopper, each reading once."""
    if not suite.portable:
        return {}
    samples: dict[str, list[Sample]] = {}
    for call in portable_calls(bench, suite, num_sms):
        samples.setdefault(call.kind, []).append(replace(sample_of(call), seconds=bench.seconds(call)))
    return {kind: _fitted(kind, of_kind, ceilings, suite) for kind, of_kind in samples.items()}
