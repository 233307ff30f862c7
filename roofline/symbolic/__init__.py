"""The cost model in sympy: symbols with units, expressions to print or solve, and sweeps compiled from them.

Nothing else in roofline imports sympy at import time, as loading it takes longer than a prediction. Not here: the
formulas themselves (roofline/ops.py, passes.py, memory.py), which accept symbols as well as numbers.
"""
