"""The cost of every operation, its time on a machine, and the memory of a plan.

Not here: which plans there are and which is best (planner).
"""
