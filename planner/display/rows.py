"""The columns that describe a predicted plan in every table of plans."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ridgeplan.planner.interface.quantities import size_text, time_text
from ridgeplan.planner.plan import Plan
from ridgeplan.planner.prediction import Prediction
from ridgeplan.planner.quality import quality_of


def plan_row(plan: Plan, name: str, predicted: Prediction) -> dict[str, Any]:
    """Flat values of one plan. TTFT and tokens/s are the whole batch's."""
    workload = plan.workload
    return {
        "model": workload.model, "gpu": workload.hardware, "context": workload.context, "batch": workload.batch,
        "plan": name, "gamma": predicted.gamma, **asdict(predicted.best), "tpot_low_ms": predicted.low.tpot_ms,
        "tpot_high_ms": predicted.high.tpot_ms, "speedup": predicted.speedup, "quality": str(quality_of(plan)),
        "source": predicted.source,
    }  # fmt: skip


def plan_text(plan: Plan, name: str, predicted: Prediction) -> str:
    """A plan's headline figures in one line."""
    workload, best = plan.workload, predicted.best
    return (
        f"{name} for {workload.model} on {workload.hardware}, {workload.context} tokens, batch {workload.batch}: "
        f"{time_text(best.tpot_ms)} per token, {predicted.speedup:.2f}x plain decoding, "
        f"{size_text(best.peak_memory_bytes)}, {predicted.source}"
    )
