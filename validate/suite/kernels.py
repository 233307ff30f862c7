"""Kernels: the trials of a calibration at sizes that no calibration measures, against the rates that it fitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.execution import rate_rows
from ridgeplan.roofline.latency import Machine
from ridgeplan.validate.calibration.noise import steady_reading
from ridgeplan.validate.calibration.profile import MOST_VARIANTS, class_trials
from ridgeplan.validate.calibration.sizes import Suite
from ridgeplan.validate.machine import last_cache_bytes
from ridgeplan.validate.progress import Progress
from ridgeplan.validate.suite.results import SuiteRow
from ridgeplan.validate.timing import CUDA_ROTATE_BYTES, Bench, Trial

METHOD = (
    "Each kernel as the runtime calls it, on inputs larger than the caches; the fastest of two readings or more, two "
    "of which agree within 10%. Predicted by the rates of its class."
)


@dataclass(frozen=True)
class KernelPrediction:
    """Seconds of a trial by the cost model, and where its rates come from."""

    seconds: float
    source: str

    @classmethod
    def of(cls, trial: Trial, machine: Machine, profile: Profile) -> KernelPrediction:
        """The prediction of a trial's class and cost."""
        rows = rate_rows(trial.kind, trial.rows, trial.width, trial.depth)
        rates = machine.rates[trial.kind].at_rows(rows)
        seconds = machine.seconds(trial.cost, rates, trial.width, trial.depth, trial.tiles)
        return cls(float(seconds), profile.rates(trial.kind).source)


@torch.inference_mode()
def kernel_rows(profile: Profile, device: torch.device, sizes: Suite, on_progress: Progress) -> Iterator[SuiteRow]:
    """A row for every trial of `sizes`, in microseconds."""
    machine, bench = Machine.of(profile), _bench(device, sizes)
    classes = class_trials(bench, sizes, profile.hardware.num_sms)
    for done, (kind, trials) in enumerate(classes.items()):
        on_progress(kind, done, len(classes))
        for trial in trials:
            predicted = KernelPrediction.of(trial, machine, profile)
            measured = steady_reading(partial(bench.readings, trial))
            yield SuiteRow(
                section="kernels",
                kind=kind,
                case=trial.name,
                unit="us",
                predicted=1e6 * predicted.seconds,
                measured=1e6 * measured.seconds,
                source=predicted.source,
            )


def _bench(device: torch.device, sizes: Suite) -> Bench:
    """A bench whose data exceeds the caches."""
    cold_bytes = CUDA_ROTATE_BYTES if device.type == "cuda" else 2 * last_cache_bytes()
    bench = Bench.build(device, sizes.pool_bytes, min(sizes.pool_bytes, cold_bytes), sizes.trial_s)
    return replace(bench, most_variants=MOST_VARIANTS)
