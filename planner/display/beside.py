"""In words, what of a prediction its operations do not show: layers on the host, and time beside the operations."""

from __future__ import annotations

from ridgeplan.planner.interface.quantities import size_text, time_text
from ridgeplan.planner.plan import Plan
from ridgeplan.planner.prediction import Prediction

LEAST_SHARE = 0.005  # of a target step that is worth a word


def on_host_text(predicted: Prediction, limit_bytes: float | None = None) -> str:
    """How many layers are on the host, and what they take of it."""
    layers = "1 layer" if predicted.offloaded_layers == 1 else f"{predicted.offloaded_layers} layers"
    limit = f" of {size_text(limit_bytes)} there" if limit_bytes is not None else " there"
    return f"KV of {layers} is on the host, {size_text(predicted.host_bytes)}{limit}"


def beside_text(plan: Plan, predicted: Prediction) -> str | None:
    """What a target step takes beside its operations, and for what; None for next to nothing."""
    if predicted.beside_ms < LEAST_SHARE * predicted.verify_ms:
        return None
    causes = (("choosing and gathering tokens", plan.attention.active), ("layers on the host", predicted.host_bytes))
    named = " and ".join(cause for cause, applies in causes if applies)
    return f"{time_text(predicted.beside_ms)} for {named or 'gathering tokens'}"
