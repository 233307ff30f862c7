"""Quality of plans: fidelity to the plain model, perplexity, and the RULER tasks. `ridgeplan quality` runs it.

Not here: the tasks themselves (validate/ruler), and the rows that predictions show (planner/measured_quality.py).
"""
