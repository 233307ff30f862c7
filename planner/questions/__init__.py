"""Questions about many plans: comparisons, sweeps, and the cost of serving.

Not here: the search for one plan (planner/search).
"""
