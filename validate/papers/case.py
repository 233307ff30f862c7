"""A published row as the planner sees it: plan, strategy, machine, estimated figures and peak memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.lowering import dense_rates_of, strategy_of
from ridgeplan.roofline import memory
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.cost import Term, maximum, minimum
from ridgeplan.roofline.evaluate import Estimate, evaluate
from ridgeplan.roofline.latency import Machine, RateTerms, StrategyRates
from ridgeplan.roofline.memory import full_kv
from ridgeplan.roofline.ops import SCORE_BYTES
from ridgeplan.roofline.plan.plan import Placement, Plan, Weights, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import conditional_acceptance
from ridgeplan.roofline.strategy import Strategy
from ridgeplan.validate.papers.rows import PublishedEngine, PublishedRow, load_engine

MEMORY_UTILIZATION = 0.9  # vLLM's default: the rest is for the driver, the allocator's gaps and other processes

# Queries that score the prompt, of all methods (DapQ, section 5.1): H2O's would else be the whole prompt's, which the
# times to the first token of Table 4 rule out.
OBSERVATION_WINDOW = 32

# What a machine takes beyond bytes and FLOPs, besides its classes' own times.
HOST_AND_GAPS = (
    "pass_dispatch_s", "layer_dispatch_s", "prefill_layer_dispatch_s", "draft_gap_s", "target_gap_s", "round_s",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row on its engine. With several GPUs, `shape` is one GPU's share and `machine` one GPU."""

    row: PublishedRow
    engine: PublishedEngine
    shape: ModelShape
    machine: Machine
    strategy: Strategy
    rates: StrategyRates

    @classmethod
    def of(cls, row: PublishedRow) -> Case:
        """The case of a row that can be predicted. Raises ValueError for names that are unknown."""
        engine, shape = load_engine(row.engine), sharded(load_shape(row.model), row.gpus)
        machine, plan = _machine(engine, row.gpu, shape), plan_of(row, shape)
        strategy = strategy_of(plan, shape, machine, _acceptance(row, plan, shape))
        strategy = strategy.with_terms(
            eviction_scored_queries=minimum(strategy.eviction.scored_queries, OBSERVATION_WINDOW),
            draft_round_score_bytes=_ranked_bytes(plan, shape),
            draft_query_score_bytes=0,  # the collection is priced by the row's own number of queries
        )
        return cls(row, engine, shape, machine, strategy, dense_rates_of(plan, shape, machine))

    @cached_property
    def estimate(self) -> Estimate:
        """Latency and memory by the package's cost model."""
        usable = replace(self.machine, memory_bytes=MEMORY_UTILIZATION * self.machine.memory_bytes)
        return evaluate(self.shape, usable, self.strategy, self.rates)

    @property
    def tpot_s(self) -> Any:
        """Seconds per output token of a sequence; values fetched from the host overlap with the step."""
        return maximum(self.estimate.tpot_s, self.fetch_s)

    @property
    def fetch_s(self) -> float:
        """Seconds per step to fetch the selected tokens' values from the host, half of their KV."""
        if not self.engine.fetches_values or self.strategy.target.budget >= self.strategy.context:
            return 0.0
        kv_bytes = full_kv(self.shape, self.strategy.batch, self.strategy.target.budget, self.machine.element_bytes)
        return float(kv_bytes / 2 / self.machine.host_link_bytes_per_s)

    @property
    def request_s(self) -> float:
        """Seconds of a whole batch of requests: prefill and all new tokens."""
        return float(self.estimate.ttft_s + self.row.new_tokens * self.tpot_s)

    @cached_property
    def plain(self) -> Case:
        """Plain decoding of the same row on the baseline's engine, batch and context."""
        return _plain_case(_plain_row(self.row))

    def at_full_rates(self) -> Case:
        """The same with every kernel at the datasheet's rates and no launches: what bytes and FLOPs allow."""
        none: dict[str, Any] = dict.fromkeys(HOST_AND_GAPS, 0.0)
        full = dict.fromkeys(self.machine.rates, RateTerms(1.0, 1.0, 0.0))
        machine = replace(self.machine, rates=full, link_rates={}, **none)
        plan = plan_of(self.row, self.shape)
        return replace(self, machine=machine, rates=dense_rates_of(plan, self.shape, machine))


@cache
def _machine(engine: PublishedEngine, gpu: str, shape: ModelShape) -> Machine:
    """The engine on its GPU. Its ranking of tokens is costed as a stream, as the papers' kernels are not known."""
    machine = Machine.of(engine.profile(load_hardware(gpu), shape))
    streamed = RateTerms(machine.rates["attention"].bandwidth_utilization, 1.0, 0.0)
    return replace(machine, rates={**machine.rates, "top_k": streamed})


def sharded(shape: ModelShape, gpus: int) -> ModelShape:
    """One GPU's share under tensor parallelism: heads and MLPs are cut, embeddings and the head are replicated.

    All-reduces of a decode step's few kilobytes take about 10 us each (nccl-tests, two GPUs over PCIe), 1 to 2% of
    these steps, and are left out.
    """
    return replace(
        shape, q_heads=shape.q_heads // gpus, kv_heads=shape.kv_heads // gpus, intermediate=shape.intermediate // gpus
    )


def _plain_row(row: PublishedRow) -> PublishedRow:
    """The plain decoding that a row's ratios refer to, without the fields that tell rows of one workload apart."""
    plain = PublishedRow(case="plain", method="plain", model=row.model, gpu=row.gpu, gpus=row.gpus, cells={})
    return replace(
        plain,
        context=row.baseline_context or row.context,
        new_tokens=row.new_tokens,
        batch=row.baseline_batch or row.batch,
        engine=row.baseline or row.engine,
        weight_bits=row.weight_bits,
    )


@cache
def _plain_case(row: PublishedRow) -> Case:
    return Case.of(row)


def plan_of(row: PublishedRow, shape: ModelShape) -> Plan:
    """The row's preset with its hyperparameters."""
    plan = preset(row.preset, Workload(shape.name, row.gpu, row.context, row.new_tokens, row.batch))
    speculation = replace(plan.speculation, **_nonzero(gamma=row.gamma))
    if row.ratio:
        speculation = speculation.with_ratio(row.ratio)
    eviction = replace(plan.eviction, **_nonzero(budget=row.budget)) if plan.eviction.active else plan.eviction
    placement = Placement(True, plan.attention.max_tokens(row.new_tokens)) if row.offload else plan.placement
    weights = plan.weights if row.weight_bits == 16 else Weights(row.weight_bits, row.weight_bits)
    return replace(plan, weights=weights, speculation=speculation, eviction=eviction, placement=placement)


def _ranked_bytes(plan: Plan, shape: ModelShape) -> float:
    """Bytes that choosing once a round moves per cached token in the papers' systems.

    A layer's fp32 scores, a row for each query that is collected, are written once and read twice by their top-k.
    """
    rows = {"specattn": 2, "specextend": 1}.get(plan.speculation.selection.name, 0)
    return 3 * SCORE_BYTES * rows * shape.layers


def _nonzero(**values: Any) -> Mapping[str, Any]:
    return {name: value for name, value in values.items() if value}


def _acceptance(row: PublishedRow, plan: Plan, shape: ModelShape) -> float:
    """The published acceptance where there is one, as conditional acceptance; else the planner's estimate."""
    if not plan.speculation.active:
        return 1.0
    if row.accepted_share:
        return conditional_acceptance(row.accepted_share, row.gamma)
    return AcceptanceModel.for_model(shape, row.context).of(plan).best


EAGER_SCORE_BYTES = 2 + 4 + 2  # a score of eager attention in bf16, its softmax in fp32, and that in bf16


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
    resident = case.estimate.memory.resident + engine.draft_cache * strategy.draft.ratio * everything
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
    scores = case.engine.materializes_scores * rows * strategy.context * shape.q_heads * EAGER_SCORE_BYTES
    return activations + layer_kv + scores
