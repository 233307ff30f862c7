"""The quantities that published cells hold: how each is predicted, and whether bytes bound it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from ridgeplan.roofline import memory
from ridgeplan.roofline.evaluate import evaluate, pass_ops
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.latency import GIB
from ridgeplan.roofline.round import draft_rates, target_rates
from ridgeplan.validate.papers.case import MEMORY_UTILIZATION, Case, peak_bytes, required_bytes
from ridgeplan.validate.papers.specontext_memory import SpeContextMemory

LOGIT_BYTES = 2  # SpecAttn, section 4: logits are cast to bf16


class Bound(StrEnum):
    """What bytes say about a quantity."""

    LOWER = "least"  # a time or a size: nothing smaller is possible
    UPPER = "most"  # a rate: nothing larger is possible
    NONE = "none"


@dataclass(frozen=True)
class Metric:
    """A quantity of a case; its name ends with its unit.

    limit: the bound itself; by default the quantity with every kernel at the datasheet's rates. whole_model: the model
    must fit for it. step_s: the seconds per token of a sequence that a published value means, for times and rates.
    """

    of: Callable[[Case], float]
    bound: Bound = Bound.NONE
    limit: Callable[[Case], float] | None = None
    whole_model: bool = True
    step_s: Callable[[Case, float], float] | None = None

    def bytes_limit(self, case: Case) -> float:
        """The least or most that bytes and FLOPs allow."""
        return self.limit(case) if self.limit else self.of(case.at_full_rates())


def tokens_per_s(case: Case) -> float:
    """Tokens per second of the batch while decoding."""
    return case.row.batch / float(case.tpot_s)


def speedup(case: Case) -> float:
    """Plain decoding's time per token over the plan's."""
    return float(case.plain.tpot_s / case.tpot_s)


def request_tokens_per_s(case: Case) -> float:
    """New tokens per second of a batch of whole requests, prefill included."""
    return case.row.batch * case.row.new_tokens / case.request_s


def request_step_s(case: Case, published: float) -> float:
    """Seconds per token of a sequence that a published rate of whole requests leaves after the predicted prefill."""
    return case.row.batch / published - float(case.estimate.ttft_s) / case.row.new_tokens


def attention_ms(case: Case) -> float:
    """One layer's attention in the target's pass."""
    return 1e3 * _attention_s(case, "target")


def draft_attention_ms(case: Case) -> float:
    """One layer's attention in a draft step."""
    return 1e3 * _attention_s(case, "draft")


def unselected(case: Case) -> Case:
    """The same where choosing tokens costs nothing."""
    free = case.strategy.with_terms(
        draft_scored_keys=0, draft_scans_two_bit=0, draft_score_bytes=0, draft_round_score_bytes=0
    )
    return replace(case, strategy=free)


def selection_s(case: Case) -> float:
    """Seconds that choosing tokens adds to a round."""
    return float(case.estimate.round.total_s + _collection_s(case) - unselected(case).estimate.round.total_s)


def selection_overhead(case: Case) -> float:
    """What choosing tokens adds to a round, relative to the round without it (SpecAttn, Fig 10b)."""
    return selection_s(case) / float(unselected(case).estimate.round.total_s)


def _collection_s(case: Case) -> float:
    """Seconds to write and read the logits of `queries` rows, of all heads of layers that attend to everything.

    The paper's kernel dumps them per query head (SpecAttn, section 4): 2 rows of SpecAttn, gamma + 1 of SpecExtend.
    """
    layers = case.shape.layers - case.shape.window_layers
    logits = case.row.queries * case.row.batch * case.row.context * case.shape.q_heads * layers
    return float(case.row.queries > 1) * 2 * LOGIT_BYTES * logits / float(case.machine.bandwidth_bytes_per_s)


def logits_overhead(case: Case) -> float:
    """Writing the logits of `queries` rows of all heads, over reading the KV cache (SpecAttn, Fig 6)."""
    kv_bytes = case.shape.kv_elements_per_token_per_layer * case.machine.element_bytes
    return case.row.queries * case.shape.q_heads * LOGIT_BYTES / kv_bytes


def tpot_s_of_gammas(case: Case, gammas: np.ndarray) -> np.ndarray:
    """Seconds per token with other gammas, at the same acceptance."""
    return evaluate(case.shape, case.machine, replace(case.strategy, gamma=gammas), case.rates).tpot_s


def best_gamma(case: Case) -> float:
    """The gamma of 1 to 15 with the least time per token."""
    gammas = np.arange(1, MAX_GAMMA + 1)
    return float(gammas[np.argmin(tpot_s_of_gammas(case, gammas))])


def max_requests(case: Case) -> float:
    """Requests whose KV fits beside the weights in the usable memory."""
    weights = memory.weight_memory(case.shape, case.strategy.target.weight_bytes, case.machine.element_bytes)
    return float((MEMORY_UTILIZATION * case.machine.memory_bytes - weights) // _kv_bytes(case))


def cliff_loss(case: Case) -> float:
    """Loss of throughput where KV of one more token makes an engine read the whole cache from the host."""
    at_longest = replace(case, strategy=replace(case.strategy, context=longest_on_gpu(case)))
    return float(1 - at_longest.tpot_s / offloaded_tpot_s(at_longest))


def longest_on_gpu(case: Case) -> int:
    """S_0 of Algorithm 1 (SpeContext, Eq 6), with the model's weights only and this package's reading of Eq 6."""
    weights = memory.weight_memory(case.shape, case.strategy.target.weight_bytes, case.machine.element_bytes)
    model = SpeContextMemory(weights, 0, case.shape.layers, case.shape.kv_heads, case.shape.head_dim, case.row.batch, 0)
    return model.thresholds(float(case.machine.memory_bytes))[0]


def offloaded_tpot_s(case: Case) -> float:
    """Seconds per token where the whole KV cache is on the host, and each step reads it from there."""
    return float(case.tpot_s + _kv_bytes(case) / case.machine.host_link_bytes_per_s)


def _kv_bytes(case: Case) -> float:
    return float(memory.full_kv(case.shape, case.row.batch, case.strategy.context, case.machine.element_bytes))


def _attention_s(case: Case, part: str) -> float:
    rates = {"target": target_rates, "draft": draft_rates}[part](case.shape, case.machine, case.strategy, case.rates)
    (op,) = (op for op in pass_ops(case.shape, case.machine, case.strategy)[part] if op.name == "attention")
    return float(case.machine.seconds(op.cost, case.machine.rates_for(op, rates), op.width, op.depth, op.tiles))


METRICS = {
    # Milliseconds of a step, or of a round by its tokens.
    "step_ms": Metric(
        lambda case: 1e3 * float(case.tpot_s), Bound.LOWER, step_s=lambda case, published: published / 1e3
    ),
    "tokens_per_s": Metric(tokens_per_s, Bound.UPPER, step_s=lambda case, published: case.row.batch / published),
    "request_tokens_per_s": Metric(request_tokens_per_s, Bound.UPPER, step_s=request_step_s),
    "speedup": Metric(speedup),
    # Throughput of whole requests over the baseline's.
    "request_speedup": Metric(lambda case: request_tokens_per_s(case) / request_tokens_per_s(case.plain)),
    # Time per token over that at the baseline's context.
    "slowdown": Metric(lambda case: float(case.tpot_s / case.plain.tpot_s)),
    # Seconds to the first token.
    "ttft_s": Metric(lambda case: float(case.estimate.ttft_s), Bound.LOWER),
    # Peak memory of all GPUs.
    "peak_gib": Metric(lambda case: peak_bytes(case) / GIB, Bound.LOWER, lambda case: required_bytes(case) / GIB),
    "attention_ms": Metric(attention_ms, Bound.LOWER, whole_model=False),
    "draft_attention_ms": Metric(draft_attention_ms, Bound.LOWER, whole_model=False),
    # Plain decoding's attention over that of the target's pass.
    "attention_speedup": Metric(lambda case: attention_ms(case.plain) / attention_ms(case), whole_model=False),
    # Plain decoding's attention over that of a draft step.
    "draft_attention_speedup": Metric(
        lambda case: attention_ms(case.plain) / draft_attention_ms(case), whole_model=False
    ),
    # A draft step over a plain step.
    "draft_share": Metric(lambda case: float(case.estimate.round.draft_s / case.plain.tpot_s)),
    "selection_overhead": Metric(selection_overhead),
    "logits_overhead": Metric(logits_overhead, whole_model=False),
    "best_gamma": Metric(best_gamma),
    # The KV cache at the row's context.
    "kv_gib": Metric(lambda case: float(_kv_bytes(case)) / GIB, whole_model=False),
    # Reading the whole KV cache once at the datasheet's bandwidth.
    "kv_read_ms": Metric(
        lambda case: 1e3 * float(_kv_bytes(case) / case.machine.bandwidth_bytes_per_s), whole_model=False
    ),
    "max_requests": Metric(max_requests, whole_model=False),
    "cliff_loss": Metric(cliff_loss, whole_model=False),
}
