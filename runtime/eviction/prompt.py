"""Eviction during prefill: a scorer ranks the tokens of each layer, and only the tokens that stay enter the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeplan.runtime.eviction.base import EvictionScorer, PromptLayer, compact, largest
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.model.decoder import Decoder


@dataclass(frozen=True, eq=False)
class PromptEviction:
    """What stays of one prompt, int64 [tokens], under `scorer`; None keeps everything.

    kept: tokens that each layer keeps, empty without a scorer.
    """

    decoder: Decoder
    scorer: EvictionScorer | None
    prompt: Tensor
    kept: tuple[int, ...]

    @classmethod
    def of(cls, decoder: Decoder, scorer: EvictionScorer | None, prompt: Tensor, cache: Cache) -> PromptEviction:
        """For a prompt that enters `cache`, which has room for what its configuration says is kept."""
        kept = cache.config.kept(len(prompt))
        assert scorer is not None or not kept, "a cache of evicted prompts needs a scorer"
        return cls(decoder, scorer, prompt, kept if min(kept, default=len(prompt)) < len(prompt) else ())

    def text(self) -> Tensor:
        """The prompt's tokens and those that the scorer appends, if anything is evicted at all."""
        if self.scorer is None or not self.kept:
            return self.prompt
        return torch.cat([self.prompt, self.scorer.appended(self.prompt)])

    def choose(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, masses: dict[Any, Tensor]
    ) -> Tensor | None:
        """Places of the tokens that a layer keeps, int64 [kv_heads or 1, kept]; None if it keeps all.

        queries: [tokens, q_heads, head_dim]; keys, values: [kv_heads, tokens, head_dim], with the appended tokens.
        masses: of `PromptLayer`, shared by all that choose from this layer.
        """
        tokens = len(self.prompt)
        if self.scorer is None or not self.kept or self.kept[index] == tokens:
            return None
        layer = prompt_layer(
            self.decoder,
            index=index,
            tokens=tokens,
            budget=self.kept[index],
            queries=queries,
            keys=keys,
            values=values,
            masses=masses,
        )
        return largest(self.scorer.scores(layer), layer.budget)

    def remaining(self, places: Tensor | None, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, kept, head_dim] of the chosen places."""
        if places is None:
            return keys[:, : len(self.prompt)], values[:, : len(self.prompt)]
        return compact(places, keys, values)

    def positions(self, places: Tensor | None) -> Tensor:
        """Positions int64 [kv_heads or 1, kept] of what stays, from the prompt's end: its last token is at -1."""
        tokens = len(self.prompt)
        return torch.arange(-tokens, 0, device=self.prompt.device)[None] if places is None else places - tokens


def prompt_layer(decoder: Decoder, **fields: Any) -> PromptLayer:
    """A layer of the decoder's model as policies see it, with the other fields of `PromptLayer`."""
    return PromptLayer(
        layers=decoder.config.shape.layers,
        frequencies=decoder.frequencies,
        rotary_scale=decoder.config.rotary_scale,
        **fields,
    )


def longest_text(texts: Sequence[Tensor]) -> Tensor:
    """The longest of several texts, each int64 [tokens], of which all others are the beginning.

    Raises ValueError if one is not.
    """
    longest = max(texts, key=len)
    if any(text is not longest and not torch.equal(text, longest[: len(text)]) for text in texts):
        raise ValueError("the policies append different tokens to the prompt; allowed: the same or none")
    return longest
