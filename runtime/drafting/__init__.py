"""Speculation: drafting, verification and keeping of a round's tokens, and how rounds run on a device.

Not here: the draft's weights (runtime/quantization), acceptance as a plan expects it (planner/acceptance.py).
"""
