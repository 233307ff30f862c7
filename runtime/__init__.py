"""Executes a plan: model, caches, drafting, verification, statistics.

Not here: kernels (kernels), the choice of a plan (planner), and the comparison with its prediction (validate).
"""

from ridgeplan.runtime.engine import Engine, Generation
from ridgeplan.runtime.errors import ModelError, UnsupportedPlan, WorkloadError
from ridgeplan.runtime.loading import load
from ridgeplan.runtime.model.source import embedded_model_path
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.statistics import Statistics

__all__ = [
    "Engine",
    "Generation",
    "ModelError",
    "SamplingParams",
    "Statistics",
    "UnsupportedPlan",
    "WorkloadError",
    "embedded_model_path",
    "load",
]
