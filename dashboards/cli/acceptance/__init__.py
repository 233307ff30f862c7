"""`ridgeplan acceptance` and `ridgeplan tune`: how often drafts are accepted on a text of the user's.

Not here: the measurement (validate/acceptance.py, validate/tuning), and predictions from its rows (planner/acceptance).
"""
