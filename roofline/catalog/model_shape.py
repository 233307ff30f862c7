"""Shape of a decoder-only language model: every size and bit width that its cost and memory depend on.

Matrices and vectors (norms, biases) are counted separately: only matrices cost FLOPs and can be quantized.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ridgeplan.roofline.catalog.families import Family, families
from ridgeplan.roofline.catalog.layers import MLP, Attention, LayerGroup, State, counted, trusted
from ridgeplan.roofline.catalog.parallel import SINGLE, Parallel
from ridgeplan.roofline.catalog.validation import (
    Checked,
    brief,
    build,
    flag,
    name_text,
    number,
    one_of,
    part,
    parts,
    text,
    texts,
    whole,
)

FULL_BITS = 16.0
# Formats that the runtime decodes as it loads them, into what the plan asks for.
DECODED_BITS = {"gptq": (2, 4, 8), "awq": (4,), "compressed-tensors": (2, 4, 8)}  # of formats with several sizes
KEPT_FORMAT = "mxfp4"  # of experts, which every plan reads as they are stored
PACKED_FORMATS = (*DECODED_BITS, "fp8", KEPT_FORMAT)  # of safetensors
LOADED_FORMATS = ("bf16", "float32", "gguf", *PACKED_FORMATS)
MAX_BITS = 16
OTHER_BITS = tuple(
    f"{method} of {bits} bits"
    for method, decoded in DECODED_BITS.items()
    for bits in range(2, MAX_BITS + 1)
    if bits not in decoded
)
OTHER_LAYOUTS = tuple(f"{method} in another layout" for method in DECODED_BITS)
FORMATS = (*LOADED_FORMATS, "bitsandbytes", "fbgemm_fp8", "nvfp4", *OTHER_BITS, *OTHER_LAYOUTS)
PARTS = ("attention", "mlp", "experts", "embedding", "head")


def _bits() -> Any:
    return number(1, 64, default=FULL_BITS)


@dataclass(frozen=True)
class StoredBits(Checked):
    """Bits per weight, scales included, of a GGUF file's blocks as products read them; 0 where none can.

    layers: the mean over all matrices of the layers, to which those in full precision, a share `full` of the weights,
    add nothing. embedding, head: 16 in full precision; the head's are the embedding's where both are one table.
    """

    layers: float = number(0, 64, default=0.0)
    full: float = number(0, 1, default=0.0)
    embedding: float = number(0, 64, default=0.0)
    head: float = number(0, 64, default=0.0)

    def layer_bytes(self, element_bytes: float) -> float:
        """Bytes per weight of the layers' matrices, on a machine with `element_bytes` per element."""
        return self.layers / 8 + self.full * element_bytes

    def table_bytes(self, part: str, element_bytes: float) -> float:
        """Bytes per weight of the embedding or the head."""
        bits: float = getattr(self, part)
        return element_bytes if bits == FULL_BITS else bits / 8


@dataclass(frozen=True)
class WeightBits(Checked):
    """Bits per weight of each part's matrices, with their scales and zeros.

    16 is any 16-bit type, which a machine holds in its own full precision: bf16 on a GPU, fp32 on a CPU. Vectors and
    routers are in full precision in all formats. stored: of plans whose weights stay as the file stores them.
    """

    attention: float = _bits()
    mlp: float = _bits()  # dense MLPs and shared experts
    experts: float = _bits()  # routed ones
    embedding: float = _bits()
    head: float = _bits()  # the embedding's where both are one table
    format: str = one_of(FORMATS, default="bf16")
    stored: StoredBits = part(StoredBits)

    def full_bytes(self, part: str, element_bytes: float) -> float:
        """Bytes per weight of a part that no plan quantizes, on a machine with `element_bytes` per element."""
        bits: float = getattr(self, part)
        return element_bytes if bits == FULL_BITS else bits / 8

    def widest_bytes(self, element_bytes: float) -> float:
        """Bytes per weight of the linear layers' widest part."""
        return max(self.full_bytes(part, element_bytes) for part in ("attention", "mlp", "experts"))

    @property
    def as_loaded(self) -> WeightBits:
        """The bits of the weights once the runtime has loaded them, of plans that do not keep them as stored."""
        return WeightBits(format=self.format, stored=self.stored) if self.converted else self

    @property
    def converted(self) -> bool:
        """Whether loading changes any part's bits."""
        return self.format in LOADED_FORMATS and self.format != KEPT_FORMAT and not self.full

    @property
    def decoded(self) -> bool:
        """Whether these are weights in full precision of a checkpoint that has others."""
        return self.full and self.format not in ("bf16", "float32")

    @property
    def full(self) -> bool:
        """Whether all parts are in full precision. No kernel was calibrated for others as they are stored."""
        return all(getattr(self, part) == FULL_BITS for part in PARTS)

    def with_stored(self, bits: object) -> WeightBits:
        """These with `StoredBits` as an object of JSON. Raises InvalidField."""
        return replace(self, stored=build(StoredBits, bits, "stored bits: "))

    def tied(self) -> WeightBits:
        """These bits for a model whose output head is its embedding."""
        return replace(self, head=self.embedding, stored=replace(self.stored, head=self.stored.embedding))


def format_of(method: str, bits: int, *, usual: bool) -> str:
    """The name in `FORMATS` of a method of `DECODED_BITS` with so many bits, in its `usual` layout or another."""
    if bits not in DECODED_BITS[method]:
        return f"{method} of {bits} bits"
    return method if usual else f"{method} in another layout"


def loaded_formats() -> tuple[str, ...]:
    """The formats that the runtime loads, as messages list them, such as "gptq of 2/4/8 bits"."""
    sizes = {method: f" of {'/'.join(map(str, bits))} bits" for method, bits in DECODED_BITS.items()}
    return tuple(f"{name}{sizes.get(name, '')}" for name in LOADED_FORMATS)


def mean_bits(tensors: Iterable[tuple[str, float, float]], kind: str) -> WeightBits:
    """The mean bits of each part, from its tensors: (part, elements, bits per weight). Parts without any have 16."""
    held: dict[str, tuple[float, float]] = {}
    for name, elements, bits in tensors:
        known_elements, known_bits = held.get(name, (0.0, 0.0))
        held[name] = known_elements + elements, known_bits + elements * bits
    means: dict[str, Any] = {name: bits / elements for name, (elements, bits) in held.items()}
    return WeightBits(**means, format=kind)


# What a model has that the sizes of its layers do not say; `traits` of a shape lists some of these.
TRAITS = {
    "attention sinks": "a learned logit per query head joins each softmax",
    "attention soft cap": "attention's logits pass a tanh",
    "parallel blocks": "attention and the MLP read the same normed stream: one norm a layer",
    "other activation": "the MLP's activation is not SiLU",
    "biased experts": "experts, the router and attention's output projection add biases",
}
MAX_LAYERS = 10_000
MAX_PARAMETERS = 10**15
# Per token, over all layers. With more, the bytes of the largest workload would overflow 64-bit integers.
MAX_CACHED_ELEMENTS = 2**22


# By which models are told apart: what a plan's prediction depends on most.
SIZES = ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "intermediate")


class UnknownModel(ValueError):
    """A name that is neither in the catalog, nor a file, nor a hub id that is cached or can be fetched."""


class BadModelFile(ValueError):
    """A config.json or GGUF file that is missing, damaged, or describes a model that is not supported."""


def trained_context(architecture: str, max_context: int) -> int:
    """Tokens that YaRN's factor refers to: the model's limit, unless its family says otherwise."""
    return families().get(architecture, Family()).trained_contexts.get(str(max_context), max_context)


@dataclass(frozen=True, kw_only=True)
class ModelShape(Checked):
    """An immutable model shape. Raises InvalidField (a ValueError) for fields that are wrong, alone or together.

    The ranges are far wider than real models; they keep a corrupt file from becoming an absurd prediction.
    """

    name: str = name_text()
    architecture: str = name_text()  # `model_type` of config.json
    layers: int = whole(1, MAX_LAYERS)
    hidden: int = whole(1, 10**6)
    q_heads: int = whole(1, 10_000)
    kv_heads: int = whole(1, 10_000)
    head_dim: int = whole(1, 10_000)  # under MLA: nope_head_dim + rope_head_dim
    intermediate: int = whole(1, 10**7)  # width of the dense MLPs; unused where every layer has experts
    vocab: int = whole(1, 10**8)
    max_context: int = whole(1, 10**9)
    tied_embeddings: bool = flag(False)
    attention_bias: bool = flag(False)  # biases of the query, key and value projections
    qk_norm: bool = flag(False)
    wide_qk_norm: bool = flag(False)  # of all heads together, not of each
    sandwich_norms: bool = flag(False)  # a norm after attention and one after the MLP, beside those before them
    window_tokens: int | None = whole(1, 10**9, default=None)  # sliding window
    window_layers: int = whole(0, 10_000, default=0)  # how many layers use it
    experts: int = whole(0, 100_000, default=0)  # 0: a dense model
    experts_per_token: int = whole(0, 100_000, default=0)
    expert_intermediate: int = whole(0, 10**7, default=0)
    shared_experts_intermediate: int = whole(0, 10**7, default=0)  # summed over all shared experts
    dense_layers: int = whole(0, 10_000, default=0)  # leading layers of a MoE that keep a dense MLP
    latent_rank: int | None = whole(1, 10**6, default=None)  # kv_lora_rank; set: multi-head latent attention
    q_lora_rank: int | None = whole(1, 10**6, default=None)
    rope_head_dim: int | None = whole(1, 10_000, default=None)
    nope_head_dim: int | None = whole(1, 10_000, default=None)
    v_head_dim: int | None = whole(1, 10_000, default=None)
    rope_theta: float = number(1e-3, 1e12, default=10_000.0)
    rope_original_context: int | None = whole(1, 10**9, default=None)  # before RoPE scaling, None if unscaled
    weight_bits: WeightBits = part(WeightBits)  # of the published checkpoint
    source: str = text("given by the user")
    groups: tuple[LayerGroup, ...] = parts(LayerGroup, default=())  # empty: all that the fields above can say
    traits: tuple[str, ...] = texts()  # of TRAITS
    routing_skew: float = number(0, 8, default=0.0)  # exponent of a Zipf law of the experts' loads; 0: uniform
    mtp_layers: int = whole(0, 1000, default=0)  # of multi-token prediction, which are not counted as layers
    layer_embedding_width: int = whole(0, 10**6, default=0)  # per layer and token of the vocabulary
    note: str = text("")  # on how the shape was read

    def _owner(self) -> str:
        return f"model {brief(self.name)}: "

    def _contradiction(self) -> str | None:
        return (
            self._heads_problem()
            or self._experts_problem()
            or self._latent_problem()
            or self._groups_problem()
            or self._size_problem()
        )

    def _groups_problem(self) -> str | None:
        unknown = [name for name in self.traits if name not in TRAITS]
        if unknown:
            return f"traits has {brief(unknown[0])}; allowed: {', '.join(TRAITS)}"
        count = sum(group.count for group in self.groups)
        if self.groups and count != self.layers:
            return f"groups have {count} layers; allowed: {self.layers}, the model's"
        if self.groups and not self.attentions:
            return "no group has attention; a model without any is not supported"
        return None

    def _heads_problem(self) -> str | None:
        if self.q_heads % self.kv_heads:
            return f"q_heads is {self.q_heads}; allowed: a multiple of kv_heads, {self.kv_heads}"
        low, high = (1, self.layers) if self.window_tokens else (0, 0)
        if not low <= self.window_layers <= high:
            window = f"window_tokens is {self.window_tokens}"
            return f"window_layers is {self.window_layers}; allowed: {low} to {high}, as {window}"
        return None

    def _experts_problem(self) -> str | None:
        if not self.is_moe:
            widths = ("experts_per_token", "expert_intermediate", "shared_experts_intermediate", "dense_layers")
            stray = [name for name in widths if getattr(self, name)]
            return f"{stray[0]} is {getattr(self, stray[0])}; allowed: 0, as experts is 0" if stray else None
        if not 1 <= self.experts_per_token <= self.experts:
            return f"experts_per_token is {self.experts_per_token}; allowed: 1 to {self.experts}, the number of experts"
        if not self.expert_intermediate:
            return "expert_intermediate is 0; allowed: 1 or more in a model with experts"
        if self.dense_layers >= self.layers:
            return f"dense_layers is {self.dense_layers}; allowed: fewer than the {self.layers} layers"
        return None

    def _latent_problem(self) -> str | None:
        widths = {name: getattr(self, name) for name in ("rope_head_dim", "nope_head_dim", "v_head_dim")}
        if not self.is_mla:
            stray = [name for name, value in {**widths, "q_lora_rank": self.q_lora_rank}.items() if value]
            return f"{stray[0]} needs latent_rank" if stray else None
        missing = [name for name, value in widths.items() if value is None]
        if missing:
            return f"latent_rank needs {missing[0]}"
        both = (self.nope_head_dim or 0) + (self.rope_head_dim or 0)
        if self.head_dim != both:
            return f"head_dim is {self.head_dim}; allowed: nope_head_dim + rope_head_dim, {both}"
        return None

    def _size_problem(self) -> str | None:
        if self.parameters > MAX_PARAMETERS:
            return f"these sizes make {self.parameters:.3g} parameters; allowed: up to {MAX_PARAMETERS:.0e}"
        cached = sum(count * attention.cached_elements for attention, count in self.attentions)
        if cached > MAX_CACHED_ELEMENTS:
            return f"these sizes cache {cached:.3g} numbers per token; allowed: up to {MAX_CACHED_ELEMENTS:.3g}"
        return None

    @property
    def parallel(self) -> Parallel:
        """The degrees by which a larger model was sharded into this shape (`catalog/sharding.py`)."""
        return SINGLE

    @property
    def trained_context(self) -> int:
        """Tokens that YaRN's factor refers to."""
        return trained_context(self.architecture, self.max_context)

    @property
    def attentions(self) -> tuple[tuple[Attention, int], ...]:
        """Every kind of attention with the number of its layers."""
        return self._layers_by_kind[0]

    @property
    def states(self) -> tuple[tuple[State, int], ...]:
        """Every kind of recurrent state with the number of its layers."""
        return self._layers_by_kind[1]

    @property
    def mlps(self) -> tuple[tuple[MLP, int], ...]:
        """Every kind of MLP with the number of its layers."""
        return self._layers_by_kind[2]

    @cached_property
    def _layers_by_kind(self) -> tuple[Any, Any, Any]:
        if self.groups:
            attentions = counted((group.attention, group.count) for group in self.groups)
            states = counted((group.state, group.count) for group in self.groups)
            return attentions, states, counted((group.mlp, group.count) for group in self.groups)
        return self._flat_attentions(), (), self._flat_mlps()

    def _flat_attentions(self) -> tuple[tuple[Attention, int], ...]:
        names = ("q_heads", "kv_heads", "head_dim", "v_head_dim", "latent_rank", "q_lora_rank", "rope_head_dim")
        sizes = {name: getattr(self, name) for name in (*names, "nope_head_dim")}
        full = trusted(Attention, **sizes)
        if self.window_tokens is None:
            return ((full, self.layers),)
        sliding = trusted(Attention, **sizes, window_tokens=self.window_tokens)
        return (full, self.layers - self.window_layers), (sliding, self.window_layers)

    def _flat_mlps(self) -> tuple[tuple[MLP, int], ...]:
        dense = trusted(MLP, intermediate=self.intermediate)
        if not self.experts:
            return ((dense, self.layers),)
        names = ("experts", "experts_per_token", "expert_intermediate")
        sizes = {name: getattr(self, name) for name in names}
        routed = trusted(MLP, **sizes, shared_intermediate=self.shared_experts_intermediate)
        leading = ((dense, self.dense_layers),) if self.dense_layers else ()
        return (*leading, (routed, self.layers - self.dense_layers))

    @cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers by groups that are alike, which together are all layers.

        Of a shape that says how many layers have a window or a dense MLP, but not which, these are taken to come first.
        """
        if self.groups:
            return self.groups
        attentions = [attention for attention, count in reversed(self.attentions) for _ in range(count)]
        mlps = [mlp for mlp, count in self.mlps for _ in range(count)]
        pairs = counted((pair, 1) for pair in zip(attentions, mlps, strict=True))
        return tuple(LayerGroup(count=count, attention=attention, mlp=mlp) for (attention, mlp), count in pairs)

    def group_of(self, layer: int) -> LayerGroup:
        """The group of a layer by its index. Raises ValueError where the shape does not say which layers are which."""
        if len(self.layer_groups) == 1:
            return self.layer_groups[0]
        group = next((group for group in self.groups if layer in group.indices), None)
        if group is None:
            raise ValueError(f"model {brief(self.name)}: the description does not say what layer {layer} is")
        return group

    @property
    def group_of_each(self) -> tuple[LayerGroup, ...]:
        """The group of each layer, in the order of `layer_groups` where the shape does not say which layer is which."""
        if self.groups and all(group.indices for group in self.groups):
            return tuple(map(self.group_of, range(self.layers)))
        return tuple(group for group in self.layer_groups for _ in range(group.count))

    @property
    def heads_of_each(self) -> tuple[tuple[int, int, int], ...]:
        """Heads of queries, of keys, and their channels, of each layer with attention."""
        attentions = (group.attention for group in self.group_of_each)
        return tuple(each.heads for each in attentions if each)

    @property
    def projections(self) -> tuple[tuple[Attention, int], ...]:
        """Every kind of attention by its projections: windows do not tell them apart."""
        return self._projections

    @cached_property
    def _projections(self) -> tuple[tuple[Attention, int], ...]:
        return counted(
            (trusted(Attention, **vars(attention) | {"window_tokens": None}), count)
            for attention, count in self.attentions
        )

    @cached_property
    def kv_layers(self) -> int:
        """Layers that cache keys and values, or latent rows."""
        return sum(count for attention, count in self.attentions if not attention.shares_cache)

    @property
    def state_layers(self) -> int:
        """Layers with a recurrent state."""
        return sum(count for _, count in self.states)

    @property
    def is_moe(self) -> bool:
        """Whether any layer has a mixture of experts."""
        return self.experts > 0

    @property
    def is_mla(self) -> bool:
        """Whether attention caches a latent row in place of keys and values (multi-head latent attention)."""
        return self.latent_rank is not None

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return sum(count for mlp, count in self.mlps if mlp.experts)

    @cached_property
    def _cached_attention(self) -> Attention:
        """Attention of the layers whose cache selections and evictions choose from: full ones if there are any."""
        return min((attention for attention, _ in self.attentions if not attention.shares_cache), key=_reach)

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.q_heads * self.head_dim

    @property
    def mixer_width(self) -> int:
        """Width of the widest output of attention or a recurrent state."""
        widths = {attention.q_width for attention, _ in self.attentions}
        return max(widths | {state.value_width for state, _ in self.states})

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, before any latent compression."""
        return self.kv_heads * self.head_dim

    @property
    def kv_elements_per_token_per_layer(self) -> int:
        """Cached numbers per token and layer that has a cache: keys and values, or MLA's latent and its RoPE key."""
        return self._cached_attention.cached_elements

    @property
    def cached_heads(self) -> float:
        """Heads of keys and values that hold as many numbers as are cached; a fraction for MLA's latent row."""
        return self._cached_attention.cached_heads

    @property
    def coded_sizes(self) -> tuple[float, int, int]:
        """What a plan may hold of a token as codes: heads, their channels, and 1 if values go with keys, else 0."""
        return self._cached_attention.coded_sizes

    @property
    def cached_rows(self) -> int:
        """Rows of keys and values that attention reads per token: one per KV head, or MLA's single latent row."""
        return self._cached_attention.cached_rows

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """Heads of the cache, and channels of keys and values: of latents and of rotated keys under MLA."""
        if self.is_mla:
            return 1, self.latent_rank or 0, self.rope_head_dim or 0
        return self.kv_heads, self.head_dim, self.head_dim

    @property
    def score_dim(self) -> int:
        """Multiply-adds per query head and cached token of q . k; under MLA in its absorbed form (decode)."""
        return self._cached_attention.score_dim

    @property
    def value_dim(self) -> int:
        """Multiply-adds per query head and cached token of p . v; under MLA in its absorbed form (decode)."""
        return self._cached_attention.value_dim

    @property
    def mixer_params(self) -> int:
        """Elements of the projection matrices of all layers' attention and states."""
        mixers: tuple[tuple[Attention | State, int], ...] = (*self.projections, *self.states)
        return sum(count * mixer.params(self.hidden) for mixer, count in mixers)

    @property
    def quantized_mixer_params(self) -> int:
        """Of `mixer_params` those that plans quantize: all but the projections from latents to keys and values."""
        return self.mixer_params - sum(count * attention.factor_params for attention, count in self.projections)

    @property
    def dense_params(self) -> int:
        """Matrices of all layers' dense MLPs and shared experts, which every token uses."""
        hidden = self.hidden
        return sum(count * (mlp.dense_params(hidden) + mlp.shared_params(hidden)) for mlp, count in self.mlps)

    @property
    def expert_params(self) -> int:
        """Matrices of all layers' routed experts."""
        return sum(count * mlp.experts * mlp.expert_params(self.hidden) for mlp, count in self.mlps)

    @property
    def idle_expert_params(self) -> int:
        """Matrices of the routed experts that a token does not use."""
        idle = ((mlp, count * (mlp.experts - mlp.experts_per_token)) for mlp, count in self.mlps)
        return sum(count * mlp.expert_params(self.hidden) for mlp, count in idle)

    @property
    def router_params(self) -> int:
        """Matrices that score the experts, in all layers."""
        return sum(count * mlp.router_params(self.hidden) for mlp, count in self.mlps)

    @property
    def blocks(self) -> int:
        """Residual blocks of all layers, each of which has a norm ahead of it."""
        if not self.groups:
            return 2 * self.layers
        return sum(group.count * group.blocks for group in self.groups)

    @property
    def norms(self) -> int:
        """Norms of the stream in all layers: ahead of every block, and in some models after it or for two blocks."""
        if "parallel blocks" in self.traits:
            return self.layers
        return (2 if self.sandwich_norms else 1) * self.blocks

    @property
    def vector_params(self) -> int:
        """Norms, biases and sinks of all layers, and a state's convolution: in memory, but never quantized."""
        attentions = sum(count * self._attention_vectors(attention) for attention, count in self.projections)
        states = sum(count * state.vector_params for state, count in self.states)
        return self.norms * self.hidden + attentions + states + self._expert_biases()

    def _expert_biases(self) -> int:
        """Biases of gate and up, of down and of the router for every expert, and of output projections."""
        if "biased experts" not in self.traits:
            return 0
        outputs = sum(count * self.hidden for _, count in self.projections)
        experts = sum(
            count * mlp.experts * (mlp.matrices - 1) * mlp.expert_intermediate + count * mlp.experts * (self.hidden + 1)
            for mlp, count in self.mlps
        )
        return outputs + experts

    def _attention_vectors(self, attention: Attention) -> int:
        own_keys = 0 if attention.shares_cache else 1
        width = attention.q_width + own_keys * attention.kv_width if self.wide_qk_norm else 0
        head_norms = (width or (1 + own_keys) * attention.head_dim) if self.qk_norm else 0
        latent_norms = (attention.q_lora_rank or 0) + (attention.latent_rank or 0)
        biases = attention.q_width + 2 * own_keys * attention.kv_width if self.attention_bias else 0
        sinks = attention.q_heads if "attention sinks" in self.traits else 0
        return head_norms + latent_norms + biases + sinks

    @property
    def embedding_params(self) -> int:
        """One vocabulary table; the output head is a second one unless the embeddings are tied."""
        return self.vocab * self.hidden

    @property
    def layer_embedding_params(self) -> int:
        """Tables of vectors that feed each layer for a token (Gemma 3n), and the matrices that mix them in."""
        width = self.layer_embedding_width
        return self.layers * width * (self.vocab + 3 * self.hidden)

    @property
    def parameters(self) -> int:
        """All parameters of the model."""
        mlps = self.dense_params + self.expert_params + self.router_params
        tables = self.embedding_params * (1 if self.tied_embeddings else 2) + self.layer_embedding_params
        return mlps + self.mixer_params + self.vector_params + self.hidden + tables

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: no idle experts, and no input table (a look-up)."""
        looked_up = self.layers * self.layer_embedding_width * self.vocab
        table = 0 if self.tied_embeddings else self.embedding_params
        return self.parameters - self.idle_expert_params - looked_up - table


def _reach(attention: Attention) -> float:
    """Tokens that attention reaches, negated: a key by which layers that see most come first."""
    return -attention.window_tokens if attention.window_tokens else float("-inf")


def sizes_of(shape: ModelShape) -> tuple[int, ...]:
    """The sizes by which models are told apart."""
    return tuple(getattr(shape, name) for name in SIZES)
