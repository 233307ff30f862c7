"""Measures a machine, and predictions against what really happens."""

from ridgeplan.validate.calibration.calibrate import calibrate, save_profile
from ridgeplan.validate.comparison import Comparison, ComparisonRow
from ridgeplan.validate.measure import Measured, compare, measure
from ridgeplan.validate.validation import Validation, validate_plan

__all__ = [
    "Comparison",
    "ComparisonRow",
    "Measured",
    "Validation",
    "calibrate",
    "compare",
    "measure",
    "save_profile",
    "validate_plan",
]
