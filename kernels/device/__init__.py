"""Shared by all kernels: choice of a backend, compilation, launches, PTX, unpacking of nibbles, the device's clock.

Not here: operations of a model.
"""
