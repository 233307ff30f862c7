"""Serving traffic: requests that arrive over time, simulated on engines that batch continuously.

Not here: the time of a step and the memory of a plan (roofline, planner/engines), and measured traffic.
"""
