"""The joint search: the best plan for a workload, what fits a machine, and the best gamma.

Not here: the space that is searched (planner/search_space.py), and predictions of single plans (planner/prediction.py).
"""

from ridgeplan.planner.search.candidates import Candidate, best_of_preset, search
from ridgeplan.planner.search.nothing_fits import NothingFits
from ridgeplan.planner.search.question import Objective, Question, notes
from ridgeplan.planner.search.recommend import recommend

__all__ = ["Candidate", "NothingFits", "Objective", "Question", "best_of_preset", "notes", "recommend", "search"]
