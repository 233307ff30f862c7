"""The cost of evicting a prompt's tokens during prefill: appended tokens, scores, and the copy of what stays."""

from __future__ import annotations

from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.cost import Cost, Term
from ridgeplan.roofline.execution import EVICTION_SCORE_ELEMENTS
from ridgeplan.roofline.memory import layer_parameters
from ridgeplan.roofline.passes import Op
from ridgeplan.roofline.strategy import Strategy
from ridgeplan.roofline.term_math import maximum, minimum

SCORE_BYTES = 4  # probabilities are fp32
RANKING_BYTES = 40  # per token and KV head: scores, their copy in reverse, and keys and places of two sorts


def evicts(strategy: Strategy) -> Term:
    """1 where a prompt loses any token, else 0."""
    return minimum(maximum(strategy.context - strategy.kept_tokens, 0), 1)


def appended_tokens(strategy: Strategy) -> Term:
    """Tokens that prefill runs after a prompt and then drops."""
    return evicts(strategy) * strategy.appended_tokens


def scored_pairs(strategy: Strategy) -> Term:
    """Pairs of a scoring query and a token that it sees, of one query head: the queries are the text's last."""
    tokens = strategy.context + strategy.appended_tokens
    queries = minimum(strategy.scored_queries, tokens)
    return evicts(strategy) * (queries * tokens - queries**2 / 2)


def eviction_ops(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> tuple[Op, ...]:
    """What an eviction adds to one prompt's prefill: nothing where nothing is evicted."""
    appended = appended_tokens(strategy)
    passes = shape.layers * minimum(appended, 1)
    matrices = layer_parameters(shape) / shape.layers
    widths = shape.hidden, shape.q_width + 2 * shape.intermediate
    products = ops.matmul(appended, *widths, matrices, strategy.target_weight_bytes, element_bytes)
    seen = strategy.context + appended
    attention = ops.attention(
        1, appended, shape.q_heads, shape.kv_heads, shape.head_dim, 0, seen, 0, element_bytes, strategy.kv_group, 1
    )
    heads, scores = shape.layers * shape.kv_heads, minimum(scored_pairs(strategy), 1)
    return (
        Op("appended tokens", "linear", products, passes),
        Op("appended attention", "prefill_attention", attention, passes),
        Op("eviction scores", "linear", _products(shape, strategy, element_bytes), heads * scores),
        Op("eviction softmax", "elementwise", _softmax(shape, strategy, element_bytes), heads * evicts(strategy)),
        Op("eviction copy", "elementwise", _copy(shape, strategy, element_bytes), shape.layers * evicts(strategy)),
    )


def eviction_workspace(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> Term:
    """Bytes of a block of scores, or of ranking all tokens of a layer, where that is more."""
    ratio, tokens = shape.q_heads / shape.kv_heads, strategy.context + strategy.appended_tokens
    queries = minimum(strategy.scored_queries, tokens)
    block = minimum(queries * ratio * tokens, maximum(EVICTION_SCORE_ELEMENTS, ratio * tokens))
    block_bytes = block * (element_bytes + SCORE_BYTES)
    return evicts(strategy) * maximum(block_bytes, shape.kv_heads * tokens * RANKING_BYTES)


def _products(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> Cost:
    """Logits of one KV head's query heads: they are written in full precision."""
    pairs = shape.q_heads / shape.kv_heads * scored_pairs(strategy)
    return Cost(
        flops=2 * pairs * shape.head_dim,
        read_bytes=strategy.context * shape.head_dim * element_bytes,
        write_bytes=pairs * element_bytes,
    )


def _softmax(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> Cost:
    """Logits to probabilities, summed over queries; then the ranking of one KV head's tokens."""
    pairs = shape.q_heads / shape.kv_heads * scored_pairs(strategy)
    ranked = strategy.context * RANKING_BYTES
    return Cost(
        flops=4 * pairs,
        read_bytes=pairs * (element_bytes + SCORE_BYTES) + ranked,
        write_bytes=pairs * SCORE_BYTES + ranked,
    )


def _copy(shape: ModelShape, strategy: Strategy, element_bytes: Term) -> Cost:
    """The kept tokens' keys and values, gathered and then stored."""
    moved_bytes = 2 * strategy.kept_tokens * shape.kv_elements_per_token_per_layer * element_bytes
    return Cost(read_bytes=moved_bytes, write_bytes=moved_bytes)
