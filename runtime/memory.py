"""Peak memory of an engine: on CUDA what torch allocated, on Linux the process's resident set."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class MemoryMeter:
    """Peak bytes since construction, or since the last `restart`, above what the process held before.

    `shared_bytes` of the present memory, weights that were loaded earlier, count as the engine's.
    """

    def __init__(self, device: torch.device, shared_bytes: int = 0) -> None:
        self._device = device
        self._before_bytes = (self._present() or 0) - shared_bytes
        self.restart()

    def restart(self) -> None:
        """Forgets the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _CLEAR.exists():
            try:
                _CLEAR.write_text("5")  # resets VmHWM to the present resident set (proc(5))
            except PermissionError:
                return  # the peak then spans the whole process: too high rather than missing

    def peak_bytes(self) -> int | None:
        """None where the platform does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before_bytes
        peak = _status_bytes("VmHWM")
        return None if peak is None else max(0, peak - self._before_bytes)

    def _present(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
