"""Results of the papers derived from the package's own costs, and published models kept for comparison.

Not here: what predictions of plans use.
"""
