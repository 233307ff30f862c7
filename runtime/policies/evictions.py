"""Eviction by position (StreamingLLM, LaCache, random) and by attention (SnapKV, PyramidKV, H2O, DapQ, oracle).

StreamingLLM: tokens keep their positions in the text; the paper counts positions inside the cache.

LaCache: the ladder is laid over the prompt once, at the end of prefill; the paper repeats it as the text grows. Chunked
prefill repeats it after every chunk, over the chunk and the tokens that the layer has kept.

SnapKV, PyramidKV and H2O: the query heads of a KV head are averaged, as a KV head stores its keys once.

DapQ: the pseudo tokens run through prefill after the prompt, by default at positions L_p to L_p + N - 1. No token of
the prompt sees them, and their keys and values are dropped, so decoding starts at position L_p as if they had never
existed. Eq 4 sums softmax probabilities over prompt and pseudo tokens; docs/papers.md lists the details that the paper
leaves open. In chunked prefill they run after each chunk that evicts, and see the chunk and the tokens that the layer
has kept. By default they are the first and last tokens of the whole prompt, and stand right after the chunk, at the
positions of the next tokens that will read the kept ones. After the last chunk that is position L_p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.roofline.plan.policies import evictions
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.policies.eviction_scorer import (
    EvictionScorer,
    PromptLayer,
    attention_mass,
    largest,
    pooled,
    protect,
)
from ridgeplan.runtime.policies.registry import SCORERS

REPEATED_TOKENS = 7  # of DapQ's fixed content, as many as "Sorry, I don't know." has


@SCORERS.register("streamingllm")
class StreamingLLMScorer(EvictionScorer):
    settings: evictions.StreamingLLMEviction

    def scores(self, layer: PromptLayer) -> Tensor:
        """Later tokens have higher scores."""
        places = torch.arange(layer.tokens, dtype=torch.float32, device=layer.keys.device)
        return protect(places[None], first=min(self.settings.sinks, layer.budget - 1))


@SCORERS.register("lacache")
class LaCacheScorer(EvictionScorer):
    settings: evictions.LaCacheEviction

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
    settings: evictions.RandomEviction

    def scores(self, layer: PromptLayer) -> Tensor:
        """Drawn on the host, so that every device keeps the same tokens."""
        generator = torch.Generator().manual_seed(self.settings.seed * layer.layers + layer.index)
        return torch.rand(len(layer.keys), layer.tokens, generator=generator).to(layer.keys.device)


@SCORERS.register("snapkv", "pyramidkv")
class SnapKVScorer(EvictionScorer):
    settings: evictions.SnapKVEviction

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
    settings: evictions.H2OEviction
    accumulates = True

    def __init__(self, settings: evictions.H2OEviction) -> None:
        super().__init__(settings)
        self._sums: dict[int, Tensor] = {}  # by layer, float32 [kv_heads, held], of the tokens that stayed

    def scores(self, layer: PromptLayer) -> Tensor:
        """Attention that every token of the prompt has paid to those before it and to itself."""
        mass = layer.mass(layer.held, layer.tokens, layer.tokens)
        if layer.held:
            mass[:, : layer.held] += self._sums.pop(layer.index)
        scores = protect(mass.clone(), last=round(self.settings.recent_share * layer.budget))
        self._sums[layer.index] = mass.gather(1, largest(scores, layer.budget))
        return scores


@SCORERS.register("dapq")
class DapQScorer(EvictionScorer):
    settings: evictions.DapQEviction

    def appended(self, prompt: Tensor, vocab: int) -> Tensor:
        """Pseudo tokens; those of a short prompt's ends are fewer. What is drawn is the same on every device."""
        settings, count, tokens = self.settings, self.settings.appended_tokens, len(prompt)
        if settings.content == "ends":
            return torch.cat([prompt[: settings.prefix], prompt[-settings.suffix :]])
        generator = torch.Generator().manual_seed(settings.seed)
        places = torch.randint(tokens, (count,), generator=generator)
        ids = torch.randint(vocab, (count,), generator=generator).to(prompt)
        return {
            "sampled": prompt[places.to(prompt.device)],
            "span": prompt[int(places[0]) * max(tokens - count + 1, 1) // tokens :][:count],
            "vocabulary": ids,
            "fixed": ids[:REPEATED_TOKENS].repeat(-(-count // REPEATED_TOKENS))[:count],
        }[settings.content]

    def position(self, tokens: int) -> int:
        """Right after the tokens and the offset, or after a share of them."""
        share = self.settings.insert
        return tokens + self.settings.offset if share == 1 else round(share * tokens)

    def scores(self, layer: PromptLayer) -> Tensor:
        """Eq 4 over the tokens that the pseudo queries see; the latest are protected if the settings say so."""
        seen, heads = min(self.position(layer.tokens), layer.tokens), self.settings.heads
        if seen == layer.tokens:
            mass = layer.mass(layer.tokens, layer.held + len(layer.queries), layer.tokens, heads)
        else:
            keys = torch.cat([layer.keys[:, :seen], layer.keys[:, layer.tokens :]], dim=1)
            mass = attention_mass(layer.queries[layer.query_tokens :], keys, seen, seen, heads)
            mass = functional.pad(mass, (0, layer.tokens - seen))
        return protect(pooled(mass, self.settings.pooling), last=min(self.settings.recent, layer.budget))


@SCORERS.register("oracle")
class OracleScorer(EvictionScorer):
    """Scores by the attention of the tokens that follow a prompt. coming: these tokens, by prompt."""

    settings: evictions.OracleEviction

    def __init__(self, settings: evictions.OracleEviction) -> None:
        super().__init__(settings)
        self.coming: dict[tuple[int, ...], tuple[int, ...]] = {}

    def tell(self, prompt: Sequence[int], coming: Sequence[int]) -> None:
        """Sets the tokens that follow a prompt."""
        self.coming[tuple(prompt)] = tuple(coming)

    def appended(self, prompt: Tensor, vocab: int) -> Tensor:
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
