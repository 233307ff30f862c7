"""CUDA C++ sources, compiled at first use by the NVRTC that comes with torch."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def joined(wing: str, *names: str) -> str:
    """The named files of `wing`/csrc as one source, which is what NVRTC takes."""
    csrc = Path(__file__).parents[1] / wing / "csrc"
    return "\n".join((csrc / name).read_text(encoding="utf-8") for name in names)


def compiled(
    source: str, entry: str, options: Sequence[str], device: torch.device, *, shared_bytes: int = 0, failing: str
) -> Any | None:
    """The kernel `entry`, launchable with up to `shared_bytes` of dynamic shared memory.

    None where it does not compile or load, after a warning that begins with `failing`: what that means for users.
    """
    try:
        with torch.cuda.device(device):
            kernel = torch.cuda._compile_kernel(source, entry, nvcc_options=list(options))
            if shared_bytes:
                kernel.set_shared_memory_config(shared_bytes)
    except (RuntimeError, OSError, AttributeError) as error:
        warnings.warn(f"{failing}: {error}", stacklevel=2)
        return None
    return kernel
