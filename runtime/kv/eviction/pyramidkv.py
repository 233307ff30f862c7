"""PyramidKV (Cai et al. 2024, section 4): SnapKV's scores; the planner's file has each layer's budget."""

from __future__ import annotations

from ridgeplan.runtime.kv.eviction.snapkv import SnapKV


class PyramidKV(SnapKV):
    """See `EvictionPolicy`."""
