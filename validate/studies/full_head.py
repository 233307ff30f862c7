"""Retrieval heads of full width, as an EAGLE-3 checkpoint has them, in studies.

They read the target's features of the token before, which a study has for all of a text that goes through the model
once ahead. A plan has them too late to load what is chosen before the first layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.planner.axes import draft_selection as selections
from ridgeplan.runtime.drafting.policies.retrieval_head import RetrievalHead
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.model.prefill import prefill_layer
from ridgeplan.runtime.retrieval.head import Head


class FullHead(RetrievalHead):
    """features: [tokens, 3 hidden], of the token before each of the text, as `features_before` makes them."""

    inputs = "full"

    def __init__(self, selection: selections.RetrievalHead, cache: Cache, head: Head, features: Tensor) -> None:
        super().__init__(selection, cache, head)
        self.features = features

    def project(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.head.project(tokens, positions, self.rotary, self.features[positions])


def fused_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are EAGLE-3's features: low, middle and high, as its engines take them."""
    low, middle, high = 2, layers // 2, layers - 3
    return min(low, layers - 1), middle, max(high, 0)


@torch.inference_mode()
def features_before(engine: Engine, tokens: Tensor) -> Tensor:
    """The target's features of the token before each of a text [tokens], zeros before the first: [tokens, 3 hidden]."""
    decoder, hidden, found = engine.decoder, functional.embedding(tokens, engine.weights.embedding), {}
    wanted = fused_layers(len(engine.weights.layers))
    for index, (layer, window) in enumerate(zip(engine.weights.layers, decoder.config.windows, strict=True)):
        if index in wanted:
            found[index] = hidden.clone()
        prefill_layer(decoder, layer, hidden, window)
    features = torch.cat([found[index] for index in wanted], dim=-1)
    return torch.cat([torch.zeros_like(features[:1]), features[:-1]])
