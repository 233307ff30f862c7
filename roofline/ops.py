"""FLOPs and bytes of every operation of a decoder, dense and sparse, each formula once.

Every function is plain arithmetic on its arguments, which may be ints (tests compare the result with the cost that the
kernel declares), numpy arrays (for sweeps) or sympy symbols (to print, solve or lambdify).
`element_bytes` is the size of a full-precision element: 2 for bf16 on a GPU, 4 for fp32 on a CPU.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from ridgeplan.roofline.cost import Cost, Term, minimum
from ridgeplan.roofline.execution import state_ring_rows

METADATA_BYTES = 2  # one fp16 scale or minimum
PARTIAL_BYTES = 4  # split-KV partial outputs and their log-sum-exp are fp32
LOGIT_FLOPS = 5  # per logit that sampling reads: subtract, scale, exponentiate, compare, add
TABLE_BYTES = 4  # cosines and sines are fp32
POSITION_BYTES = 8  # positions and slots are int64
SCALAR_BYTES = 4  # a state's step biases and decay rates by head are fp32


def linear(rows: Term, inputs: Term, outputs: Term, weight_bytes: Term, element_bytes: Term) -> Cost:
    """`rows x inputs` activations times an `inputs x outputs` weight of `weight_bytes` per parameter."""
    return matmul(rows, inputs, outputs, inputs * outputs, weight_bytes, element_bytes)


def gated_linear(
    rows: Term, inputs: Term, outputs: Term, weight_bytes: Term, element_bytes: Term, fused: Term = 1
) -> Cost:
    """Gate and up projections as one product over both weights.

    If `fused` is 1 it applies SwiGLU and writes one `rows x outputs` result; if 0, it writes both products.
    """
    return matmul(rows, inputs, (2 - fused) * outputs, 2 * inputs * outputs, weight_bytes, element_bytes)


def matmul(rows: Term, inputs: Term, outputs: Term, params: Term, weight_bytes: Term, element_bytes: Term) -> Cost:
    """A projection of `params` parameters: inputs x outputs, or fewer where MLA factors it into a chain."""
    return Cost(
        flops=2 * rows * params,
        read_bytes=params * weight_bytes + rows * inputs * element_bytes,
        write_bytes=rows * outputs * element_bytes,
    )


def activated_experts(experts: Term, per_token: Term, rows: Term, skew: float = 0) -> Term:
    """Expected number of distinct experts that `rows` tokens are routed to, `per_token` of `experts` each.

    Under uniform, independent routing all rows miss an expert with probability (1 - k/E)^rows. skew: exponent of a Zipf
    law of the experts' loads; an expert is then missed by (1 - share)^rows, where shares sum to k.
    """
    if skew == 0:
        return experts * (1 - (1 - per_token / experts) ** rows)
    return sum(count * (1 - (1 - share) ** rows) for share, count in zipf_shares(experts, per_token, skew))


@cache
def zipf_shares(experts: int, per_token: int, skew: float) -> tuple[tuple[float, int], ...]:
    """Shares of tokens that use an expert, with the number of experts of that share, under a Zipf law of loads.

    The share of rank r is c / r^skew, at most 1, and all shares sum to `per_token`. Ranks are taken together by
    quarter octaves, so that few terms are added up.
    """
    ranks = np.arange(1, experts + 1)
    loads = ranks ** -float(skew)
    low, high = 0.0, experts * float(ranks[-1]) ** skew
    for _ in range(100):  # bisection: the sum of min(c x load, 1) grows with c
        scale = (low + high) / 2
        low, high = (low, scale) if np.minimum(scale * loads, 1).sum() > per_token else (scale, high)
    shares = np.minimum(scale * loads, 1)
    bins = np.floor(4 * np.log2(ranks)).astype(int)
    return tuple((float(shares[bins == each].mean()), int((bins == each).sum())) for each in np.unique(bins))


def experts(
    rows: Term,
    hidden: Term,
    expert_params: Term,
    count: Term,
    per_token: Term,
    weight_bytes: Term,
    element_bytes: Term,
    skew: float = 0,
    ranks: int = 1,
) -> Cost:
    """Routed experts of one layer: the weights of all activated experts are read, FLOPs are per token.

    skew: of the experts' loads, as `activated_experts` takes it. ranks: GPUs of which each holds `count` experts; the
    cost is that of the busiest.
    """
    routed = rows * per_token
    if ranks > 1:
        routed = busiest_rank(routed, ranks)
    activated = read_experts(count, per_token, rows, skew, ranks)
    return Cost(
        flops=2 * routed * expert_params,
        read_bytes=activated * expert_params * weight_bytes + rows * hidden * element_bytes,
        write_bytes=rows * hidden * element_bytes,
    )


def read_experts(count: Term, per_token: Term, rows: Term, skew: float = 0, ranks: int = 1) -> Term:
    """Experts whose weights a GPU reads: those activated, of the busiest of `ranks`."""
    activated = activated_experts(count, per_token, rows, skew)
    return busiest_rank(activated, ranks, count) if ranks > 1 else activated


def busiest_rank(mean: Term, ranks: int, limit: Term = math.inf) -> Term:
    """The expected largest of `ranks` counts of a mean, which are binomial below a `limit`, else as Poisson's.

    The largest of n normal deviates is about the quantile (n - 3/8) / (n + 1/4) (Blom 1958).
    """
    quantile = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    deviation = (mean * (1 - mean / limit)) ** 0.5
    return minimum(minimum(mean + quantile * deviation, ranks * mean), limit)


class StateSizes(NamedTuple):
    """A recurrent state: FLOPs per element and token, elements and their bytes, and what a token brings and takes.

    delta: 1 under a delta rule, else 0. channels: of the short convolution with `taps` taps. scalars: by head, which
    steer the update. decays: of a token by channel, 0 where they are among the scalars.
    """

    flops: Term
    delta: Term
    elements: Term
    state_bytes: Term
    channels: Term
    taps: Term
    decays: Term
    scalars: Term
    outputs: Term

    @property
    def bytes(self) -> Term:
        """Bytes of one sequence's state in one layer."""
        return self.elements * self.state_bytes

    def input_bytes(self, element_bytes: Term) -> Term:
        """Bytes of a token's queries, keys, values, decays and scalars."""
        return (self.channels + self.decays + self.scalars) * element_bytes

    def convolution_bytes(self, element_bytes: Term) -> Term:
        """Bytes of the latest inputs of the convolution that a sequence keeps."""
        return self.channels * (self.taps - 1) * element_bytes


def state_update(
    batch: Term, queries: Term, replayed: Term, commits: Term, sizes: StateSizes, element_bytes: Term
) -> Cost:
    """The recurrent update of one layer for `queries` tokens of each sequence, with the short convolution ahead of it.

    The tokens may be drafts that the target rejects, so the state is written one pass late: a ring keeps the inputs of
    the latest tokens, and a pass replays `replayed` of them. commits: 1 where some were accepted since, so that the
    state is written. A round of any number of drafts thus writes one state. A snapshot after every token would write
    one for each, which is never less, and take their memory.
    """
    steps = queries + replayed
    inputs, constants = sizes.input_bytes(element_bytes), sizes.channels * sizes.taps * element_bytes
    return Cost(
        flops=batch * steps * (sizes.flops * sizes.elements + 2 * sizes.channels * sizes.taps),
        read_bytes=batch * (sizes.bytes + (steps + sizes.taps - 1) * inputs) + constants + sizes.scalars * SCALAR_BYTES,
        write_bytes=batch * (commits * sizes.bytes + queries * (inputs + sizes.outputs * element_bytes)),
    )


def held_state_bytes(queries: Term, sizes: StateSizes, element_bytes: Term) -> Term:
    """Bytes of one layer's state of a sequence, and of the ring of inputs for passes of up to `queries` tokens."""
    return sizes.bytes + state_ring_rows(sizes.taps, queries) * sizes.input_bytes(element_bytes)


def short_convolution(rows: Term, batch: Term, sizes: StateSizes, element_bytes: Term) -> Cost:
    """The causal convolution by channel ahead of a prompt's state, which keeps its latest `taps` - 1 inputs."""
    kept = batch * sizes.channels * (sizes.taps - 1)
    return Cost(
        flops=2 * rows * sizes.channels * sizes.taps,
        read_bytes=(rows * sizes.channels + kept + sizes.channels * sizes.taps) * element_bytes,
        write_bytes=(rows * sizes.channels + kept) * element_bytes,
    )


def gated_norm(rows: Term, heads: Term, head_dim: Term, element_bytes: Term) -> Cost:
    """RMSNorm of every head, times the activated gate."""
    width = heads * head_dim
    return elementwise(rows, 2 * width, width, element_bytes) + Cost(read_bytes=head_dim * element_bytes)


CHUNK_TOKENS = 64  # of the chunked form of a state's prefill


def state_chunks(
    batch: Term, tokens: Term, heads: Term, key_dim: Term, value_dim: Term, sizes: StateSizes, element_bytes: Term
) -> Cost:
    """Prefill of one state layer in chunks of C = 64 tokens (Gated DeltaNet, section 3.3; Mamba-2, section 6).

    Per head and token, in multiply-adds: products with the state, one for the output and one for its update, and
    another for the delta rule; within the chunk q . k and its product with the values; the delta rule's k . k, the
    solution of its triangular system, and both products with that. Every chunk reads and writes the state.
    """
    delta = sizes.delta
    across = (2 + delta) * key_dim * value_dim
    within = CHUNK_TOKENS * ((1 + delta) * key_dim + value_dim)
    solved = delta * CHUNK_TOKENS * (key_dim + value_dim + CHUNK_TOKENS / 3)
    states = batch * tokens / CHUNK_TOKENS * sizes.bytes
    return Cost(
        flops=2 * batch * tokens * heads * (across + within + solved),
        read_bytes=batch * tokens * sizes.input_bytes(element_bytes) + states,
        write_bytes=batch * tokens * sizes.outputs * element_bytes + states,
    )


def index_scan(batch: Term, queries: Term, heads: Term, head_dim: Term, tokens: Term, key_bytes: Term) -> Cost:
    """Scores of `tokens` cached tokens by a sparse indexer: `heads` products with one cached key of `key_bytes`."""
    return Cost(
        flops=2 * batch * queries * heads * head_dim * tokens,
        read_bytes=batch * tokens * key_bytes,
        write_bytes=batch * queries * tokens * SCORE_BYTES,
    )


def code_bytes(batch: Term, kv_elements: Term, tokens: Term, bits: Term) -> Term:
    """Bytes of `bits`-bit codes for `tokens` tokens of `kv_elements` elements each."""
    return batch * kv_elements * tokens * bits / 8


def metadata_bytes(batch: Term, kv_heads: Term, head_dim: Term, tokens: Term, group: Term, values: Term = 1) -> Term:
    """Scales and minima: one per channel and group of tokens for keys, one per token for values (QuantSpec, 4.3).

    values: 1, or 0 for keys alone.
    """
    key_pairs = tokens / group * head_dim
    return batch * kv_heads * (key_pairs + values * tokens) * 2 * METADATA_BYTES


def quantized_bytes(
    batch: Term, kv_heads: Term, head_dim: Term, tokens: Term, bits: Term, group: Term, values: Term = 1
) -> Term:
    """Codes of `tokens` tokens with their scales and minima. values: 1, or 0 for keys alone."""
    codes = code_bytes(batch, (1 + values) * kv_heads * head_dim, tokens, bits)
    return codes + metadata_bytes(batch, kv_heads, head_dim, tokens, group, values)


class KVRead(NamedTuple):
    """What split-KV attention reads of each sequence and layer.

    bits: of the quantized tokens' codes: 4 (upper codes), 8 (upper and lower) or 0 where nothing is quantized.
    """

    quantized_tokens: Term
    full_tokens: Term
    bits: Term
    element_bytes: Term
    group: Term
    splits: Term

    @property
    def tokens(self) -> Term:
        """All tokens."""
        return self.quantized_tokens + self.full_tokens


def attention(batch: Term, queries: Term, q_heads: Term, kv_heads: Term, head_dim: Term, kv: KVRead) -> Cost:
    """Split-KV attention of `queries` tokens per sequence over quantized and full-precision tokens, merge included."""
    attending = split_attention(batch, queries, q_heads, kv_heads, head_dim, kv)
    return attending + merge(batch, queries, q_heads, head_dim, kv.splits, kv.element_bytes)


def split_attention(batch: Term, queries: Term, q_heads: Term, kv_heads: Term, head_dim: Term, kv: KVRead) -> Cost:
    """`attention` without the merge: every split writes an fp32 partial and its log-sum-exp.

    Each KV head's cache is read once for all query heads of its group and all queries.
    """
    quantized = quantized_bytes(batch, kv_heads, head_dim, kv.quantized_tokens, kv.bits, kv.group)
    full = batch * 2 * kv_heads * head_dim * kv.full_tokens * kv.element_bytes
    query = batch * queries * q_heads * head_dim * kv.element_bytes
    return Cost(
        flops=4 * batch * queries * q_heads * head_dim * kv.tokens,
        read_bytes=quantized + full + query,
        write_bytes=partial_bytes(batch, queries, q_heads, head_dim, kv.splits),
    )


def latent_attention(batch: Term, queries: Term, q_heads: Term, latent: Term, rope_dim: Term, kv: KVRead) -> Cost:
    """`attention` under MLA with absorbed projections: all heads read one latent row per token.

    Latents may be codes, as keys alone; the rotated key beside each is in full precision.
    """
    row = latent + rope_dim
    quantized = quantized_bytes(batch, 1, latent, kv.quantized_tokens, kv.bits, kv.group, 0)
    full_elements = latent * kv.full_tokens + rope_dim * kv.tokens + queries * q_heads * row
    full = batch * full_elements * kv.element_bytes
    attending = Cost(
        flops=2 * batch * queries * q_heads * (row + latent) * kv.tokens,
        read_bytes=quantized + full,
        write_bytes=partial_bytes(batch, queries, q_heads, latent, kv.splits),
    )
    return attending + merge(batch, queries, q_heads, latent, kv.splits, kv.element_bytes)


def partial_bytes(batch: Term, queries: Term, q_heads: Term, head_dim: Term, splits: Term) -> Term:
    """An fp32 partial output and its log-sum-exp per query head, query and split."""
    return batch * queries * q_heads * splits * (head_dim + 1) * PARTIAL_BYTES


def merge(batch: Term, queries: Term, q_heads: Term, head_dim: Term, splits: Term, element_bytes: Term) -> Cost:
    """Merge of all splits' partials by their log-sum-exp: a part of `attention`."""
    return Cost(
        flops=2 * batch * queries * q_heads * splits * head_dim,
        read_bytes=partial_bytes(batch, queries, q_heads, head_dim, splits),
        write_bytes=batch * queries * q_heads * head_dim * element_bytes,
    )


class PromptHeads(NamedTuple):
    """Heads of prefill attention. kv_elements: keys and values of one token."""

    q_heads: Term
    kv_elements: Term
    score_dim: Term
    value_dim: Term


def causal_attention(
    batch: Term, heads: PromptHeads, tokens: Term, element_bytes: Term, held: Term = 0, window: Term | None = None
) -> Cost:
    """Causal prefill attention (FlashAttention: scores stay on chip): half of the tokens' own pairs are masked.

    held: earlier tokens, which all of them see. window: of a sliding window each token sees at most so many tokens, of
    at most `tokens`.
    """
    width = heads.q_heads * (heads.score_dim + heads.value_dim)
    pairs = (tokens**2 + 2 * tokens * held) / 2 if window is None else tokens * window - window**2 / 2
    kv_elements, query_elements = heads.kv_elements, heads.q_heads * heads.score_dim
    return Cost(
        flops=2 * batch * width * pairs,
        read_bytes=batch * (tokens * (query_elements + kv_elements) + held * kv_elements) * element_bytes,
        write_bytes=batch * tokens * heads.q_heads * heads.value_dim * element_bytes,
    )


def quantize(
    batch: Term,
    kv_heads: Term,
    head_dim: Term,
    tokens: Term,
    element_bytes: Term,
    group: Term,
    planes: Term,
    values: Term = 1,
) -> Cost:
    """Full-precision keys and values into `planes` planes of 4-bit codes, with scales and minima.

    values: 1, or 0 for keys alone.
    """
    elements = (1 + values) * kv_heads * head_dim
    return Cost(
        flops=6 * batch * elements * tokens,
        read_bytes=batch * elements * tokens * element_bytes,
        write_bytes=quantized_bytes(batch, kv_heads, head_dim, tokens, 4 * planes, group, values),
    )


def dequantize(
    batch: Term, kv_heads: Term, head_dim: Term, tokens: Term, element_bytes: Term, group: Term, planes: Term
) -> Cost:
    """The reverse of `quantize`: one multiply-add per element."""
    encoding = quantize(batch, kv_heads, head_dim, tokens, element_bytes, group, planes)
    return Cost(4 * batch * kv_heads * head_dim * tokens, encoding.write_bytes, encoding.read_bytes)


def copy(elements: Term, element_bytes: Term) -> Cost:
    """A copy of `elements` elements, within device memory or between the device and the host."""
    moved_bytes = elements * element_bytes
    return Cost(read_bytes=moved_bytes, write_bytes=moved_bytes)


def shift_slots(
    batch: Term, kv_heads: Term, head_dim: Term, tokens: Term, element_bytes: Term, values: Term = 1
) -> Cost:
    """Move of the `tokens` most recent tokens' keys and values, or keys alone, to the front of the buffer."""
    return copy(batch * (1 + values) * kv_heads * head_dim * tokens, element_bytes)


def elementwise(rows: Term, read_width: Term, write_width: Term, element_bytes: Term) -> Cost:
    """A few operations per element read, as in look-ups and activations."""
    return Cost(4 * rows * read_width, rows * read_width * element_bytes, rows * write_width * element_bytes)


def add_rms_norm(rows: Term, width: Term, element_bytes: Term, streams: Term = 2) -> Cost:
    """Residual addition fused with RMSNorm: reads both streams, writes their sum and the normalized rows.

    With `streams` 1 there is nothing to add, and only normalized rows are written.
    """
    moved = elementwise(rows, streams * width, streams * width, element_bytes)
    return moved + Cost(read_bytes=width * element_bytes)


def swiglu(rows: Term, width: Term, element_bytes: Term) -> Cost:
    """Gated activation: gate and up, each `width` wide, to their product."""
    return elementwise(rows, 2 * width, width, element_bytes)


def rotary_tables(rows: Term, head_dim: Term) -> Cost:
    """Cosines and sines of `rows` positions, in fp32."""
    angles = rows * head_dim / 2
    return Cost(
        flops=4 * angles,
        read_bytes=rows * POSITION_BYTES + head_dim / 2 * TABLE_BYTES,
        write_bytes=2 * angles * TABLE_BYTES,
    )


def rope_append(rows: Term, width: Term, rotary_dim: Term, normed_width: Term, element_bytes: Term) -> Cost:
    """RoPE on queries and keys, fused with the append to the cache; `width` is that of queries, keys and values.

    Per token it also reads a row of both tables and a slot, and once the QK-norm weights of `normed_width`, if any.
    """
    other_bytes = rows * (rotary_dim * TABLE_BYTES + POSITION_BYTES) + normed_width * element_bytes
    return elementwise(rows, width, width, element_bytes) + Cost(read_bytes=other_bytes)


def filter_logits(rows: Term, vocab: Term, element_bytes: Term) -> Cost:
    """Statistics of each row of logits for sampling: the argmax, or maximum, cutoff and mass of top-k and top-p."""
    return Cost(LOGIT_FLOPS * rows * vocab, rows * vocab * element_bytes)


def draw(rows: Term, vocab: Term, element_bytes: Term, distributions: Term = 1) -> Cost:
    """One token per row: from one distribution, or from the residual of target and draft (2 distributions)."""
    logits = distributions * rows * vocab
    return Cost(LOGIT_FLOPS * logits, logits * element_bytes)


TOKEN_BYTES = 4  # of a token of a text, int32


def suffix_lookup(rows: Term, tokens: Term) -> Cost:
    """The search of texts of `tokens` tokens for their suffixes: almost all places differ in the first one compared."""
    return Cost(rows * tokens, rows * tokens * TOKEN_BYTES)


SCORE_BYTES = 4  # of a score, fp32
RANKING_BYTES = 40  # per token and KV head: scores, their copy in reverse, and keys and places of two sorts
SELECTED_INDEX_BYTES = 4  # of a chosen token's number, int32
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
    return Cost(scan.flops, scan.read_bytes + bins, bins + batch * kv_heads * chosen * SELECTED_INDEX_BYTES)


def page_scan(batch: Term, q_heads: Term, kv_heads: Term, head_dim: Term, pages: Term, element_bytes: Term) -> Cost:
    """Upper bounds of the scores of `pages` pages per sequence (Quest): two products per channel, one counts."""
    return Cost(
        flops=4 * batch * q_heads * head_dim * pages,
        read_bytes=2 * batch * kv_heads * head_dim * pages * element_bytes,
        write_bytes=batch * kv_heads * pages * SCORE_BYTES,
    )


def head_scores(
    batch: Term, q_heads: Term, kv_heads: Term, head_dim: Term, tokens: Term, groups: Term, element_bytes: Term
) -> Cost:
    """Probabilities of `tokens` keys, the largest of each of `groups` groups of query heads (SpeContext, section 4.3).

    Logits are written, as each is divided by the sum over all tokens, and read again.
    """
    logit_bytes = batch * q_heads * tokens * SCORE_BYTES
    return Cost(
        flops=2 * batch * q_heads * head_dim * tokens,
        read_bytes=batch * (kv_heads * tokens + q_heads) * head_dim * element_bytes + logit_bytes,
        write_bytes=logit_bytes + batch * groups * tokens * SCORE_BYTES,
    )


def top_k(rows: Term, scores: Term, chosen: Term) -> Cost:
    """The choice of `chosen` of `scores` scores in each row; the scores are read once a pass."""
    return Cost(
        flops=TOP_K_PASSES * rows * scores,
        read_bytes=TOP_K_PASSES * rows * scores * SCORE_BYTES,
        write_bytes=rows * chosen * SELECTED_INDEX_BYTES,
    )


def allocate_slots(batch: Term, sets: Term, chosen: Term, slots: Term) -> Cost:
    """Slots of `chosen` tokens of each set, where all of them are there: two lists, and the times of use of `slots`."""
    lists = 2 * batch * sets * chosen * SELECTED_INDEX_BYTES
    return Cost(read_bytes=lists + batch * sets * slots * SELECTED_INDEX_BYTES, write_bytes=lists)


def sparse_attention(
    batch: Term, queries: Term, q_heads: Term, kv_heads: Term, head_dim: Term, kv: KVRead, entries: Term
) -> Cost:
    """Split-KV attention to chosen tokens of each KV head and to all recent ones, without the merge.

    kv: `quantized_tokens` are those chosen, also where `bits` is 0 and they are in full precision. entries: of all
    index lists. A chosen token costs its own codes, scale and minimum, and its share of its group's key scales,
    whatever else its sectors hold.
    """
    full = batch * 2 * kv_heads * head_dim * kv.full_tokens * kv.element_bytes
    query = batch * queries * q_heads * head_dim * kv.element_bytes
    if kv.bits == 0:
        chosen = batch * 2 * kv_heads * head_dim * kv.quantized_tokens * kv.element_bytes
    else:
        chosen = quantized_bytes(batch, kv_heads, head_dim, kv.quantized_tokens, kv.bits, kv.group)
    return Cost(
        flops=4 * batch * queries * q_heads * head_dim * kv.tokens,
        read_bytes=full + query + chosen + entries * SELECTED_INDEX_BYTES,
        write_bytes=partial_bytes(batch, queries, q_heads, head_dim, kv.splits),
    )


def progressive_attention(
    batch: Term, q_heads: Term, kv_heads: Term, head_dim: Term, scanned: Term, kv: KVRead
) -> Cost:
    """A query's scan of `scanned` 2-bit keys, and attention to the tokens it ranks first, in one kernel.

    kv: as for `sparse_attention`. Scores and choices stay in shared memory.
    """
    scan = two_bit_scan(batch, q_heads, kv_heads, head_dim, scanned, kv.group)
    return Cost(scan.flops, scan.read_bytes) + sparse_attention(batch, 1, q_heads, kv_heads, head_dim, kv, 0)


def collect_scores(
    batch: Term, q_heads: Term, kv_heads: Term, tokens: Term, summed: Term, relative: Term, stored: Term = 1
) -> Cost:
    """What attention adds to leave `stored` scores of each of `tokens` tokens per KV head, over `summed` queries.

    relative: 1 for probabilities, whose log-sum-exps are read and written; 0 for logits.
    """
    lse_bytes = relative * batch * q_heads * SCORE_BYTES
    return Cost(
        flops=2 * batch * q_heads * summed * tokens,
        read_bytes=lse_bytes,
        write_bytes=batch * kv_heads * tokens * stored * SCORE_BYTES + lse_bytes,
    )


def eviction_scores(pairs: Term, head_dim: Term, tokens: Term, element_bytes: Term) -> Cost:
    """Logits of `pairs` pairs of a query and a token of one KV head, written in full precision."""
    return Cost(2 * pairs * head_dim, tokens * head_dim * element_bytes, pairs * element_bytes)


def eviction_softmax(pairs: Term, tokens: Term, element_bytes: Term) -> Cost:
    """Logits to probabilities, summed over queries; then the ranking of one KV head's `tokens` tokens."""
    ranked_bytes = tokens * RANKING_BYTES
    return Cost(
        flops=4 * pairs,
        read_bytes=pairs * (element_bytes + SCORE_BYTES) + ranked_bytes,
        write_bytes=pairs * SCORE_BYTES + ranked_bytes,
    )
