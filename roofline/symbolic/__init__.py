"""The cost model in sympy: symbols with units, expressions to print or solve, and sweeps compiled from them.

Not here: the formulas, which take symbols as they take numbers. Predictions do without sympy, which is slow to import.
"""
