"""The cost model in sympy: symbols with units, expressions to print or solve, and sweeps compiled from them.

Nothing else in roofline imports sympy when it is imported: it takes longer to load than a prediction takes. Not here:
the formulas themselves (roofline/ops.py, passes.py, memory.py), which take symbols as they take numbers.
"""
