"""The device itself: which backend runs, how kernels launch and compile, its clock, PTX and nibbles that kernels share.

Not here: anything that computes a part of a model.
"""
