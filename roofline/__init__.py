"""The cost of every operation, its time on a machine, and the memory of a plan.

Not here: plans and the search for the best one (planner).
"""
