"""Speculative decoding: drafting, verification, keeping of accepted tokens, and the execution of rounds.

Not here: the draft's weights (runtime/quantization), expected acceptance (planner/acceptance).
"""
