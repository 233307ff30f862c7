"""Axes of a plan whose values have hyperparameters: a frozen dataclass for each value.

Not here: the plan and its other axes (planner/plan.py).
"""
