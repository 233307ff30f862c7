"""Acceptance of drafts on a text, teacher-forced: the runtime's own formats and passes, without drawing any token.

The text goes through the model in rounds of a few tokens, as in speculative decoding of which every draft is the text's
own next token. A draft's pass over a round's tokens reads what that draft reads, and leaves its own KV to its later
tokens; then the target's pass replaces that KV. A token's acceptance at temperature 1 is sum(min(p, q)) of the two
distributions (Leviathan et al. 2023, section 3.3), conditional on the earlier ones being accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeplan.planner.axes.draft_selection import MIN_RATIO
from ridgeplan.planner.plan import DraftCodes, KVFormat
from ridgeplan.runtime import WorkloadError
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata import AttentionMetadata
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.model.weights import DecoderWeights

ROUND = 8  # drafts; their mean is what plans with gamma 8 see
SINKS = 4  # first tokens that StreamingLLM keeps (Xiao et al. 2023, section 3.2)
NUMERIC = ("kv8", "kv4", "w4", "w4kv4")
WINDOWED = "streamingllm"
ALLOWED = f"{', '.join(NUMERIC)} or {WINDOWED}:RATIO with a ratio above 0 and below 1"


@dataclass(frozen=True)
class Draft:
    """How a draft differs from its target: a kind of the acceptance rows, and the share of tokens that it reads."""

    kind: str
    ratio: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Draft:
        """`w4kv4` or `streamingllm:0.07`. Raises WorkloadError for other texts."""
        windowed = re.fullmatch(rf"{WINDOWED}:(0?\.\d+)", text, re.ASCII)
        if text in NUMERIC:
            return cls(text)
        if windowed and float(windowed[1]) >= MIN_RATIO:
            return cls(WINDOWED, float(windowed[1]))
        raise WorkloadError(f"draft is {text!r}; allowed: {ALLOWED}")

    @property
    def quantized_weights(self) -> bool:
        """Whether it has 4-bit weights of its own."""
        return self.kind.startswith("w4")

    @property
    def reads_codes(self) -> bool:
        """Whether its target keeps the cache as codes."""
        return self.kind in ("kv4", "w4kv4")

    @property
    def name(self) -> str:
        """The text that `parse` reads."""
        return self.kind if self.ratio == 1 else f"{self.kind}:{self.ratio:g}"


@dataclass(frozen=True)
class TextAcceptance:
    """A draft's conditional acceptance by position in a round, each the mean over all rounds."""

    draft: Draft
    by_position: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over all positions."""
        return sum(self.by_position) / len(self.by_position)


class _Caches:
    """The cache of full precision that an engine has, and a cache of codes that holds the same tokens."""

    def __init__(self, engine: Engine, plain: Cache, coded: bool) -> None:
        self.plain = plain
        self._engine = engine
        config = KVCacheConfig(
            1, plain.config.context, KVFormat.HIERARCHICAL, gamma=ROUND, draft_codes=DraftCodes.UPPER
        )
        self.coded = self._allocated(config) if coded else None

    def _allocated(self, config: KVCacheConfig) -> Cache:
        engine = self._engine
        return Cache(engine.config.shape, config, engine.device, engine.weights.embedding.dtype)

    @property
    def both(self) -> tuple[Cache, ...]:
        return (self.plain,) if self.coded is None else (self.plain, self.coded)

    def fill(self, prompt: Tensor) -> None:
        """Prefills the plain cache, and quantizes its keys and values into the other."""
        for cache in self.both:
            cache.reset(1)
        prefill(self._engine.decoder, self._engine.weights, self.plain, 0, prompt)
        if self.coded is not None:
            for layer in range(self.plain.layers):
                keys, values = (store[0, :, : len(prompt)] for store in self.plain.full(layer))
                self.coded.store_prompt(layer, 0, keys, values)
            self.coded.finish_prompt(0, len(prompt))

    def window(self, ratio: float, queries: int) -> tuple[Cache, AttentionMetadata]:
        """A cache of the sinks and the latest tokens, `ratio` of all; and the metadata of a pass that reads it."""
        length = int(self.plain.lengths[0])
        kept = min(length, max(SINKS + 1, round(ratio * length)))
        cache = self._allocated(KVCacheConfig(1, kept, gamma=queries))
        for ours, store in ((cache.keys, self.plain.keys), (cache.values, self.plain.values)):
            ours[:, :, :, :SINKS] = store[:, :, :, :SINKS]
            ours[:, :, :, SINKS:kept] = store[:, :, :, length - kept + SINKS : length]
        cache.finish_prompt(0, kept)
        return cache, replace(cache.target_metadata(queries), positions=self.plain.target_metadata(queries).positions)


@dataclass(frozen=True, eq=False)
class TeacherForced:
    """A text of token ids that an engine's model is run over, and the weights of drafts with 4-bit ones.

    engine: of a plan without speculation and with a bf16 cache, whose context holds the text.
    """

    engine: Engine
    draft_weights: DecoderWeights | None
    drafts: Sequence[Draft]

    @torch.inference_mode()
    def run(self, ids: Sequence[int], context: int, on_round: Callable[[], None]) -> list[TextAcceptance]:
        """Acceptance on the whole rounds of the tokens after the first `context`."""
        assert self.engine.cache is not None, "the engine is open"
        text = torch.tensor(ids, device=self.engine.device)
        coded = any(draft.reads_codes or draft.kind == "kv8" for draft in self.drafts)
        caches = _Caches(self.engine, self.engine.cache, coded)
        caches.fill(text[:context])
        rounds = []
        for start in range(context, len(text) - ROUND + 1, ROUND):
            rounds.append(self._round(caches, text[None, start : start + ROUND]))
            on_round()
        means = torch.stack(rounds).double().mean(0).tolist()
        return [TextAcceptance(draft, tuple(each)) for draft, each in zip(self.drafts, means, strict=True)]

    def _round(self, caches: _Caches, tokens: Tensor) -> Tensor:
        """Acceptance [drafts, ROUND] of one round's tokens [1, ROUND], which then enter the caches."""
        drafted = [self._drafted(draft, caches, tokens) for draft in self.drafts]
        plain, *coded = (self._pass(cache, tokens, cache.target_metadata(ROUND)) for cache in caches.both)
        for cache in caches.both:
            cache.advance(torch.full_like(cache.lengths, ROUND))
        pairs = [
            (coded[0] if draft.reads_codes else plain, coded[0] if q is None else q)
            for draft, q in zip(self.drafts, drafted, strict=True)
        ]
        return torch.stack([torch.minimum(p, q).sum(-1) for p, q in pairs])

    def _drafted(self, draft: Draft, caches: _Caches, tokens: Tensor) -> Tensor | None:
        """The distributions [ROUND, vocab] of a draft; None for INT8, which is the target of the cache of codes."""
        if draft.kind == "kv8":
            return None
        weights = self.draft_weights if draft.quantized_weights else None
        if draft.kind == WINDOWED:
            window, metadata = caches.window(draft.ratio, ROUND)
            return self._pass(window, tokens, metadata)
        cache = caches.coded if draft.reads_codes and caches.coded is not None else caches.plain
        return self._pass(cache, tokens, cache.draft_metadata(0, ROUND), weights)

    def _pass(
        self, cache: Cache, tokens: Tensor, metadata: AttentionMetadata, weights: DecoderWeights | None = None
    ) -> Tensor:
        logits = self.engine.decoder.step(weights or self.engine.weights, cache, tokens, metadata)[0]
        return logits.float().softmax(-1)
