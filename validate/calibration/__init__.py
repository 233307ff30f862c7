"""Calibration: measures a machine's kernels class by class and fits the profile that predictions use.

Not here: the profile's format (roofline/catalog/profile.py).
"""
