"""Measurements behind the papers' claims: `ridgeplan study` runs them.

Not here: the methods themselves (runtime), and tables and plots (dashboards).
"""
