"""Engines of one model, one after another, that share its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.model.weights import DecoderWeights
from ridgeplan.runtime.retrieval.head import Head, load_head, shipped_head


@dataclass(eq=False)
class SharedWeights:
    """Loads engines of a model that is loaded once per weight format: a safetensors folder, a GGUF file or a hub id.

    device, dtype: as for `ridgeplan.runtime.load`. calibration: token ids that quantized weights are fitted to.
    """

    model: str
    device: str | None = None
    calibration: Sequence[int] | None = None
    weights: DecoderWeights | None = None
    format: tuple[int, int | None, bool, bool] | None = None
    dtype: torch.dtype | None = None

    @contextmanager
    def engine(self, plan: Plan, draft_weights: DecoderWeights | None = None) -> Iterator[Engine]:
        """An engine of `plan`, closed after the body. Raises what `ridgeplan.runtime.load` raises.

        draft_weights: those of an earlier engine whose plan has the same weights.
        """
        calibration = self.calibration if plan.weights.quantized else None
        if plan.weights.target_format != self.format:
            self.weights = None  # freed first, as their memory is not the plan's
        engine = load(
            plan, self.model, device=self.device, weights=self.weights, draft_weights=draft_weights,
            calibration=calibration, dtype=self.dtype,
        )  # fmt: skip
        self.weights, self.format = engine.weights, plan.weights.target_format
        try:
            yield engine
        finally:
            engine.close()


def bound_head(engine: Engine, path: str | None) -> Head | None:
    """The retrieval head of a file, else the one that ships for the engine's model; None without one.

    Raises ModelError for a file that holds no head of this model.
    """
    shape, embedding = engine.config.shape, engine.weights.embedding
    head = shipped_head(shape, lambda: embedding) if path is None else load_head(path)
    return None if head is None else head.for_model(shape, embedding)
