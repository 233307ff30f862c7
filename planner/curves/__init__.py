"""Figures of given plans over other contexts and batches, gammas and acceptances: what charts show.

Each is one vectorized evaluation of the cost model. Not here: the search for plans (planner/search).
"""
