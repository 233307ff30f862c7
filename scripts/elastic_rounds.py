"""Rounds of a target that reads a selection of layers on the host, at a set overlap of adjacent steps.

How many tokens a step chooses that the last one had not decides what is loaded from the host. Random weights know
nothing of it, so it is set: the policy chooses as always, and as many other tokens are loaded and read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ridgeplan.planner.prediction import predict
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.execution import quantized_groups
from ridgeplan.roofline.plan.plan import Placement, Plan
from ridgeplan.roofline.plan.policies.selections import RetrievalHead
from ridgeplan.roofline.strategy import ELASTIC_OVERLAP
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.offload.slots import ChosenTokens, LoadsAhead
from ridgeplan.runtime.policies import SELECTORS
from ridgeplan.runtime.policies.base import SparseSelector
from ridgeplan.validate.random_model import RandomModel, fill, measured_round
from ridgeplan.validate.timing import captured


def chosen_tokens(plan: Plan) -> int:
    """Tokens that a step chooses at the plan's context; the rest of its budget are recent ones."""
    context, group = plan.workload.context, plan.kv.group
    return plan.attention.budget - (context - quantized_groups(context, group) * group)


class DriftingCache(Cache):
    """Of layers on the host, a step reads a run of tokens, or pages, of a random order, and the next one a later run.

    It is filled with random prompts of the plan's context. All layers choose alike, once a pass of one query.
    """

    def __init__(self, model: RandomModel, plan: Plan) -> None:
        super().__init__(model.shape, model.cache_config(plan), model.device, model.weights.embedding.dtype)
        fill(self, plan.workload.context)
        self._old_tokens = quantized_groups(plan.workload.context, self.config.group) * self.config.group
        self._read = chosen_tokens(plan)
        self._orders: dict[tuple[int, int, int], UnitOrder] = {}
        self._moves = torch.zeros(1, dtype=torch.int64, device=self.lengths.device)
        self._chosen: Tensor | None = None

    def drift(self, units: int) -> None:
        """From now on each step chooses so many tokens, or pages, that the one before had not."""
        self._moves.fill_(units)

    def load_chosen(self, layer: int, choice: ChosenTokens, ahead: LoadsAhead | None = None) -> Tensor:
        if layer >= self.first_on_host and ahead is None:
            choice = self._other(layer, choice)
        return super().load_chosen(layer, choice, ahead)

    def begin_loading(self, choose: Callable[[int], ChosenTokens], shared_across_layers: bool) -> LoadsAhead | None:
        return super().begin_loading(lambda layer: self._other(layer, choose(layer)), shared_across_layers)

    def _other(self, layer: int, choice: ChosenTokens) -> ChosenTokens:
        index, count, page = choice
        if layer == self.first_on_host:
            self._chosen = self._unit_order(index.shape[1], index.shape[2], page).next(self._moves)
        assert self._chosen is not None, "layers come in order"
        return self._chosen[: len(index)], count, page

    def _unit_order(self, sets: int, width: int, page: int) -> UnitOrder:
        kind = sets, width, page
        if kind not in self._orders:
            sizes, device = (self.config.batch, sets, self._old_tokens // page), self.lengths.device
            with torch.inference_mode(False):  # it outlives this pass
                drawn = torch.rand(sizes, generator=torch.Generator(device).manual_seed(0), device=device)
                self._orders[kind] = UnitOrder(
                    drawn.argsort(-1).int(), torch.arange(width, device=device), self._read // page
                )
        return self._orders[kind]


@dataclass(frozen=True, eq=False)
class UnitOrder:
    """order: the old units of every row and set in random order, int32 [batch, sets, units]. places: int64 [width], of
    those that are chosen, of which the first `read` are read.
    """

    order: Tensor
    places: Tensor
    read: int

    def next(self, moves: Tensor) -> Tensor:
        """The units of the next step, int32 [batch, sets, width], `moves` places further; int64 [1].

        Those that are read ascend, as choices do, so that what lies together is loaded together.
        """
        self.places.add_(moves).remainder_(self.order.shape[2])
        units = self.order.index_select(2, self.places)
        return torch.cat([units[..., : self.read].sort(-1).values, units[..., self.read :]], dim=-1)


OVERLAPS = (ELASTIC_OVERLAP, 0.8)
REPEATS = 7


@torch.inference_mode()
def elastic_round(model: RandomModel, plan: Plan, profile: Profile) -> dict[str, Any]:
    """A round of `plan` beside its prediction, with the share of the loads' time that it hides.

    Without elastic loading every step loads all it chooses; with it, what OVERLAPS leave. hidden_share: of the time
    that the loads take alone, what a round with them is not slower than one that finds everything loaded.
    """
    overlaps = OVERLAPS if plan.placement.elastic else (0.0,)
    predicted = [predict(plan, model.shape, profile, overlap) for overlap in overlaps]
    cache = DriftingCache(model, plan)
    chosen = chosen_tokens(plan)
    figures: dict[str, Any] = {
        "host_layers": predicted[0].offloaded_layers,
        "predicted_tpot_ms": predicted[0].best.tpot_ms,
        "predicted_peak_gb": predicted[0].best.peak_memory_bytes / 1e9,
    }
    nothing_ms = 1e3 * measured_round(model, plan, cache).total_s if plan.placement.elastic else None
    for overlap, at_overlap in zip(overlaps, predicted, strict=True):
        cache.drift(round((1 - overlap) * chosen))
        round_ms = 1e3 * measured_round(model, plan, cache).total_s
        loads_ms, moved = loading_ms(cache, plan, chosen)
        hidden = None if nothing_ms is None else 1 - (round_ms - nothing_ms) / loads_ms
        figures[f"overlap {overlap:g}"] = {
            "tpot_ms": round_ms,
            "predicted_tpot_ms": at_overlap.best.tpot_ms,
            "loads_alone_ms": loads_ms,
            "loaded_mb": moved / 1e6,
            "link_gb_s": moved / loads_ms / 1e6,
            "hidden_share": hidden,
        }
    return {**figures, "round_that_loads_nothing_ms": nothing_ms}


@torch.inference_mode()
def round_without_limit_ms(model: RandomModel, plan: Plan) -> float | None:
    """The same round with all KV on the device, where that fits."""
    roomy = replace(plan, placement=Placement())
    return 1e3 * measured_round(model, roomy).total_s if model.fitting([roomy]) else None


def loading_ms(cache: Cache, plan: Plan, chosen: int) -> tuple[float, float]:
    """Milliseconds of a step's loads in all layers on the host, without any computation, and the bytes they move."""
    device = cache.lengths.device
    shared = plan.attention.selection == RetrievalHead(level="batch")  # one set for all KV heads
    sets = 1 if shared else cache.kv_heads
    index = torch.zeros(cache.rows, sets, plan.attention.budget, dtype=torch.int32, device=device)
    count = torch.full(index.shape[:2], chosen, dtype=torch.int32, device=device)

    selector, choice = SELECTORS[plan.attention.selection.name], (index, count, 1)
    assert issubclass(selector, SparseSelector), "a sparse target has one"

    def once() -> None:
        ahead = (
            cache.begin_loading(lambda _: choice, selector.shared_across_layers)
            if selector.selected_before_pass
            else None
        )
        for layer in range(cache.first_on_host, cache.layers):
            cache.load_chosen(layer, choice, ahead)

    once()
    run = captured(once).replay if device.type == "cuda" else once
    before, seconds = cache.loads()[1], [_seconds(run, device) for _ in range(REPEATS)]
    store = cache.stores[-1].keys
    token_bytes = 2 * cache.kv_heads // sets * store.shape[4] * store.element_size()
    moved = (cache.loads()[1] - before) / REPEATS * token_bytes
    return 1e3 * statistics.median(seconds), moved


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
