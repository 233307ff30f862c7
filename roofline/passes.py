"""The operations of one forward pass of a decoder: a decode step, a verification, or prefill.

A pass is a tuple of `Op`. Formats and selections only change the terms; the code branches only on the model's
structure: experts, latent attention, a sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.model_shape import FULL_BITS, ModelShape
from ridgeplan.roofline.cost import Cost, Term, minimum
from ridgeplan.roofline.execution import attention_tiles, many_channels, product_tiles

WINDOWED_ATTENTION = "attention (window)"  # `Op.name` of attention in layers with a sliding window
MANY_CHANNELS = "linear, many channels"  # `Op.rate_kind` of such products


@dataclass(frozen=True)
class Op:
    """One kind of launch in a pass: the cost of one, their number, and the kernel class that sets their rates.

    width and depth: what `ridgeplan.roofline.catalog.profile.Rates` says of them; 0 where the class has no such time.

    The kinds `linear`, `head`, `attention` and `prefill_attention` stand for the class of the weights or codes that the
    pass reads and of its heads, such as `linear_int4` or `attention_int8_d64`.
    """

    name: str
    kind: str
    cost: Cost
    launches: Term
    width: Term = 0
    depth: Term = 0

    @property
    def total(self) -> Cost:
        """The cost of all launches together."""
        return self.cost * self.launches

    @property
    def tiles(self) -> Term:
        """Tiles of one launch on all SMs."""
        return tiles(self.kind, self.width, self.depth)

    @property
    def rate_kind(self) -> str:
        """The kind by which a pass finds its rates: dense products of many channels may have some of their own."""
        return MANY_CHANNELS if many_channels(self.kind, self.width, self.depth) else self.kind

    @property
    def category(self) -> str:
        """ "linear", "attention" or "other": QuantSpec's split of a transformer's operations (section 3.1)."""
        return category(self.kind)


def category(kind: str) -> str:
    """The category of a kernel class: "linear", "attention" or "other"."""
    if "attention" in kind:
        return "attention"
    return "linear" if "linear" in kind or kind == "head" else "other"


def tiles(kind: str, width: Term, depth: Term) -> Term:
    """Tiles of a call of a kernel class; 0 where it has no width or depth, or neither is a weight's nor a cache's."""
    count = {"linear": product_tiles, "attention": attention_tiles}.get(category(kind))
    return 0 if count is None else count(width, depth)


@dataclass(frozen=True)
class PassTerms:
    """What one decode pass processes and reads. Lengths are in tokens, per sequence and layer."""

    batch: Term
    queries: Term  # tokens per sequence that the pass processes
    quantized_tokens: Term  # read as codes
    full_tokens: Term  # read in full precision, including those of the pass
    bits: Term  # bits per code: 4, 8, or 0 without codes
    group: Term
    splits: Term
    weight_bytes: Term  # per parameter of a linear layer, with scales and minima
    head_bytes: Term  # per parameter of the output head
    element_bytes: Term
    fused_swiglu: Term = 0  # 1 where the gate and up product applies SwiGLU
    reads: Term = 1  # of KV: once for all queries, or by each query for itself

    @classmethod
    def plain(cls, batch: Term, tokens: Term, element_bytes: Term, **others: Term) -> PassTerms:
        """A step of plain decoding: one query per sequence, and everything in full precision."""
        terms = {"queries": 1, "quantized_tokens": 0, "bits": 0, "group": 1, "splits": 1} | others
        widths = dict.fromkeys(("weight_bytes", "head_bytes", "element_bytes"), element_bytes)
        return cls(batch=batch, full_tokens=tokens, **terms, **widths)

    @property
    def rows(self) -> Term:
        """Rows of every linear layer's input."""
        return self.batch * self.queries


def weight_bytes(bits: int, group: int, full_bytes: float) -> float:
    """Bytes per parameter: `full_bytes` at 16 bits, else a code and its share of a scale and a zero of 16 bits.

    8-bit weights are two planes of 4 bits, each with scales and zeros of its own.
    """
    return full_bytes if bits == 16 else bits / 8 + bits // 4 * 2 * ops.METADATA_BYTES / group


def stored_bytes(bits: float, weight_bytes: Term) -> Term:
    """Bytes per parameter of a part that a plan stores in `weight_bytes`: fewer where the checkpoint has fewer bits."""
    return weight_bytes if bits == FULL_BITS else minimum(weight_bytes, bits / 8)


def decode_pass(shape: ModelShape, terms: PassTerms) -> tuple[Op, ...]:
    """All operations of one forward pass of `terms.queries` tokens per sequence through the whole model."""
    return (
        _embedding(shape, terms.rows, terms.element_bytes),
        *_attention_linears(shape, terms.rows, terms.weight_bytes, terms.element_bytes),
        *_rope(shape, terms.rows, terms.element_bytes),
        *_attention(shape, terms),
        *_mlps(shape, terms.rows, terms.weight_bytes, terms.element_bytes, terms.fused_swiglu),
        *_norms(shape, terms.rows, terms.element_bytes),
        _head(shape, terms.rows, terms.head_bytes, terms.element_bytes),
    )


def prefill_pass(
    shape: ModelShape,
    batch: Term,
    tokens: Term,
    element_bytes: Term,
    weight_bytes: Term | None = None,
    head_bytes: Term | None = None,
    held: Term = 0,
) -> tuple[Op, ...]:
    """All operations of prefill: every token of the prompt, logits of the last one only.

    `weight_bytes` per parameter of a linear layer, and `head_bytes` of the head, default to `element_bytes`. held:
    tokens of earlier chunks that the prompt's attend to.
    """
    rows, weight_bytes = batch * tokens, element_bytes if weight_bytes is None else weight_bytes
    head_bytes = element_bytes if head_bytes is None else head_bytes
    return (
        _embedding(shape, rows, element_bytes),
        *_attention_linears(shape, rows, weight_bytes, element_bytes),
        *_rope(shape, rows, element_bytes),
        *_prefill_attention(shape, batch, tokens, element_bytes, held),
        *_mlps(shape, rows, weight_bytes, element_bytes, fused_swiglu=0),
        *_norms(shape, rows, element_bytes),
        _head(shape, batch, head_bytes, element_bytes),
    )


def windowed(terms: PassTerms, window_tokens: Term) -> PassTerms:
    """What a sliding-window layer reads: the latest tokens, of which those in full precision come last."""
    full = minimum(terms.full_tokens, window_tokens)
    return replace(terms, full_tokens=full, quantized_tokens=minimum(terms.quantized_tokens, window_tokens - full))


def _embedding(shape: ModelShape, rows: Term, element_bytes: Term) -> Op:
    return Op("embedding", "elementwise", ops.elementwise(rows, shape.hidden, shape.hidden, element_bytes), 1)


def _norms(shape: ModelShape, rows: Term, element_bytes: Term) -> tuple[Op, ...]:
    """RMSNorm before every block and before the head; all but the first are fused with a residual addition.

    Norms after blocks add nothing: they read and write the block's output alone.
    """
    first = ops.add_rms_norm(rows, shape.hidden, element_bytes, streams=1)
    others = ops.add_rms_norm(rows, shape.hidden, element_bytes)
    return (
        Op("first norm", "elementwise", first, 1),
        Op("residual + norm", "elementwise", others, 2 * shape.layers),
        *((Op("block norms", "elementwise", first, 2 * shape.layers),) if shape.sandwich_norms else ()),
    )


def _rope(shape: ModelShape, rows: Term, element_bytes: Term) -> tuple[Op, ...]:
    """Rotary tables once a pass; RoPE with the append to the cache in every layer."""
    rotary_dim = shape.rope_head_dim or shape.head_dim
    width = shape.q_width + shape.kv_elements_per_token_per_layer
    normed_width = shape.q_width + shape.kv_width if shape.qk_norm else 0
    append = ops.rope_append(rows, width, rotary_dim, normed_width, element_bytes)
    return (
        Op("rotary tables", "elementwise", ops.rotary_tables(rows, rotary_dim), 1),
        Op("rope + append", "rope", append, shape.layers),
    )


def _attention_linears(shape: ModelShape, rows: Term, weight_bytes: Term, element_bytes: Term) -> tuple[Op, ...]:
    """The QKV and output projections; under MLA a chain of factors counts as one projection of its parameters."""
    out_inputs = shape.q_heads * (shape.v_head_dim or shape.head_dim)
    out_params = out_inputs * shape.hidden
    in_params = shape.attention_params_per_layer - out_params
    in_outputs = shape.q_width + shape.kv_elements_per_token_per_layer
    weight_bytes = stored_bytes(shape.weight_bits.attention, weight_bytes)
    project = ops.matmul(rows, shape.hidden, in_outputs, in_params, weight_bytes, element_bytes)
    output = ops.matmul(rows, out_inputs, shape.hidden, out_params, weight_bytes, element_bytes)
    return (
        Op("qkv projection", "linear", project, shape.layers, in_outputs, shape.hidden),
        Op("output projection", "linear", output, shape.layers, shape.hidden, out_inputs),
    )


def _mlps(shape: ModelShape, rows: Term, weight_bytes: Term, element_bytes: Term, fused_swiglu: Term) -> tuple[Op, ...]:
    dense_layers = shape.layers - shape.moe_layers
    sizes = rows, stored_bytes(shape.weight_bits.mlp, weight_bytes), element_bytes
    dense = _gated_mlp("mlp", shape.hidden, shape.intermediate, dense_layers, *sizes, fused_swiglu)
    if not shape.is_moe:
        return dense
    router = ops.linear(rows, shape.hidden, shape.experts, element_bytes, element_bytes)
    counts = shape.expert_params, shape.experts, shape.experts_per_token
    expert_bytes = stored_bytes(shape.weight_bits.experts, weight_bytes)
    routed = ops.experts(rows, shape.hidden, *counts, expert_bytes, element_bytes)
    width = shape.shared_experts_intermediate
    shared = _gated_mlp("shared experts", shape.hidden, width, shape.moe_layers, *sizes, fused_swiglu)
    return (
        *(dense if shape.dense_layers else ()),
        Op("router", "linear", router, shape.moe_layers, shape.experts, shape.hidden),
        Op("routed experts", "grouped_linear", routed, shape.moe_layers),
        *(shared if width else ()),
    )


def _gated_mlp(
    name: str,
    hidden: Term,
    width: Term,
    layers: Term,
    rows: Term,
    weight_bytes: Term,
    element_bytes: Term,
    fused_swiglu: Term,
) -> tuple[Op, ...]:
    gate_up = ops.gated_linear(rows, hidden, width, weight_bytes, element_bytes, fused_swiglu)
    down = ops.linear(rows, width, hidden, weight_bytes, element_bytes)
    swiglu = ops.swiglu(rows, width, element_bytes)
    return (
        Op(f"{name} gate + up", "linear", gate_up, layers, 2 * width, hidden),
        Op(f"{name} swiglu", "elementwise", swiglu, layers * (1 - fused_swiglu)),
        Op(f"{name} down", "linear", down, layers, hidden, width),
    )


def _head(shape: ModelShape, rows: Term, head_bytes: Term, element_bytes: Term) -> Op:
    """The output head, at `head_bytes` per parameter."""
    cost = ops.linear(rows, shape.hidden, shape.vocab, head_bytes, element_bytes)
    return Op("lm head", "head", cost, 1, shape.vocab, shape.hidden)


def _attention(shape: ModelShape, terms: PassTerms) -> tuple[Op, ...]:
    """Decode attention of layers that read all tokens and of layers with a sliding window."""
    full = _attention_op("attention", shape, terms, shape.layers - shape.window_layers)
    if shape.window_tokens is None:
        return (full,)
    return full, _attention_op(WINDOWED_ATTENTION, shape, windowed(terms, shape.window_tokens), shape.window_layers)


def _attention_op(name: str, shape: ModelShape, terms: PassTerms, layers: Term) -> Op:
    kind = "attention_mla" if shape.is_mla else "attention"
    tokens = terms.quantized_tokens + terms.full_tokens
    launches, rows = layers * terms.reads, terms.batch * shape.cached_rows
    return Op(name, kind, _attention_cost(shape, terms), launches, rows, tokens)


def _attention_cost(shape: ModelShape, terms: PassTerms) -> Cost:
    """One read of a layer's KV by decode attention."""
    query_sizes = terms.batch, terms.queries / terms.reads, shape.q_heads
    tokens = terms.quantized_tokens, terms.full_tokens
    kv = ops.KVRead(*tokens, terms.bits, terms.element_bytes, terms.group, terms.splits)
    if shape.is_mla:
        rope_dim = shape.score_dim - shape.value_dim
        return ops.latent_attention(*query_sizes, shape.value_dim, rope_dim, shape.head_dim, kv)
    return ops.attention(*query_sizes, shape.kv_heads, shape.head_dim, kv)


def _prefill_attention(shape: ModelShape, batch: Term, tokens: Term, element_bytes: Term, held: Term) -> tuple[Op, ...]:
    """FlashAttention over the prompt; under MLA with per-head keys and values, not absorbed."""
    value_dim = shape.v_head_dim or shape.head_dim
    kv_elements = shape.kv_heads * (shape.head_dim + value_dim)
    heads = ops.PromptHeads(shape.q_heads, kv_elements, shape.head_dim, value_dim)
    causal = ops.causal_attention(batch, heads, tokens, element_bytes, held)
    layers = shape.layers - shape.window_layers
    everything = (Op("prefill attention", "prefill_attention", causal, layers),)
    if not shape.window_layers:
        return everything
    window = minimum(tokens, shape.window_tokens)
    windowed = ops.causal_attention(batch, heads, tokens, element_bytes, window=window)
    return (*everything, Op("prefill attention (window)", "prefill_attention", windowed, shape.window_layers))
