"""Measures what a machine's kernels reach, class by class, and fits the profile that predictions stand on.

Not here: the profile's format and where it is looked up (roofline/catalog/profile.py).
"""
