"""The policies and methods that studies compare, by name, with the hyperparameters that differ from a plan's."""

from __future__ import annotations

from typing import Any

from ridgeplan.roofline.plan.plan import DraftCodes

HINDSIGHT = "hindsight"  # SpecAttn's Eq 2 by the round's own verification, which no draft can know
WEIGHTS = "specattn-weights"
# Of `study drafts`: a plan's selection, and the hyperparameters that differ from it.
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "streamingllm": ("streamingllm", {}), "snapkv": ("snapkv", {}), "specextend": ("specextend", {"page": 1}),
    "specextend-last": ("specextend", {"page": 1, "rows": "last"}),
    "specattn": ("specattn", {}), "specattn-eq2": ("specattn", {"rows": "all"}),
    "specattn-accepted": ("specattn", {"rows": "accepted"}), WEIGHTS: (WEIGHTS, {}),
    "specattn-heads": (WEIGHTS, {"per_kv_head": True}), "specattn-logits": (WEIGHTS, {"score": "logits"}),
    "specattn-all": (WEIGHTS, {"rows": "all"}),
    HINDSIGHT: (WEIGHTS, {"rows": "all", "per_kv_head": True}), "quest": ("quest", {}),
    "progressive": ("progressive", {}), "oracle": ("oracle", {}), "retrieval-head": ("retrieval-head", {}),
}  # fmt: skip
# How its rounds go on. In all but the last the model generates, and rejected drafts are dropped as in an engine. The
# last takes a text's own tokens as drafts, all of which count as accepted.
SAMPLED, GREEDY, TEACHER_FORCED = VERIFICATIONS = ("sampled", "greedy", "teacher-forced")
FORMATS = {"bf16": (DraftCodes.FULL, False), "kv4": (DraftCodes.UPPER, False), "w4kv4": (DraftCodes.UPPER, True)}

RANDOM = "random"
# Of `study retrieval`: the names of the selections.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "retrieval-head": ("retrieval-head", {}), "retrieval-batch": ("retrieval-head", {"level": "batch"}),
    "progressive": ("progressive", {}), "quest": ("quest", {}), "clusterkv": ("clusterkv", {}),
    "shadowkv": ("shadowkv", {}), "streamingllm": ("streamingllm", {}), RANDOM: ("streamingllm", {}),
}  # fmt: skip
