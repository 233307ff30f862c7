"""Arguments of other engines' serve commands, extracted from their wheels: what exported plans are checked against.

Not here: the extracted schemas and their parser (planner/export).
"""
