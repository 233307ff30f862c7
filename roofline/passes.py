"""The operations of one forward pass of a decoder: a decode step, a verification, or prefill.

A pass is a tuple of `Op`. Formats and selections only change the terms; the code branches only on what a layer is
(`roofline/catalog/layers.py`): attention, latent or within a window, a recurrent state, experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.layers import DELTA_RULE, MLP, STATE_FLOPS, Attention, State
from ridgeplan.roofline.catalog.model_shape import FULL_BITS, ModelShape
from ridgeplan.roofline.cost import Cost, Term, indicator, is_symbolic, minimum
from ridgeplan.roofline.execution import attention_tiles, many_channels, product_tiles

WINDOWED_ATTENTION = "attention (window)"  # `Op.name` of attention in layers with a sliding window
MIXER_PRODUCTS = ("qkv projection", "output projection", "state projections", "state output")  # in attention's bits
# `Op.name` of what the runtime computes in plain torch (`roofline/torch_prompts.py`).
STATES_IN_TORCH, SOFTMAX_IN_TORCH = "state chunks (torch)", "prefill attention (torch)"
STATES_IN_KERNELS = "state chunks (kernels)"  # with the convolution, in place of torch on a GPU
SINKS_IN_FLASH = "prefill attention (sinks)"  # in place of a faster library's, which takes no sinks
# Found by their names.
NAMED_RATES = (WINDOWED_ATTENTION, STATES_IN_TORCH, STATES_IN_KERNELS, SOFTMAX_IN_TORCH, SINKS_IN_FLASH)
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
        """The kind by which a pass finds its rates: dense products of many channels and others may have their own."""
        if self.name in NAMED_RATES:
            return self.name
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
    replayed: Term = 1  # tokens per sequence that recurrent states go through again
    commits: Term = 1  # 1 where a pass writes the states
    held: Term | None = None  # that layers hold whose sliding window keeps full precision and is read whole

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
        *_states(shape, terms.rows, terms.weight_bytes, terms.element_bytes),
        *_state_updates(shape, terms),
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
        *_states(shape, rows, weight_bytes, element_bytes),
        *_state_chunks(shape, batch, tokens, element_bytes),
        *_mlps(shape, rows, weight_bytes, element_bytes, fused_swiglu=0),
        *_norms(shape, rows, element_bytes),
        _head(shape, batch, head_bytes, element_bytes),
    )


def windowed(terms: PassTerms, window_tokens: Term) -> PassTerms:
    """What a sliding-window layer reads: the latest tokens, of which those in full precision come last.

    With `terms.held`, a layer whose window hides tokens holds no codes, and no policy chooses among what it holds.
    """
    full = minimum(terms.full_tokens, window_tokens)
    codes = minimum(terms.quantized_tokens, window_tokens - full)
    if terms.held is not None:
        hides = indicator(window_tokens + 1, terms.held)
        full, codes = hides * window_tokens + (1 - hides) * full, (1 - hides) * codes
    return replace(terms, full_tokens=full, quantized_tokens=codes)


def _embedding(shape: ModelShape, rows: Term, element_bytes: Term) -> Op:
    return Op("embedding", "elementwise", ops.elementwise(rows, shape.hidden, shape.hidden, element_bytes), 1)


def _norms(shape: ModelShape, rows: Term, element_bytes: Term) -> tuple[Op, ...]:
    """RMSNorm before every block and before the head; all but the first are fused with a residual addition.

    Norms after blocks add nothing: they read and write the block's output alone.
    """
    first = ops.add_rms_norm(rows, shape.hidden, element_bytes, streams=1)
    others = ops.add_rms_norm(rows, shape.hidden, element_bytes)
    after = shape.norms - shape.blocks if shape.sandwich_norms else 0
    return (
        Op("first norm", "elementwise", first, 1),
        Op("residual + norm", "elementwise", others, shape.blocks),
        *((Op("block norms", "elementwise", first, after),) if shape.sandwich_norms else ()),
    )


def _rope(shape: ModelShape, rows: Term, element_bytes: Term) -> Iterator[Op]:
    """Rotary tables once a pass; RoPE with the append to the cache in every layer with attention."""
    rotary_dim = max((attention.rotary_dim for attention, _ in shape.projections), default=0, key=_size)
    yield Op("rotary tables", "elementwise", ops.rotary_tables(rows, rotary_dim), 1)
    for attention, layers in shape.projections:
        if attention.is_latent:  # only channels with RoPE, and the latents' norm
            width = attention.q_heads * attention.rotary_dim + attention.cached_elements
            normed_width = attention.latent_rank or 0
        else:
            width = attention.q_width + attention.cached_elements
            normed_width = attention.q_width + attention.kv_width if shape.qk_norm else 0
        append = ops.rope_append(rows, width, attention.rotary_dim, normed_width, element_bytes)
        yield Op("rope + append", "rope", append, layers)


def _size(term: Term) -> float:
    """A number by which sizes are compared; symbols, of which a shape has one, count as 0."""
    return 0.0 if is_symbolic(term) else float(term)


def _attention_linears(shape: ModelShape, rows: Term, weight_bytes: Term, element_bytes: Term) -> Iterator[Op]:
    """The QKV and output projections; under MLA a chain of factors counts as one projection of its parameters."""
    weight_bytes = stored_bytes(shape.weight_bits.attention, weight_bytes)
    for attention, layers in shape.projections:
        sizes = shape.hidden, attention.in_width, attention.q_heads * attention.output_head_dim
        params = attention.input_params(shape.hidden), attention.output_params(shape.hidden)
        params = params[0] - attention.factor_params, params[1]
        yield from _projections(MIXER_PRODUCTS[:2], layers, rows, *sizes, *params, weight_bytes, element_bytes)
        if attention.is_latent:
            yield from _latent_products(attention, layers, rows, element_bytes)
        if attention.gate_width:
            gated = ops.elementwise(rows, 2 * attention.gate_width, attention.gate_width, element_bytes)
            yield Op("output gate", "elementwise", gated, layers)


def _latent_products(attention: Attention, layers: Term, rows: Term, element_bytes: Term) -> Iterator[Op]:
    """Under MLA the products of queries with the projection to keys, and of outputs with that to values."""
    heads, latent = attention.q_heads, attention.latent_rank or 0
    for name, inputs, outputs in (
        ("latent products (keys)", attention.nope_head_dim or 0, latent),
        ("latent products (values)", latent, attention.output_head_dim),
    ):
        sizes = heads * inputs, heads * outputs, heads * inputs * outputs
        cost = ops.matmul(rows, *sizes, element_bytes, element_bytes)
        yield Op(name, "linear", cost, layers, heads * outputs, inputs)


def _projections(
    names: tuple[str, str],
    layers: Term,
    rows: Term,
    hidden: Term,
    in_outputs: Term,
    out_inputs: Term,
    in_params: Term,
    out_params: Term,
    weight_bytes: Term,
    element_bytes: Term,
) -> Iterator[Op]:
    """The product ahead of attention or a state, and the one behind it."""
    project = ops.matmul(rows, hidden, in_outputs, in_params, weight_bytes, element_bytes)
    output = ops.matmul(rows, out_inputs, hidden, out_params, weight_bytes, element_bytes)
    yield Op(names[0], "linear", project, layers, in_outputs, hidden)
    yield Op(names[1], "linear", output, layers, hidden, out_inputs)


def state_sizes(state: State) -> ops.StateSizes:
    """A state's sizes as the formulas take them."""
    return ops.StateSizes(
        flops=STATE_FLOPS[state.rule],
        delta=int(state.rule == DELTA_RULE),
        elements=state.elements,
        state_bytes=state.bytes_per_element,
        channels=state.channels,
        taps=state.conv_width,
        decays=state.decays if state.gate_rank else 0,
        scalars=state.scalars,
        outputs=state.value_width,
    )


def _states(shape: ModelShape, rows: Term, weight_bytes: Term, element_bytes: Term) -> Iterator[Op]:
    """Of layers with a recurrent state all but the recurrence: projections and gated norm."""
    weight_bytes = stored_bytes(shape.weight_bits.attention, weight_bytes)
    for state, layers in shape.states:
        params = state.input_params(shape.hidden), state.output_params(shape.hidden)
        sizes = shape.hidden, state.in_width, state.value_width
        yield from _projections(MIXER_PRODUCTS[2:], layers, rows, *sizes, *params, weight_bytes, element_bytes)
        gated = ops.gated_norm(rows, state.value_heads, state.value_dim, element_bytes)
        yield Op("gated norm", "elementwise", gated, layers)


def _state_updates(shape: ModelShape, terms: PassTerms) -> Iterator[Op]:
    """The recurrent update by token, of as many sequences as there are: a stream of the states."""
    for state, layers in shape.states:
        steps = terms.queries, terms.replayed, terms.commits
        update = ops.state_update(terms.batch, *steps, state_sizes(state), terms.element_bytes)
        yield Op("state update", "state", update, layers)


def _state_chunks(shape: ModelShape, batch: Term, tokens: Term, element_bytes: Term) -> Iterator[Op]:
    """The recurrence over a prompt, in chunks, and the convolution ahead of it."""
    for state, layers in shape.states:
        convolution = ops.short_convolution(batch * tokens, batch, state_sizes(state), element_bytes)
        yield Op("short convolution", "elementwise", convolution, layers)
        heads = state.value_heads, state.key_dim, state.value_dim
        cost = ops.state_chunks(batch, tokens, *heads, state_sizes(state), element_bytes)
        yield Op("state chunks", "prefill_attention", cost, layers)


def _mlps(shape: ModelShape, rows: Term, weight_bytes: Term, element_bytes: Term, fused_swiglu: Term) -> Iterator[Op]:
    sizes = rows, stored_bytes(shape.weight_bits.mlp, weight_bytes), element_bytes
    expert_bytes = stored_bytes(shape.weight_bits.experts, weight_bytes)
    for mlp, layers in shape.mlps:
        if mlp.intermediate:
            yield from _mlp("mlp", shape.hidden, mlp.intermediate, mlp.gated, layers, *sizes, fused_swiglu)
        if mlp.experts:
            yield from _experts(shape, mlp, layers, rows, expert_bytes, element_bytes)
        if mlp.shared_intermediate:
            width = mlp.shared_intermediate
            yield from _mlp("shared experts", shape.hidden, width, mlp.gated, layers, *sizes, fused_swiglu)


def _experts(
    shape: ModelShape, mlp: MLP, layers: Term, rows: Term, weight_bytes: Term, element_bytes: Term
) -> Iterator[Op]:
    """The router, the experts that the rows are routed to, and projections to the experts' own width, if any."""
    router = ops.linear(rows, shape.hidden, mlp.experts, element_bytes, element_bytes)
    yield Op("router", "linear", router, layers, mlp.experts, shape.hidden)
    width = mlp.expert_hidden or shape.hidden
    counts = mlp.expert_params(shape.hidden), mlp.experts, mlp.experts_per_token
    # The tokens of all data-parallel ranks are routed to the experts that these share.
    ranks = shape.parallel.expert_ranks if shape.parallel.expert else 1
    routed_rows = rows * shape.parallel.data
    routed = ops.experts(routed_rows, width, *counts, weight_bytes, element_bytes, shape.routing_skew, ranks)
    read = ops.read_experts(mlp.experts, mlp.experts_per_token, routed_rows, shape.routing_skew, ranks)
    yield Op("routed experts", "grouped_linear", routed, layers, read * mlp.expert_params(shape.hidden) / width, width)
    if mlp.expert_hidden:
        mlp_bytes = stored_bytes(shape.weight_bits.mlp, weight_bytes)
        projection = ops.linear(rows, shape.hidden, width, mlp_bytes, element_bytes)
        yield Op("expert projections", "linear", projection, 2 * layers, width, shape.hidden)


def _mlp(
    name: str,
    hidden: Term,
    width: Term,
    gated: bool,
    layers: Term,
    rows: Term,
    weight_bytes: Term,
    element_bytes: Term,
    fused_swiglu: Term,
) -> Iterator[Op]:
    """Gate and up with SwiGLU and down, or up with its activation and down."""
    down = ops.linear(rows, width, hidden, weight_bytes, element_bytes)
    if gated:
        gate_up = ops.gated_linear(rows, hidden, width, weight_bytes, element_bytes, fused_swiglu)
        swiglu = ops.swiglu(rows, width, element_bytes)
        yield Op(f"{name} gate + up", "linear", gate_up, layers, 2 * width, hidden)
        yield Op(f"{name} swiglu", "elementwise", swiglu, layers * (1 - fused_swiglu))
    else:
        up = ops.linear(rows, hidden, width, weight_bytes, element_bytes)
        yield Op(f"{name} up", "linear", up, layers, width, hidden)
        yield Op(f"{name} activation", "elementwise", ops.elementwise(rows, width, width, element_bytes), layers)
    yield Op(f"{name} down", "linear", down, layers, hidden, width)


def _head(shape: ModelShape, rows: Term, head_bytes: Term, element_bytes: Term) -> Op:
    """The output head, at `head_bytes` per parameter."""
    cost = ops.linear(rows, shape.hidden, shape.vocab, head_bytes, element_bytes)
    return Op("lm head", "head", cost, 1, shape.vocab, shape.hidden)


def _attention(shape: ModelShape, terms: PassTerms) -> Iterator[Op]:
    """Decode attention of layers that read all tokens, of layers with a sliding window, and what an indexer chose."""
    for attention, layers in shape.attentions:
        read = terms if attention.window_tokens is None else windowed(terms, attention.window_tokens)
        if attention.index_tokens:
            yield from _indexer(attention, layers, terms)
            read = windowed(replace(terms, held=None), attention.index_tokens)
        name = "attention" if attention.window_tokens is None else WINDOWED_ATTENTION
        yield _attention_op(name, attention, read, layers)


def _attention_op(name: str, attention: Attention, terms: PassTerms, layers: Term) -> Op:
    kind = "attention_mla" if attention.is_latent else "attention"
    tokens = terms.quantized_tokens + terms.full_tokens
    # Queries that an indexer chooses for read their own tokens each.
    reads = terms.queries if attention.index_tokens else terms.reads
    launches, rows = layers * reads, terms.batch * attention.cached_rows
    return Op(name, kind, _attention_cost(attention, terms, reads), launches, rows, tokens)


def _attention_cost(attention: Attention, terms: PassTerms, reads: Term) -> Cost:
    """One read of a layer's KV by decode attention."""
    query_sizes = terms.batch, terms.queries / reads, attention.q_heads
    tokens = terms.quantized_tokens, terms.full_tokens
    kv = ops.KVRead(*tokens, terms.bits, terms.element_bytes, terms.group, terms.splits)
    if attention.is_latent:
        rope_dim = attention.score_dim - attention.value_dim
        return ops.latent_attention(*query_sizes, attention.value_dim, rope_dim, kv)
    # Keys and values of unequal width cost what those of their mean width do.
    head_dim: Term = attention.head_dim
    if attention.v_head_dim not in (None, head_dim):
        head_dim = (head_dim + attention.output_head_dim) / 2
    return ops.attention(*query_sizes, attention.kv_heads, head_dim, kv)


def _indexer(attention: Attention, layers: Term, terms: PassTerms) -> Iterator[Op]:
    """Scores of all cached tokens by a sparse indexer, and the choice of those that attention reads (DSA)."""
    tokens = terms.quantized_tokens + terms.full_tokens
    heads = attention.index_heads, attention.index_head_dim
    scan = ops.index_scan(terms.batch, terms.queries, *heads, tokens, attention.index_key_bytes)
    choice = ops.top_k(terms.rows, tokens, minimum(tokens, attention.index_tokens))
    yield Op("indexer", "attention", scan, layers, terms.batch, tokens)
    yield Op("indexer top-k", "elementwise", choice, layers)


def _prefill_attention(shape: ModelShape, batch: Term, tokens: Term, element_bytes: Term, held: Term) -> Iterator[Op]:
    """FlashAttention over the prompt; under MLA with per-head keys and values, not absorbed."""
    for attention, layers in shape.attentions:
        if not (is_symbolic(layers) or layers):
            continue
        value_dim, reach = attention.output_head_dim, attention.window_tokens
        kv_elements = attention.kv_heads * (attention.head_dim + value_dim)
        heads = ops.PromptHeads(attention.q_heads, kv_elements, attention.head_dim, value_dim)
        if attention.index_tokens:
            index = ops.PromptHeads(attention.index_heads, attention.index_head_dim, attention.index_head_dim, 0)
            scores = ops.causal_attention(batch, index, tokens, element_bytes, held)
            yield Op("prefill indexer", "prefill_attention", scores, layers)
            reach = attention.index_tokens
        if reach is None:
            causal = ops.causal_attention(batch, heads, tokens, element_bytes, held)
            yield Op("prefill attention", "prefill_attention", causal, layers)
        else:
            causal = ops.causal_attention(batch, heads, tokens, element_bytes, window=minimum(tokens, reach))
            yield Op("prefill attention (window)", "prefill_attention", causal, layers)
