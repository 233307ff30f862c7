"""CUDA C++ sources of this package, compiled at first use by the NVRTC that comes with torch."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ridgeplan.kernels.device.kernel_params import KernelParams, assertions

SOURCES = Path(__file__).parents[1]


def program(source: str, params: type[KernelParams]) -> str:
    """The translation unit of a kernel: its file, relative to this package, and assertions on it."""
    return f'#include "{source}"\n{assertions(params)}\n'


def include_options() -> list[str]:
    """Compiler options with which `program` finds its file; all other #include lines are relative to the file."""
    return [f"-I{SOURCES}"]


def compile_kernel(
    program: str, entry: str, options: Sequence[str], device: torch.device, *, shared_bytes: int = 0, fallback: str
) -> Any | None:
    """The kernel `entry`, which may be launched with up to `shared_bytes` of dynamic shared memory.

    None if it does not compile or load, after a warning that begins with `fallback`, which says what runs instead.
    """
    try:
        with torch.cuda.device(device):
            kernel = torch.cuda._compile_kernel(program, entry, nvcc_options=[*include_options(), *options])
            if shared_bytes:
                kernel.set_shared_memory_config(shared_bytes)
    except (RuntimeError, OSError, AttributeError) as error:
        warnings.warn(f"{fallback}: {error}", stacklevel=2)
        return None
    return kernel
