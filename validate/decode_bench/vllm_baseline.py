"""Measured vLLM times for comparison."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


def vllm_tpot_ms(device: str, model: str, context: int, batch: int) -> float | None:
    """vLLM's time per output token of plain bf16 decoding on that device; None if not measured."""
    for entry in _peers()["vllm"]:
        if (entry["device"], entry["model"]) == (device, model):
            return entry["tpot_ms"].get(f"{context}x{batch}")
    return None


@cache
def _peers() -> Any:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
