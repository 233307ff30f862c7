"""Executes a plan: model, caches, drafting, verification, statistics.

Names load on first use: importing `ridgeplan.runtime.model.decoder` loads neither the engine nor the planner.
Not here: kernels (kernels), the choice of a plan (planner), and the comparison with its prediction (validate).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeplan.runtime.engine import Engine, Generation
    from ridgeplan.runtime.errors import ModelError, UnsupportedPlan, WorkloadError
    from ridgeplan.runtime.loading import load
    from ridgeplan.runtime.model.source import embedded_model_path
    from ridgeplan.runtime.sampling import SamplingParams
    from ridgeplan.runtime.statistics import Statistics

MODULES = {
    "Engine": "engine",
    "Generation": "engine",
    "ModelError": "errors",
    "SamplingParams": "sampling",
    "Statistics": "statistics",
    "UnsupportedPlan": "errors",
    "WorkloadError": "errors",
    "embedded_model_path": "model.source",
    "load": "loading",
}

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


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
