"""Serving engines that plans may be for: their formats, measured decode steps, and the rates fitted to these.

Not here: serve commands (planner/export), and how a user's own engine is measured (validate/engine_steps.py).
"""
