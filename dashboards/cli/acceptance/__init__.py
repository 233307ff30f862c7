"""`ridgeplan acceptance`: how often drafts are accepted on a text of the user's.

Not here: the measurement (validate/acceptance.py), and predictions from its rows (planner/acceptance).
"""
