"""Device timestamps in stream order, to time the parts of a captured graph."""

import time

from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel


def record_timestamp(out: Tensor, index: int, *, backend: Backend = "auto") -> None:
    """Writes the time in nanoseconds since a fixed origin to out[index], int64, once all earlier work is done."""
    if not uses_gpu_kernel(backend, out):
        out[index] = time.perf_counter_ns()
        return
    from ridgeplan.kernels.device.triton_helpers import record_timestamp_triton

    record_timestamp_triton(out, index)
