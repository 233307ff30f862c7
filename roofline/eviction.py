"""Cost of evicting prompt tokens during prefill, at once or after every chunk of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ridgeplan.roofline import memory, ops
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Cost, Term, is_symbolic, maximum, minimum
from ridgeplan.roofline.execution import EVICTION_SCORE_ELEMENTS, prompt_chunks
from ridgeplan.roofline.memory import layer_parameters
from ridgeplan.roofline.passes import Op
from ridgeplan.roofline.strategy import UNLIMITED_TOKENS, Strategy


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
        context, kept, chunk = strategy.context, strategy.kept_tokens, strategy.eviction.chunk
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
    return evicts(strategy) * strategy.eviction.appended_tokens


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


SCORE_BYTES = 4  # probabilities are fp32
RANKING_BYTES = 40  # per token and KV head: scores, their copy in reverse, and keys and places of two sorts


def scored_pairs(strategy: Strategy) -> Term:
    """Pairs of a scoring query and a token that it sees, of one query head, each time that tokens are evicted.

    The queries are the last of the text so far.
    """
    tokens = PromptChunks.of(strategy).chosen_from + strategy.eviction.appended_tokens
    queries = minimum(strategy.eviction.scored_queries, tokens)
    return evicts(strategy) * (queries * tokens - queries**2 / 2)


def eviction_ops(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> tuple[Op, ...]:
    """What an eviction adds to one prompt's prefill: nothing where nothing is evicted."""
    appended, chunks = appended_tokens(strategy), PromptChunks.of(strategy)
    times = chunks.evicting * evicts(strategy)
    passes = shape.layers * times * minimum(appended, 1)
    matrices = layer_parameters(shape) / shape.layers
    widths = shape.hidden, shape.q_width + 2 * shape.intermediate
    products = ops.matmul(appended, *widths, matrices, strategy.target.weight_bytes, element_bytes)
    seen = chunks.chosen_from + appended
    attention = ops.attention(
        1, appended, shape.q_heads, shape.kv_heads, shape.head_dim, 0, seen, 0, element_bytes, strategy.kv_group, 1
    )
    heads, scores = shape.layers * shape.kv_heads * times, minimum(scored_pairs(strategy), 1)
    return (
        Op("appended tokens", "linear", products, passes),
        Op("appended attention", "prefill_attention", attention, passes),
        Op("eviction scores", "linear", _products(shape, strategy, element_bytes), heads * scores),
        Op("eviction softmax", "elementwise", _softmax(shape, strategy, element_bytes), heads),
        Op("eviction copy", "elementwise", _copy(shape, strategy, element_bytes), shape.layers * times),
        Op("held tokens", "elementwise", _held(shape, chunks, element_bytes), shape.layers * (chunks.count - 1)),
    )


def eviction_workspace(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> Term:
    """The most of: bytes of a block of scores, of ranking all tokens of a layer, and of a copy of those that stay."""
    ratio = shape.q_heads / shape.kv_heads
    tokens = PromptChunks.of(strategy).chosen_from + strategy.eviction.appended_tokens
    queries = minimum(strategy.eviction.scored_queries, tokens)
    block = minimum(queries * ratio * tokens, maximum(EVICTION_SCORE_ELEMENTS, ratio * tokens))
    block_bytes = block * (element_bytes + SCORE_BYTES)
    copied_bytes = strategy.kept_tokens * shape.kv_elements_per_token_per_layer * element_bytes
    ranked_bytes = shape.kv_heads * tokens * RANKING_BYTES
    return evicts(strategy) * maximum(maximum(block_bytes, ranked_bytes), copied_bytes)


def _products(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> Cost:
    """Logits of one KV head's query heads: they are written in full precision."""
    pairs = shape.q_heads / shape.kv_heads * scored_pairs(strategy)
    return Cost(
        flops=2 * pairs * shape.head_dim,
        read_bytes=PromptChunks.of(strategy).chosen_from * shape.head_dim * element_bytes,
        write_bytes=pairs * element_bytes,
    )


def _softmax(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> Cost:
    """Logits to probabilities, summed over queries; then the ranking of one KV head's tokens."""
    pairs = shape.q_heads / shape.kv_heads * scored_pairs(strategy)
    ranked = PromptChunks.of(strategy).chosen_from * RANKING_BYTES
    return Cost(
        flops=4 * pairs,
        read_bytes=pairs * (element_bytes + SCORE_BYTES) + ranked,
        write_bytes=pairs * SCORE_BYTES + ranked,
    )


def _copy(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> Cost:
    """The kept tokens' keys and values, gathered and then stored."""
    moved_bytes = 2 * strategy.kept_tokens * shape.kv_elements_per_token_per_layer * element_bytes
    return Cost(read_bytes=moved_bytes, write_bytes=moved_bytes)


def _held(shape: ModelShape, chunks: PromptChunks, element_bytes: Term) -> Cost:
    """What a layer holds of earlier chunks, copied ahead of a chunk that is not the first."""
    tokens = chunks.held * chunks.count / maximum(chunks.count - 1, 1)
    moved_bytes = tokens * shape.kv_elements_per_token_per_layer * element_bytes
    return Cost(read_bytes=moved_bytes, write_bytes=moved_bytes)
