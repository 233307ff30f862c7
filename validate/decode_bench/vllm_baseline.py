"""Measured vLLM times for comparison."""

from __future__ import annotations

from ridgeplan.planner.export.measured import measured_rows


def vllm_tpot_ms(device: str, model: str, context: int, batch: int) -> float | None:
    """vLLM's time per output token of plain bf16 decoding on that device; None if not measured."""
    measured = measured_rows("vllm")
    if (device, model) != (measured.device, measured.model):
        return None
    wanted = (context, batch, "bf16", "auto")
    return next((row.tpot_ms for row in measured.rows if (row.context, row.batch, row.weights, row.kv) == wanted), None)
