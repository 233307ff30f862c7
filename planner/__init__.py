"""Plans and the search for the best one: `planner.recommend(model, gpu, ctx)`.

Not here: costs, times and memory (roofline), and the execution of plans (runtime).
"""

from ridgeplan.planner.plan import Plan, PlanError, Workload
from ridgeplan.planner.prediction import Prediction, predict
from ridgeplan.planner.presets import PRESETS, preset
from ridgeplan.planner.questions.comparison import compare
from ridgeplan.planner.questions.cost import serving_cost
from ridgeplan.planner.questions.grid_sweep import grid_sweep
from ridgeplan.planner.recommendation import Recommendation
from ridgeplan.planner.resolution import resolve, workload_for
from ridgeplan.planner.search import NothingFits, recommend
from ridgeplan.planner.search.best_gamma import best_gamma
from ridgeplan.planner.search.fit import fit
from ridgeplan.planner.sweeps import sweep, thresholds

__all__ = [
    "PRESETS", "NothingFits", "Plan", "PlanError", "Prediction", "Recommendation", "Workload", "best_gamma", "compare",
    "fit", "grid_sweep", "predict", "preset", "recommend", "resolve", "serving_cost", "sweep", "thresholds",
    "workload_for",
]  # fmt: skip
