"""Quality of plans: fidelity to the plain model, perplexity, and RULER's 13 tasks. `ridgeplan quality` runs it.

RULER's sentences, word lists and examples are our own, so scores compare plans, not with published tables.
Not here: the rows that predictions show (planner/quality.py).
"""
