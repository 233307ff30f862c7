"""The papers' figures, made from the model: rows of plain values, and pure plotly functions that draw them.

`registry.py` lists them all. Not here: charts of answers and of measurements (dashboards/charts), and the figures'
numbers (planner/published, roofline/papers).
"""
