"""Measures machines, kernels and decoding, and compares predictions with measurements.

Not here: predictions (planner), and what is measured (kernels, runtime).
"""

from ridgeplan.validate.calibration.calibrate import calibrate, recalibrate, save_profile
from ridgeplan.validate.calibration.noise import NoiseCheck, NoisyMachine
from ridgeplan.validate.comparison import Comparison, ComparisonRow, compare
from ridgeplan.validate.measure import Measured, measure
from ridgeplan.validate.validation import PlanRuns, Validation, run_plans, validate_plan

__all__ = [
    "Comparison",
    "ComparisonRow",
    "Measured",
    "NoiseCheck",
    "NoisyMachine",
    "PlanRuns",
    "Validation",
    "calibrate",
    "compare",
    "measure",
    "recalibrate",
    "run_plans",
    "save_profile",
    "validate_plan",
]
