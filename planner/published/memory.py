"""Peak memory of a published case: the package's memory model, with what the papers' engines hold beyond it."""

from __future__ import annotations

from ridgeplan.planner.published.case import MEMORY_UTILIZATION, Case
from ridgeplan.roofline import memory
from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.term_math import maximum

SCORE_BYTES = 2 + 4 + 2  # a score of eager attention in bf16, its softmax in fp32, and that in bf16


def peak_bytes(case: Case) -> float:
    """Peak of all GPUs together."""
    parts = case.estimate.memory
    workspace = maximum(_prefill_workspace(case), parts.decode_workspace)
    return float(case.row.gpus * (_resident(case) + workspace))


def required_bytes(case: Case) -> float:
    """Bytes that must be resident at once whatever the workspace: weights, draft weights and caches."""
    return float(case.row.gpus * _resident(case))


def fits(case: Case) -> bool:
    """Whether the peak is within the usable memory of the GPUs."""
    return peak_bytes(case) <= MEMORY_UTILIZATION * case.row.gpus * float(case.machine.memory_bytes)


def _resident(case: Case) -> Term:
    strategy, engine = case.strategy, case.engine
    tokens = strategy.context + strategy.new_tokens
    everything = memory.full_kv(case.shape, strategy.batch, tokens, case.machine.element_bytes)
    resident = case.estimate.memory.resident + engine.draft_cache * strategy.draft_ratio * everything
    kept = case.estimate.memory.kv
    return resident + engine.whole_cache * (everything - kept)


def _prefill_workspace(case: Case) -> Term:
    """The package's chunked workspace, or that of an engine that runs all prompts at once.

    The latter holds, for every token, three rows of the hidden width and three of the MLP's, the full KV of the layer
    that is being evicted, and under eager attention all scores of a layer.
    """
    if not case.engine.batched_prefill:
        return case.estimate.memory.prefill_workspace
    shape, strategy, element_bytes = case.shape, case.strategy, case.machine.element_bytes
    rows = strategy.batch * strategy.context
    activations = rows * 3 * (shape.hidden + shape.intermediate) * element_bytes
    evicting = 1 - strategy.kept_tokens / strategy.context
    layer_kv = evicting * rows * shape.kv_elements_per_token_per_layer * element_bytes
    scores = case.engine.materializes_scores * rows * strategy.context * shape.q_heads * SCORE_BYTES
    return activations + layer_kv + scores
