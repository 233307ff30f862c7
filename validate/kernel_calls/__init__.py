"""Kernel calls at given sizes, a file per kernel family: inputs, the call, its cost, its reference and its peers.

Not here: the bench that times them (validate/kernel_bench.py), and rates for predictions (validate/calibration).
"""
