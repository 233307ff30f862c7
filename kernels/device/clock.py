"""The device's clock, read in the order of its work: what times the parts of a captured graph."""

import time

from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_triton


def stamp(out: Tensor, index: int, *, backend: Backend = "auto") -> None:
    """Writes nanoseconds since some fixed moment to out[index], int64, when all work before it is done."""
    if not uses_triton(backend, out):
        out[index] = time.perf_counter_ns()
        return
    from ridgeplan.kernels.device.clock_triton import stamp_triton

    stamp_triton(out, index)
