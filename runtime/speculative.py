"""One round: draft gamma tokens, verify them in one forward pass of the target, keep what it agrees with.

With gamma 0 a round is one step of plain decoding, on the same code path and with the same flush rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.runtime.cache import Cache
from ridgeplan.runtime.decoder import Decoder
from ridgeplan.runtime.sampling import Sampling, Verdict, draw, judge
from ridgeplan.runtime.stopwatch import Stopwatch
from ridgeplan.runtime.weights import DecoderWeights


@dataclass(frozen=True, eq=False)
class Speculator:
    """The parts of a round. Nothing here asks the device for a value, so a round can be captured whole.

    Between rounds `pending` [rows] is each row's last token, emitted but not yet in the cache.
    """

    decoder: Decoder
    target: DecoderWeights
    draft: DecoderWeights
    cache: Cache
    sampling: Sampling
    generator: torch.Generator
    stopwatch: Stopwatch

    def first(self, logits: Tensor) -> Tensor:
        """The tokens [rows] that follow the prompts, from logits [rows, vocab]."""
        return draw(self.sampling.probabilities(logits), self._uniform(len(logits)))

    def round(self, pending: Tensor, active: Tensor) -> Verdict:
        """Advances the active rows by one round; the others repeat theirs without effect."""
        drafted, draft = self._draft(pending)
        with self.stopwatch.measure("verify"):
            verdict = self._verify(pending, drafted, draft)
        kept = verdict.advance * active
        with self.stopwatch.measure("flush"):
            self.cache.advance(kept.int())
        return Verdict(verdict.tokens, kept, verdict.accepted * active, verdict.judged * active)

    def _draft(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        """Drafted tokens [rows, gamma] and their distributions [rows, gamma, vocab]."""
        gamma = self.cache.gamma
        token, tokens, distributions = pending, [], []
        for ahead in range(gamma):
            with self.stopwatch.measure("draft"):
                reader = self.cache.draft_reader(ahead)
                logits = self.decoder.step(self.draft, self.cache, token[:, None], reader)
                distribution = self.sampling.probabilities(logits[:, 0])
                token = draw(distribution, self._uniform(len(pending)))
                tokens.append(token)
                distributions.append(distribution)
        if gamma == 0:
            vocab = self.decoder.config.vocab
            return pending.new_zeros(len(pending), 0), pending.new_zeros(len(pending), 0, vocab).float()
        return torch.stack(tokens, dim=1), torch.stack(distributions, dim=1)

    def _verify(self, pending: Tensor, drafted: Tensor, draft: Tensor) -> Verdict:
        """The target's KV of all forwarded tokens replaces the drafts'."""
        tokens = torch.cat([pending[:, None], drafted], dim=1)
        reader = self.cache.target_reader(tokens.shape[1])
        logits = self.decoder.step(self.target, self.cache, tokens, reader)
        uniform = self._uniform(*tokens.shape)
        return judge(self.sampling.probabilities(logits), draft, drafted, self.cache.room(), uniform)

    def _uniform(self, *shape: int) -> Tensor:
        device = self.generator.device
        return torch.rand(shape, generator=self.generator, dtype=torch.float64, device=device)
