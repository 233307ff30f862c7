"""Eviction by position (StreamingLLM, LaCache, random) and by attention (SnapKV, PyramidKV, H2O, DapQ, oracle).

StreamingLLM: tokens keep their positions in the text; the paper counts positions inside the cache.

LaCache: the ladder is laid over the prompt once, at the end of prefill; the paper repeats it as the text grows. Chunked
prefill repeats it after every chunk, over the chunk and the tokens that the layer has kept.

SnapKV, PyramidKV and H2O: the query heads of a KV head are averaged, as a KV head stores its keys once.

DapQ: the pseudo tokens run through prefill after the prompt, at positions L_p to L_p + N - 1. No token of the prompt
sees them, and their keys and values are dropped, so decoding starts at position L_p as if they had never existed. Eq 4
sums softmax probabilities over prompt and pseudo tokens; docs/papers.md lists the details that the paper leaves open.
In chunked prefill they run after each chunk that evicts, and see the chunk and the tokens that the layer has kept. They
are the first and last tokens of the whole prompt, and stand right after the chunk, at the positions of the next tokens
that will read the kept ones. After the last chunk that is position L_p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeplan.roofline.plan.policies.evictions import (
    DapQEviction,
    H2OEviction,
    LaCacheEviction,
    OracleEviction,
    RandomEviction,
    SnapKVEviction,
    StreamingLLMEviction,
)
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.policies.eviction import EvictionScorer, PromptLayer, pooled, protect
from ridgeplan.runtime.policies.registry import SCORERS


@SCORERS.register("streamingllm")
class StreamingLLMScorer(EvictionScorer):
    settings: StreamingLLMEviction

    def scores(self, layer: PromptLayer) -> Tensor:
        """Later tokens have higher scores."""
        places = torch.arange(layer.tokens, dtype=torch.float32, device=layer.keys.device)
        return protect(places[None], first=min(self.settings.sinks, layer.budget - 1))


@SCORERS.register("lacache")
class LaCacheScorer(EvictionScorer):
    settings: LaCacheEviction

    def scores(self, layer: PromptLayer) -> Tensor:
        """Tokens nearer to this layer's rung of their ladder have higher scores."""
        sinks = min(self.settings.sinks, layer.budget)
        recent = min(round(self.settings.recent_share * layer.budget), layer.budget - sinks)
        middle = layer.tokens - sinks - recent
        rung = (layer.budget - sinks - recent) / middle  # the part of a ladder that one layer keeps
        depth = layer.index / max(layer.layers - 1, 1)
        places = torch.arange(layer.tokens, dtype=torch.float64, device=layer.keys.device) + 0.5 - sinks
        phase = (places * self.settings.ladders / middle) % 1
        distance = (phase - (rung / 2 + depth * (1 - rung))).abs()
        return protect(-distance.float()[None], first=sinks, last=recent)


@SCORERS.register("random")
class RandomScorer(EvictionScorer):
    settings: RandomEviction

    def scores(self, layer: PromptLayer) -> Tensor:
        """Drawn on the host, so that every device keeps the same tokens."""
        generator = torch.Generator().manual_seed(self.settings.seed * layer.layers + layer.index)
        return torch.rand(len(layer.keys), layer.tokens, generator=generator).to(layer.keys.device)


@SCORERS.register("snapkv", "pyramidkv")
class SnapKVScorer(EvictionScorer):
    settings: SnapKVEviction

    def scores(self, layer: PromptLayer) -> Tensor:
        """Attention that the window pays to the tokens before it; the window lies within the prompt's last chunk."""
        window = min(self.settings.window, layer.budget, layer.query_tokens)
        first = layer.tokens - window
        mass = layer.mass(first, layer.tokens, first)
        scores = mass.new_empty(len(mass), layer.tokens)
        scores[:, :first] = pooled(mass, self.settings.pooling)
        return protect(scores, last=window)


@SCORERS.register("h2o")
class H2OScorer(EvictionScorer):
    settings: H2OEviction

    def scores(self, layer: PromptLayer) -> Tensor:
        """Attention that every token of the prompt pays to those before it and to itself."""
        mass = layer.mass(0, layer.tokens, layer.tokens)
        return protect(mass, last=round(self.settings.recent_share * layer.budget))


@SCORERS.register("dapq")
class DapQScorer(EvictionScorer):
    settings: DapQEviction

    def appended(self, prompt: Tensor) -> Tensor:
        """The prompt's first and last tokens (section 5.1); a short prompt has fewer."""
        return torch.cat([prompt[: self.settings.prefix], prompt[-self.settings.suffix :]])

    def scores(self, layer: PromptLayer) -> Tensor:
        """Eq 4; the latest tokens are protected if the settings say so."""
        mass = layer.mass(layer.tokens, layer.held + len(layer.queries), layer.tokens)
        return protect(pooled(mass, self.settings.pooling), last=min(self.settings.recent, layer.budget))


@SCORERS.register("oracle")
class OracleScorer(EvictionScorer):
    """Scores by the attention of the tokens that follow a prompt. coming: these tokens, by prompt."""

    settings: OracleEviction

    def __init__(self, settings: OracleEviction) -> None:
        super().__init__(settings)
        self.coming: dict[tuple[int, ...], tuple[int, ...]] = {}

    def tell(self, prompt: Sequence[int], coming: Sequence[int]) -> None:
        """Sets the tokens that follow a prompt."""
        self.coming[tuple(prompt)] = tuple(coming)

    def appended(self, prompt: Tensor) -> Tensor:
        """The coming tokens. Raises WorkloadError for a prompt without a call of `tell`."""
        key = tuple(prompt.tolist())
        if key not in self.coming:
            raise WorkloadError(
                f"the eviction oracle does not know what follows a prompt of {len(key)} tokens; allowed: texts of "
                "`ridgeplan quality`"
            )
        return torch.tensor(self.coming[key][: self.settings.coming], dtype=prompt.dtype, device=prompt.device)

    def scores(self, layer: PromptLayer) -> Tensor:
        """Attention that the coming tokens pay to the prompt."""
        return layer.mass(layer.tokens, len(layer.queries), layer.tokens)
