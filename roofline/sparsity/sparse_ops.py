"""The cost of a sparse draft's operations, each formula once: scores, choice, and attention to what was chosen.

Plain arithmetic on its arguments, as `ridgeplan.roofline.ops`.
"""

from __future__ import annotations

from ridgeplan.roofline.cost import Cost, Term
from ridgeplan.roofline.ops import METADATA_BYTES, code_bytes, metadata_bytes, partial_bytes

SCORE_BYTES = 4  # of a score, fp32
INDEX_BYTES = 4  # of a chosen token's number, int32
BIN_BYTES = 2  # of a score as the bin of a histogram
TWO_BITS = 2  # of a key, as draft planes hold it
UPPER_BITS = 4  # of a code that drafts read
TOP_K_PASSES = 6  # over the scores: four digits of a radix select, a count and a compaction


def two_bit_key_bits(group: Term) -> Term:
    """Bits that a scan reads of a key's element: two, and a scale and a minimum for the tokens of a group."""
    return TWO_BITS + 2 * 8 * METADATA_BYTES / group


def two_bit_scan(batch: Term, q_heads: Term, kv_heads: Term, head_dim: Term, tokens: Term, group: Term) -> Cost:
    """Scores of `tokens` tokens per sequence from 2-bit keys, with the scales and minima of the keys' upper codes."""
    return Cost(
        flops=2 * batch * q_heads * head_dim * tokens,
        read_bytes=batch * kv_heads * head_dim * tokens * two_bit_key_bits(group) / 8,
        write_bytes=batch * kv_heads * tokens * SCORE_BYTES,
    )


def two_bit_top_k(
    batch: Term, q_heads: Term, kv_heads: Term, head_dim: Term, tokens: Term, group: Term, chosen: Term
) -> Cost:
    """The choice of `chosen` of `tokens` tokens per KV head by 2-bit keys: scores are written and read as bins."""
    scan = two_bit_scan(batch, q_heads, kv_heads, head_dim, tokens, group)
    bins = batch * kv_heads * tokens * BIN_BYTES
    return Cost(scan.flops, scan.read_bytes + bins, bins + batch * kv_heads * chosen * INDEX_BYTES)


def page_scan(batch: Term, q_heads: Term, kv_heads: Term, head_dim: Term, pages: Term, element_bytes: Term) -> Cost:
    """Upper bounds of the scores of `pages` pages per sequence (Quest): two products per channel, one counts."""
    return Cost(
        flops=4 * batch * q_heads * head_dim * pages,
        read_bytes=2 * batch * kv_heads * head_dim * pages * element_bytes,
        write_bytes=batch * kv_heads * pages * SCORE_BYTES,
    )


def top_k(rows: Term, scores: Term, chosen: Term) -> Cost:
    """The choice of `chosen` of `scores` scores in each row; the scores are read once a pass."""
    return Cost(
        flops=TOP_K_PASSES * rows * scores,
        read_bytes=TOP_K_PASSES * rows * scores * SCORE_BYTES,
        write_bytes=rows * chosen * INDEX_BYTES,
    )


def take_slots(batch: Term, sets: Term, chosen: Term, slots: Term) -> Cost:
    """Slots of `chosen` tokens of each set, where all of them are there: two lists, and the times of use of `slots`."""
    lists = 2 * batch * sets * chosen * INDEX_BYTES
    return Cost(read_bytes=lists + batch * sets * slots * INDEX_BYTES, write_bytes=lists)


def sparse_attention(
    batch: Term,
    queries: Term,
    q_heads: Term,
    kv_heads: Term,
    head_dim: Term,
    chosen_tokens: Term,
    full_tokens: Term,
    bits: Term,
    element_bytes: Term,
    group: Term,
    splits: Term,
    entries: Term,
) -> Cost:
    """Split-KV attention to `chosen_tokens` per KV head, of `bits` bits or 0 for full precision, and to recent ones.

    `full_tokens` are recent. The merge is not counted. entries: of all index lists. A chosen token costs its own codes,
    scale and minimum, and its share of its group's key scales, whatever else its sectors hold.
    """
    full = batch * 2 * kv_heads * head_dim * full_tokens * element_bytes
    query = batch * queries * q_heads * head_dim * element_bytes
    return Cost(
        flops=4 * batch * queries * q_heads * head_dim * (chosen_tokens + full_tokens),
        read_bytes=full
        + query
        + chosen_bytes(batch, kv_heads, head_dim, chosen_tokens, bits, element_bytes, group)
        + entries * INDEX_BYTES,
        write_bytes=partial_bytes(batch, queries, q_heads, head_dim, splits),
    )


def chosen_bytes(
    batch: Term, kv_heads: Term, head_dim: Term, tokens: Term, bits: Term, element_bytes: Term, group: Term
) -> Term:
    """Bytes of `tokens` chosen tokens per KV head, keys and values."""
    if bits == 0:
        return batch * 2 * kv_heads * head_dim * tokens * element_bytes
    return code_bytes(batch, 2 * kv_heads * head_dim, tokens, bits) + metadata_bytes(
        batch, kv_heads, head_dim, tokens, group
    )


def progressive_attention(
    batch: Term,
    q_heads: Term,
    kv_heads: Term,
    head_dim: Term,
    tokens: Term,
    chosen_tokens: Term,
    full_tokens: Term,
    element_bytes: Term,
    group: Term,
    splits: Term,
) -> Cost:
    """A query's scan of `tokens` 2-bit keys, and attention to the `chosen_tokens` it ranks first, in one kernel.

    Scores and choices stay in shared memory.
    """
    scan = two_bit_scan(batch, q_heads, kv_heads, head_dim, tokens, group)
    chosen = sparse_attention(
        batch, 1, q_heads, kv_heads, head_dim, chosen_tokens, full_tokens, UPPER_BITS, element_bytes, group, splits, 0
    )
    return Cost(scan.flops, scan.read_bytes) + chosen


def collect_scores(batch: Term, q_heads: Term, kv_heads: Term, tokens: Term, summed: Term, relative: Term) -> Cost:
    """What attention adds to leave a score of each of `tokens` tokens per KV head, over `summed` queries.

    relative: 1 for probabilities, whose log-sum-exps are read and written; 0 for logits.
    """
    lse_bytes = relative * batch * q_heads * SCORE_BYTES
    return Cost(
        flops=2 * batch * q_heads * summed * tokens,
        read_bytes=lse_bytes,
        write_bytes=batch * kv_heads * tokens * SCORE_BYTES + lse_bytes,
    )


def pack_draft_planes(batch: Term, kv_heads: Term, head_dim: Term, tokens: Term) -> Cost:
    """2-bit keys and token-major values of `tokens` tokens per sequence, from their upper codes."""
    elements = kv_heads * head_dim
    upper = code_bytes(batch, elements, tokens, UPPER_BITS)
    return Cost(read_bytes=2 * upper, write_bytes=upper + code_bytes(batch, elements, tokens, TWO_BITS))
