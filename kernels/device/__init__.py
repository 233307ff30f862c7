"""What kernels share: choice of a backend, compilation, launches, PTX, unpacking of nibbles, the device's clock.

Not here: anything that computes a part of a model.
"""
