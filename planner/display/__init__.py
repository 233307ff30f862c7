"""How answers show themselves in Python: one line, a table, a data frame, a figure.

Not here: the command line and the page (dashboards), and what the answers are.
"""
