"""Timings that a user measured elsewhere, in place of a calibration's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ridgeplan.roofline.catalog.profile import Profile, ProfileError, transferred_spread
from ridgeplan.roofline.execution import rate_rows
from ridgeplan.roofline.latency import INTEGER
from ridgeplan.validate.calibration.fit import Ceilings, Samples, Times, fit_rates
from ridgeplan.validate.calibration.noise import MAX_FIT_SPREAD

MAX_OFF = 1.25  # times that a class's timings may be faster than its fitted rates: caches serve some of the bytes
MIN_SAMPLES = 2  # of a class, whose launch and rate are fitted
TELLING_SAMPLES = 5  # whose spread about the fit counts: fewer of them fit nearly exactly, whatever their noise


def corrected(base: Profile, samples: Samples) -> Profile:
    """`base` with the classes of the samples fitted to them, as measured; classes in steps of rows lose these.

    With fewer than TELLING_SAMPLES a class's spread is at least that of `base`, or of rates taken from elsewhere.

    Raises ProfileError for no samples, for too few of a class, and for samples that no rates explain.
    """
    hardware = base.hardware
    ceilings = Ceilings(hardware.bandwidth_bytes_per_s, hardware.compute_flops, num_sms=hardware.num_sms)
    by_kind, fitted = samples.by_kind(), {}
    if not by_kind:
        raise ProfileError(f"there are no timings; allowed: {MIN_SAMPLES} or more of a class")
    for kind, of_kind in by_kind.items():
        if len(of_kind) < MIN_SAMPLES:
            raise ProfileError(f"{kind!r} has {len(of_kind)} timing; allowed: {MIN_SAMPLES} or more, of several sizes")
        timings = [replace(each, rows=rate_rows(kind, each.rows, each.width, each.depth)) for each in of_kind]
        rates = fit_rates(timings, ceilings)
        if rates.spread > MAX_FIT_SPREAD:
            raise ProfileError(
                f"no rates explain the timings of {kind!r}: they differ by {rates.spread:.0%}; "
                f"allowed: {MAX_FIT_SPREAD:.0%}; are bytes, FLOPs and seconds of one call each?"
            )
        logs = np.log([rates.launch_s, rates.bandwidth_utilization, rates.compute_utilization])
        off = float(np.median(np.exp(Times.of(timings, ceilings).residuals(logs))))
        if not 1 / MAX_OFF <= off <= MAX_OFF:  # the fit ended at a limit of its rates
            raise ProfileError(
                f"the timings of {kind!r} are {off:,.3g}x as fast as any rates of {hardware.name} explain; allowed: up "
                f"to {MAX_OFF:g}x; are bytes, FLOPs and seconds of one call on this GPU each?"
            )
        former = base.classes[kind].spread if kind in base.classes else transferred_spread(0.0)
        spread = max(rates.spread, former) if len(of_kind) < TELLING_SAMPLES else rates.spread
        fitted[kind] = replace(rates, spread=spread, source="measured")
    # A class's timings are of all its products, also of those that are computed as integers.
    kept = {kind: rates for kind, rates in base.classes.items() if kind.removesuffix(INTEGER) not in fitted}
    return replace(base, classes={**kept, **fitted})
