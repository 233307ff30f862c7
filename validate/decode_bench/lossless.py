"""A small model as it is, on a real text: greedy tokens with half of its layers on the host, and without a limit.

Plans whose target reads everything must generate the same tokens, wherever its KV lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ridgeplan.planner.axes.offload import HostPart
from ridgeplan.planner.capacity import offloaded_layers, peak_bytes
from ridgeplan.planner.plan import KVCache, KVFormat, Placement, Plan, Workload
from ridgeplan.planner.presets import preset
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.device import Device
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.model.source import model_source
from ridgeplan.validate.decode_bench.results_file import Rows, free
from ridgeplan.validate.prompts import prompt_batch

STEPS = 1000  # of a limit on memory, as shares of what a plan takes without one


@dataclass(frozen=True)
class RealText:
    """A model, prompts from a text, and where they run. new_tokens: generated after each of `batch` prompts."""

    model: str
    shape: ModelShape
    text: str | None
    device: Device
    context: int = 16384
    batch: int = 4
    new_tokens: int = 96

    def rows(self) -> Rows:
        """Each plan with half of the layers on the host beside the same without a limit."""
        prompts = prompt_batch(load_tokenizer(model_source(self.model)), self.context, self.batch, text=self.text)
        return {name: partial(self._compared, plan, prompts) for name, plan in self.plans().items()}

    def plans(self) -> dict[str, Plan]:
        """Plans whose target reads everything, without a limit."""
        workload = Workload(self.shape.name, "here", self.context, self.new_tokens, self.batch)
        whole, lower = Placement(True, self.context // 8), Placement(True, part=HostPart.LOWER)
        drafting = preset("quantspec-kv", workload)
        return {
            "bf16": Plan(workload, placement=whole),
            "int8": Plan(workload, kv=KVCache(KVFormat.INT8), placement=whole),
            "int8, leaving one by one": Plan(
                workload, kv=KVCache(KVFormat.INT8), placement=replace(whole, adaptive=True)
            ),
            "8-bit codes, drafts, whole layers": replace(drafting, placement=whole),
            "8-bit codes, drafts, lower codes": replace(drafting, placement=lower),
        }

    def limited(self, plan: Plan) -> Plan:
        """The plan with the most memory with which half of its layers must leave."""
        peak = peak_bytes(plan, self.shape, self.device)
        for step in range(STEPS):
            memory_bytes = int(peak * (STEPS - step) / STEPS)
            placed = replace(plan, placement=replace(plan.placement, memory_bytes=memory_bytes))
            if offloaded_layers(placed, self.shape, self.device)[0] >= self.shape.layers // 2:
                return placed
        raise ValueError("no limit offloads half of the layers")

    def _compared(self, plan: Plan, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Figures of both, and how many tokens of each row agree from the first one on."""
        roomy = load(plan, self.model, device=self._kind)
        expected = _generated(roomy, prompts, self.new_tokens)
        found = _generated(
            load(self.limited(plan), self.model, device=self._kind, weights=roomy.weights), prompts, self.new_tokens
        )
        free()
        tokens = found.pop("tokens"), expected.pop("tokens")
        agree = [_agreeing(*rows) for rows in zip(*tokens, strict=True)]
        return {"equal": tokens[0] == tokens[1], "agreeing_tokens": agree, "limited": found, "unlimited": expected}

    @property
    def _kind(self) -> str:
        return "cuda" if self.device.asynchronous and torch.cuda.is_available() else "cpu"


def _generated(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
    """Tokens of a generation and its figures; the engine is closed."""
    tokens, found = engine.generate(prompts, new_tokens).tokens, engine.statistics
    assert engine.cache is not None, "it is open"
    layers = engine.cache.layers - engine.cache.first_on_host
    engine.close()
    figures = {name: getattr(found, name) for name in ("tpot_ms", "tokens_per_round", "peak_memory_bytes")}
    return {"tokens": tokens, "layers_on_host": layers, **figures}


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens of both up to the first that differs."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
