"""Rounds of a target that reads a selection of layers on the host, at a set overlap of adjacent steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ridgeplan.planner.axes.draft_selection import RetrievalHead
from ridgeplan.planner.plan import Placement, Plan
from ridgeplan.planner.prediction import predict
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.strategy import ELASTIC_OVERLAP
from ridgeplan.runtime.drafting.policies import POLICIES
from ridgeplan.runtime.drafting.policies.sparse import SparsePolicy
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.validate.decode_bench.drifting_cache import DriftingCache, chosen_tokens
from ridgeplan.validate.random_rounds import RandomModel, measured_round
from ridgeplan.validate.timing import captured

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
    found: dict[str, Any] = {
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
        found[f"overlap {overlap:g}"] = {
            "tpot_ms": round_ms,
            "predicted_tpot_ms": at_overlap.best.tpot_ms,
            "loads_alone_ms": loads_ms,
            "loaded_mb": moved / 1e6,
            "link_gb_s": moved / loads_ms / 1e6,
            "hidden_share": hidden,
        }
    return {**found, "round_that_loads_nothing_ms": nothing_ms}


@torch.inference_mode()
def round_without_limit_ms(model: RandomModel, plan: Plan) -> float | None:
    """The same round with all KV on the device, where that fits."""
    roomy = replace(plan, placement=Placement())
    return 1e3 * measured_round(model, roomy).total_s if model.fits(roomy) else None


def loading_ms(cache: Cache, plan: Plan, chosen: int) -> tuple[float, float]:
    """Milliseconds of a step's loads in all layers on the host, without any computation, and the bytes they move."""
    device = cache.lengths.device
    shared = plan.attention.selection == RetrievalHead(level="batch")  # one set for all KV heads
    sets = 1 if shared else cache.kv_heads
    index = torch.zeros(cache.rows, sets, plan.attention.budget, dtype=torch.int32, device=device)
    count = torch.full(index.shape[:2], chosen, dtype=torch.int32, device=device)

    policy, choice = POLICIES[plan.attention.selection.name], (index, count, 1)
    assert isinstance(policy, type) and issubclass(policy, SparsePolicy), "a target's selection is a class"

    def once() -> None:
        ahead = cache.begin_loading(lambda _: choice, policy.alike) if policy.known_ahead else None
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
