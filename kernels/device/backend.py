"""Which implementation a call runs: a GPU kernel (CUDA C++ or Triton) or its plain-torch reference."""

import os
from functools import cache
from importlib.util import find_spec
from typing import Literal

from torch import Tensor

Backend = Literal["auto", "triton", "reference"]


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def uses_gpu_kernel(backend: Backend, tensor: Tensor) -> bool:
    """Whether a call on `tensor` runs a kernel instead of the reference.

    "auto" does so on CUDA, in CUDA C++ where a kernel fits the call, else in Triton. "triton" always runs Triton's, on
    a CPU in its interpreter; "reference" never runs a kernel.
    Raises ValueError for "triton" with a CPU tensor outside Triton's interpreter, and for an unknown backend.
    """
    if backend == "auto":
        return tensor.is_cuda and _triton_installed()
    if backend not in ("triton", "reference"):
        raise ValueError(f"backend {backend!r} is none of: auto, triton, reference")
    if backend == "triton" and not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"backend 'triton' needs a CUDA tensor or TRITON_INTERPRET=1, not {tensor.device}")
    return backend == "triton"
