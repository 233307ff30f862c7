"""Commands that predict and plan: recommend, estimate, fit, gamma.

Not here: commands that run a plan (dashboards/cli), and what these commands ask (planner).
"""
