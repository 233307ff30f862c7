"""Axes of a plan whose values have hyperparameters: a frozen dataclass for each value."""
