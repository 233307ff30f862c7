"""The cost of every operation of a decoder, each formula once.

Every function is plain arithmetic over its arguments, so it takes ints (and then equals what the kernel of the
same name declares, which a test holds), numpy arrays (a sweep) or sympy symbols (printed, solved, lambdified).
`element_bytes` is the size of a full-precision element: 2 for bf16 on a GPU, 4 for fp32 on a CPU.
"""

from __future__ import annotations

from ridgeplan.roofline.cost import Cost, Term

METADATA_BYTES = 2  # one fp16 scale or minimum
PARTIAL_BYTES = 4  # split-KV partial outputs and their log-sum-exp are fp32
LOGIT_FLOPS = 5  # of each logit that sampling reads: difference, scaling, exponential, comparison and sum
TABLE_BYTES = 4  # a cosine or sine is fp32
INDEX_BYTES = 8  # positions and slots are int64


def linear(rows: Term, inputs: Term, outputs: Term, weight_bytes: Term, element_bytes: Term) -> Cost:
    """`rows x inputs` activations times an `inputs x outputs` weight of `weight_bytes` per parameter."""
    return matmul(rows, inputs, outputs, inputs * outputs, weight_bytes, element_bytes)


def gated_linear(
    rows: Term, inputs: Term, outputs: Term, weight_bytes: Term, element_bytes: Term, fused: Term = 1
) -> Cost:
    """Two such weights, gate and up, whose products leave as one activated `rows x outputs`, or where `fused` is 0 as
    they are."""
    return matmul(rows, inputs, (2 - fused) * outputs, 2 * inputs * outputs, weight_bytes, element_bytes)


def matmul(rows: Term, inputs: Term, outputs: Term, params: Term, weight_bytes: Term, element_bytes: Term) -> Cost:
    """A projection of `params` parameters, which MLA's chain of factors makes fewer than inputs x outputs."""
    return Cost(
        flops=2 * rows * params,
        read_bytes=params * weight_bytes + rows * inputs * element_bytes,
        write_bytes=rows * outputs * element_bytes,
    )


def touched_experts(experts: Term, per_token: Term, rows: Term) -> Term:
    """Expected number of distinct experts that `rows` tokens route to, each choosing `per_token` of `experts`.

    With routing uniform and independent an expert is missed by all rows with probability (1 - k/E)^rows.
    """
    return experts * (1 - (1 - per_token / experts) ** rows)


def experts(
    rows: Term,
    hidden: Term,
    expert_params: Term,
    count: Term,
    per_token: Term,
    weight_bytes: Term,
    element_bytes: Term,
) -> Cost:
    """Routed experts of a mixture-of-experts layer: weights of the touched ones, FLOPs of the active ones."""
    return Cost(
        flops=2 * rows * per_token * expert_params,
        read_bytes=touched_experts(count, per_token, rows) * expert_params * weight_bytes
        + rows * hidden * element_bytes,
        write_bytes=rows * hidden * element_bytes,
    )


def code_bytes(batch: Term, kv_elements: Term, tokens: Term, bits: Term) -> Term:
    """Bytes of `bits`-bit codes for `tokens` tokens of `kv_elements` elements each."""
    return batch * kv_elements * tokens * bits / 8


def metadata_bytes(batch: Term, kv_heads: Term, head_dim: Term, tokens: Term, group: Term) -> Term:
    """Scales and minima: keys per channel per group of tokens, values per token (QuantSpec, section 4.3)."""
    keys = tokens / group * head_dim * 2 * METADATA_BYTES
    values = tokens * 2 * METADATA_BYTES
    return batch * kv_heads * (keys + values)


def quantized_bytes(batch: Term, kv_heads: Term, head_dim: Term, tokens: Term, bits: Term, group: Term) -> Term:
    """Codes of `tokens` tokens with their scales and minima."""
    codes = code_bytes(batch, 2 * kv_heads * head_dim, tokens, bits)
    return codes + metadata_bytes(batch, kv_heads, head_dim, tokens, group)


def attention(
    batch: Term,
    queries: Term,
    q_heads: Term,
    kv_heads: Term,
    head_dim: Term,
    quantized_tokens: Term,
    full_tokens: Term,
    bits: Term,
    element_bytes: Term,
    group: Term,
    splits: Term,
) -> Cost:
    """Split-KV attention of `queries` tokens per sequence over quantized and full-precision tokens, merge included.

    `bits` is 4 (upper codes), 8 (upper and lower) or 0 where nothing is quantized. Each KV head's cache is read
    once for all query heads of its group and all queries. Every split writes an fp32 partial and its log-sum-exp.
    """
    quantized = quantized_bytes(batch, kv_heads, head_dim, quantized_tokens, bits, group)
    full = batch * 2 * kv_heads * head_dim * full_tokens * element_bytes
    query = batch * queries * q_heads * head_dim * element_bytes
    attending = Cost(
        flops=4 * batch * queries * q_heads * head_dim * (quantized_tokens + full_tokens),
        read_bytes=quantized + full + query,
        write_bytes=partial_bytes(batch, queries, q_heads, head_dim, splits),
    )
    return attending + merge(batch, queries, q_heads, head_dim, splits, element_bytes)


def latent_attention(
    batch: Term,
    queries: Term,
    q_heads: Term,
    latent: Term,
    rope_dim: Term,
    head_dim: Term,
    quantized_tokens: Term,
    full_tokens: Term,
    bits: Term,
    element_bytes: Term,
    group: Term,
    splits: Term,
) -> Cost:
    """As `attention`, multi-head latent with absorbed projections: all heads read one latent row per token.

    Codes of a row have scales and minima as those of row / (2 x head_dim) heads of keys and values would.
    """
    row = latent + rope_dim
    quantized = quantized_bytes(batch, row / (2 * head_dim), head_dim, quantized_tokens, bits, group)
    full = (batch * row * full_tokens + batch * queries * q_heads * row) * element_bytes
    attending = Cost(
        flops=2 * batch * queries * q_heads * (row + latent) * (quantized_tokens + full_tokens),
        read_bytes=quantized + full,
        write_bytes=partial_bytes(batch, queries, q_heads, latent, splits),
    )
    return attending + merge(batch, queries, q_heads, latent, splits, element_bytes)


def partial_bytes(batch: Term, queries: Term, q_heads: Term, head_dim: Term, splits: Term) -> Term:
    """fp32 partial outputs and one log-sum-exp per query head, query and split."""
    return batch * queries * q_heads * splits * (head_dim + 1) * PARTIAL_BYTES


def merge(batch: Term, queries: Term, q_heads: Term, head_dim: Term, splits: Term, element_bytes: Term) -> Cost:
    """Merge of all splits' partials by their log-sum-exp: a part of `attention`."""
    return Cost(
        flops=2 * batch * queries * q_heads * splits * head_dim,
        read_bytes=partial_bytes(batch, queries, q_heads, head_dim, splits),
        write_bytes=batch * queries * q_heads * head_dim * element_bytes,
    )


def causal_attention(
    batch: Term,
    q_heads: Term,
    kv_elements: Term,
    score_dim: Term,
    value_dim: Term,
    tokens: Term,
    element_bytes: Term,
) -> Cost:
    """Prefill attention (FlashAttention: scores stay on chip); half of all query-key pairs are masked away."""
    width = q_heads * (score_dim + value_dim)
    return Cost(
        flops=batch * width * tokens**2,
        read_bytes=batch * tokens * (q_heads * score_dim + kv_elements) * element_bytes,
        write_bytes=batch * tokens * q_heads * value_dim * element_bytes,
    )


def windowed_attention(
    batch: Term,
    q_heads: Term,
    kv_elements: Term,
    score_dim: Term,
    value_dim: Term,
    tokens: Term,
    window: Term,
    element_bytes: Term,
) -> Cost:
    """Prefill attention where a token sees at most `window` tokens; `window <= tokens`."""
    causal = causal_attention(batch, q_heads, kv_elements, score_dim, value_dim, tokens, element_bytes)
    pairs = tokens * window - window**2 / 2
    width = q_heads * (score_dim + value_dim)
    return Cost(2 * batch * width * pairs, causal.read_bytes, causal.write_bytes)


def quantize(
    batch: Term, kv_heads: Term, head_dim: Term, tokens: Term, element_bytes: Term, group: Term, planes: Term
) -> Cost:
    """Full-precision keys and values to `planes` planes of 4-bit codes with scales and minima."""
    elements = 2 * kv_heads * head_dim
    return Cost(
        flops=6 * batch * elements * tokens,
        read_bytes=batch * elements * tokens * element_bytes,
        write_bytes=quantized_bytes(batch, kv_heads, head_dim, tokens, 4 * planes, group),
    )


def shift_slots(batch: Term, kv_heads: Term, head_dim: Term, tokens: Term, element_bytes: Term) -> Cost:
    """Keys and values of `tokens` recent tokens move to the front of the buffer."""
    moved_bytes = batch * 2 * kv_heads * head_dim * tokens * element_bytes
    return Cost(read_bytes=moved_bytes, write_bytes=moved_bytes)


def elementwise(rows: Term, read_width: Term, write_width: Term, element_bytes: Term) -> Cost:
    """A few operations on each element read: look-ups, activations, the moving part of norms and rotation."""
    return Cost(4 * rows * read_width, rows * read_width * element_bytes, rows * write_width * element_bytes)


def add_rms_norm(rows: Term, width: Term, element_bytes: Term, streams: Term = 2) -> Cost:
    """Residual addition and RMSNorm, fused: both streams are read, the sum and the normed rows written.

    With `streams` 1 nothing is added, and only the normed rows are written.
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
        read_bytes=rows * INDEX_BYTES + head_dim / 2 * TABLE_BYTES,
        write_bytes=2 * angles * TABLE_BYTES,
    )


def rope_append(rows: Term, width: Term, rotary_dim: Term, normed_width: Term, element_bytes: Term) -> Cost:
    """Rotation of queries and keys, and the append of keys and values: `width` is that of all three together.

    Reads a row of both tables and a slot per token, and the weights of `normed_width` queries and keys, if any.
    """
    beside = rows * (rotary_dim * TABLE_BYTES + INDEX_BYTES) + normed_width * element_bytes
    return elementwise(rows, width, width, element_bytes) + Cost(read_bytes=beside)


def filter_logits(rows: Term, vocab: Term, element_bytes: Term) -> Cost:
    """What rows of logits are drawn from: the likeliest token, or peak, cutoff and mass under top-k and top-p."""
    return Cost(LOGIT_FLOPS * rows * vocab, rows * vocab * element_bytes)


def draw(rows: Term, vocab: Term, element_bytes: Term, distributions: Term = 1) -> Cost:
    """One token per row: of a distribution, or of what the target's exceeds the draft's by (2 distributions)."""
    logits = distributions * rows * vocab
    return Cost(LOGIT_FLOPS * logits, logits * element_bytes)


def gptq_round(outputs: Term, group: Term) -> Cost:
    """Codes and errors of a group's weights in float32, rounded one input after another: loading, not a pass."""
    elements = outputs * group
    return Cost(
        flops=elements * (group - 1) + 3 * elements,
        read_bytes=4 * (elements + group * group),
        write_bytes=2 * 4 * elements,
    )
