"""Free memory of the host."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """Bytes that can be allocated without swapping, as Linux estimates them; None on other systems."""
    lines = meminfo.read_text(encoding="utf-8").splitlines() if meminfo.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
