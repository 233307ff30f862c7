"""Plans and the search for the best one: `planner.recommend(model, gpu, ctx)`.

Not here: costs, times and memory (roofline), and the execution of plans (runtime).
"""

from ridgeplan.planner.feasibility import NothingFits
from ridgeplan.planner.prediction import Prediction, predict
from ridgeplan.planner.queries.compare import compare
from ridgeplan.planner.queries.cost import serving_cost
from ridgeplan.planner.queries.estimate import PlanEstimate, estimate
from ridgeplan.planner.queries.fit import fit
from ridgeplan.planner.queries.gamma import best_gamma
from ridgeplan.planner.queries.sweep import grid_sweep, sweep, thresholds
from ridgeplan.planner.question import SearchOptions
from ridgeplan.planner.recommend import recommend
from ridgeplan.planner.recommendation import Recommendation
from ridgeplan.planner.resolution import resolve, workload_for
from ridgeplan.planner.traffic.serving import Traffic, serving_capacity
from ridgeplan.roofline.plan.plan import Plan, PlanError, Workload
from ridgeplan.roofline.plan.presets import PRESETS, preset

__all__ = [
    "PRESETS", "NothingFits", "Plan", "PlanError", "PlanEstimate", "Prediction", "Recommendation", "SearchOptions",
    "Traffic", "Workload", "best_gamma", "compare", "estimate", "fit", "grid_sweep", "predict", "preset",
    "recommend", "resolve", "serving_capacity", "serving_cost", "sweep", "thresholds", "workload_for",
]  # fmt: skip
