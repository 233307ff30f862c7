"""Questions about given plans and about many: estimates, comparisons, sweeps, and the cost of serving.

Not here: the search for one plan (planner/search).
"""
