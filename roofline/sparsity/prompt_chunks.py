"""Chunks in which a prompt goes through all layers where each layer evicts after every chunk; one chunk elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ridgeplan.roofline import memory
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.cost import Term
from ridgeplan.roofline.execution import prompt_chunks
from ridgeplan.roofline.strategy import UNLIMITED_TOKENS, Strategy
from ridgeplan.roofline.term_math import is_symbolic, maximum, minimum


@dataclass(frozen=True)
class PromptChunks:
    """A prompt's chunks: their number, the tokens of each and of the longest, and what layers hold between them.

    held: tokens of earlier chunks in a layer that a chunk attends to, on average over the chunks. evicting: chunks
    after which tokens are evicted; chosen_from: the tokens of a layer that then stay or go.
    """

    count: Term
    tokens: Term
    longest: Term
    held: Term
    evicting: Term
    chosen_from: Term

    @classmethod
    def of(cls, strategy: Strategy) -> PromptChunks:
        """Of one of the strategy's prompts."""
        context, kept, chunk = strategy.context, strategy.kept_tokens, strategy.eviction_chunk
        if not is_symbolic(chunk) and np.all(np.asarray(chunk) >= UNLIMITED_TOKENS):
            return cls(1, context, context, 0, 1, context)
        count = 1 + evicts(strategy) * (prompt_chunks(context, chunk) - 1)
        tokens = context / count
        filling = minimum(kept // tokens, count - 1)  # chunks after which a layer still has room
        held = (tokens * filling * (filling + 1) / 2 + kept * (count - 1 - filling)) / count
        return cls(count, tokens, -(-context // count), held, count - filling, minimum(kept + tokens, context))


def evicts(strategy: Strategy) -> Term:
    """1 where a prompt loses any token, else 0."""
    return minimum(maximum(strategy.context - strategy.kept_tokens, 0), 1)


def appended_tokens(strategy: Strategy) -> Term:
    """Tokens that prefill runs after a prompt, or after each chunk of it that evicts, and then drops."""
    return evicts(strategy) * strategy.appended_tokens


def chunk_buffers(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> tuple[Term, ...]:
    """Bytes of the buffers that live through a prompt's prefill, in the order of their allocation.

    Those of the longest chunk and of what a layer holds ahead of it; and what all layers hold between chunks, where
    the cache has codes alone: in full precision it lies in the cache.
    """
    chunks = PromptChunks.of(strategy)
    several = minimum(chunks.count - 1, 1)
    held = several * strategy.kept_tokens
    buffers = memory.prompt_buffers(shape, chunks.longest + appended_tokens(strategy), element_bytes, held)
    between = (1 - strategy.stores_full_kv) * memory.full_kv(shape, 1, held, element_bytes)
    return (*buffers, between)
