"""What the command line, the page and Python share: quantities as people write them, plan files, words explained.

Not here: the faces themselves (dashboards), and plans as values (planner/plan.py).
"""
