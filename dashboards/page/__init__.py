"""The widgets of the Streamlit page, one file a tab. Each shows an `Answer`; charts draw what the planner computes.

Not here: figures (dashboards/charts, dashboards/figures), and what they show (planner).
"""
