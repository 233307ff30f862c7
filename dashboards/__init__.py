"""User interfaces: CLI, charts, Streamlit page.

Not here: predictions and plans (planner), their execution (runtime), measurements (validate).
"""
