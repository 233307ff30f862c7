"""Results of papers derived from the package's own costs, and published models kept for comparison.

Not here: anything that predictions of plans use.
"""
