"""Engines of a large shape that generate what a small real model does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ridgeplan.planner.plan import Plan
from ridgeplan.roofline.shapes import ModelShape
from ridgeplan.runtime.checkpoint import load_config, load_tokenizer, load_weights, model_source
from ridgeplan.runtime.config import DecoderConfig, decoder_config
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.memory import MemoryMeter, require_memory
from ridgeplan.runtime.weights import DecoderWeights
from ridgeplan.validate.inflation import inflated_config, inflated_shape, inflated_weights


@dataclass(frozen=True, eq=False)
class InflatedModel:
    """A small model's function in a large shape, with the small one's context limit.

    hub: the small model's configuration.
    """

    source: str
    hub: Any
    tokenizer: Any
    shape: ModelShape
    weights: DecoderWeights
    device: torch.device

    @classmethod
    def load(cls, model: str, shape: ModelShape, device: str = "cuda") -> InflatedModel:
        """`model`, as `runtime.load` takes it, inside `shape`; bfloat16 on CUDA, else float32.

        Raises ModelError, or InflationError where it does not fit.
        """
        place = torch.device(device)
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
        source = model_source(model)
        hub = load_config(source)
        config = decoder_config(hub)
        small = load_weights(source, config, place, dtype)
        weights = inflated_weights(config, small, shape)
        limited = replace(inflated_shape(config, shape), max_context=config.max_context)
        return cls(source, hub, load_tokenizer(source), limited, weights, place)

    def config(self, yarn_factor: float) -> DecoderConfig:
        """The decoder, its positions stretched by YaRN."""
        return inflated_config(decoder_config(self.hub, yarn_factor), self.shape)

    def engine(self, plan: Plan, draft_weights: DecoderWeights | None = None) -> Engine:
        """An engine of `plan`. draft_weights: another engine's, if its drafts have the same format.

        Raises WorkloadError where the plan does not fit into memory.
        """
        held = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        require_memory(plan, self.shape, self.device, self.weights.embedding.dtype, held)
        meter = MemoryMeter(self.device, self.weights.bytes)
        config = self.config(plan.workload.yarn_factor)
        return Engine(plan, self.source, config, self.weights, self.device, meter, draft_weights)
