"""Measures machines, kernels and decoding, and compares predictions with measurements.

Not here: predictions (planner), and what is measured (kernels, runtime).
"""

from typing import TYPE_CHECKING, Any

from ridgeplan.roofline.catalog.profile import save_profile
from ridgeplan.validate.calibration.noise import NoiseCheck, NoisyMachine
from ridgeplan.validate.comparison import Comparison, ComparisonRow, compare
from ridgeplan.validate.measure import Measured, measure
from ridgeplan.validate.validation import PlanRuns, RunOptions, Validation, run_plans, validate_plan

if TYPE_CHECKING:
    from ridgeplan.validate.calibration.calibrate import calibrate, recalibrate

__all__ = [
    "Comparison",
    "ComparisonRow",
    "Measured",
    "NoiseCheck",
    "NoisyMachine",
    "PlanRuns",
    "RunOptions",
    "Validation",
    "calibrate",
    "compare",
    "measure",
    "recalibrate",
    "run_plans",
    "save_profile",
    "validate_plan",
]


def __getattr__(name: str) -> Any:
    """Imports calibration when it is first used, as it imports torch, which takes seconds."""
    if name in ("calibrate", "recalibrate"):
        from ridgeplan.validate.calibration import calibrate as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
