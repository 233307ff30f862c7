"""Shape of a decoder-only language model: every size and bit width that its cost and memory depend on.

Matrices and vectors (norms, biases) are counted separately: only matrices cost FLOPs and can be quantized.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ridgeplan.roofline.catalog.validation import Checked, brief, flag, name_text, number, one_of, part, text, whole

FULL_BITS = 16.0
# Formats that the runtime decodes as it loads them, into what the plan asks for.
DECODED_BITS = {"gptq": (2, 4, 8), "awq": (4,), "compressed-tensors": (2, 4, 8)}  # of formats with several sizes
PACKED_FORMATS = (*DECODED_BITS, "fp8")  # of safetensors
CONVERTED_FORMATS = ("bf16", "float32", "gguf", *PACKED_FORMATS)
MAX_BITS = 16
OTHER_BITS = tuple(
    f"{method} of {bits} bits"
    for method, decoded in DECODED_BITS.items()
    for bits in range(2, MAX_BITS + 1)
    if bits not in decoded
)
OTHER_LAYOUTS = tuple(f"{method} in another layout" for method in DECODED_BITS)
FORMATS = (*CONVERTED_FORMATS, "bitsandbytes", "fbgemm_fp8", "mxfp4", "nvfp4", *OTHER_BITS, *OTHER_LAYOUTS)
PARTS = ("attention", "mlp", "experts", "embedding", "head")


def _bits() -> Any:
    return number(1, 64, default=FULL_BITS)


@dataclass(frozen=True)
class WeightBits(Checked):
    """Bits per weight of each part's matrices, with their scales and zeros.

    16 is any 16-bit type, which a machine holds in its own full precision: bf16 on a GPU, fp32 on a CPU. Vectors and
    routers are in full precision in all formats.
    """

    attention: float = _bits()
    mlp: float = _bits()  # dense MLPs and shared experts
    experts: float = _bits()  # routed ones
    embedding: float = _bits()
    head: float = _bits()  # the embedding's where both are one table
    format: str = one_of(FORMATS, default="bf16")

    def full_bytes(self, part: str, element_bytes: float) -> float:
        """Bytes per weight of a part that no plan quantizes, on a machine with `element_bytes` per element."""
        bits: float = getattr(self, part)
        return element_bytes if bits == FULL_BITS else bits / 8

    def widest_bytes(self, element_bytes: float) -> float:
        """Bytes per weight of the linear layers' widest part."""
        return max(self.full_bytes(part, element_bytes) for part in ("attention", "mlp", "experts"))

    @property
    def as_loaded(self) -> WeightBits:
        """The bits of the weights once the runtime has loaded them."""
        return WeightBits(format=self.format) if self.converted else self

    @property
    def converted(self) -> bool:
        """Whether loading changes any part's bits."""
        return self.format in CONVERTED_FORMATS and not self.full

    @property
    def full(self) -> bool:
        """Whether all parts are in full precision. No kernel was calibrated for others as they are stored."""
        return all(getattr(self, part) == FULL_BITS for part in PARTS)

    def tied(self) -> WeightBits:
        """These bits for a model whose output head is its embedding."""
        return replace(self, head=self.embedding)


def format_of(method: str, bits: int, *, usual: bool) -> str:
    """The name in `FORMATS` of a method of `DECODED_BITS` with so many bits, in its `usual` layout or another."""
    if bits not in DECODED_BITS[method]:
        return f"{method} of {bits} bits"
    return method if usual else f"{method} in another layout"


def loaded_formats() -> tuple[str, ...]:
    """The formats that the runtime loads, as messages list them, such as "gptq of 2/4/8 bits"."""
    sizes = {method: f" of {'/'.join(map(str, bits))} bits" for method, bits in DECODED_BITS.items()}
    return tuple(f"{name}{sizes.get(name, '')}" for name in CONVERTED_FORMATS)


def mean_bits(tensors: Iterable[tuple[str, float, float]], kind: str) -> WeightBits:
    """The mean bits of each part, from its tensors: (part, elements, bits per weight). Parts without any have 16."""
    held: dict[str, tuple[float, float]] = {}
    for name, elements, bits in tensors:
        known_elements, known_bits = held.get(name, (0.0, 0.0))
        held[name] = known_elements + elements, known_bits + elements * bits
    return WeightBits(**{part: bits / elements for part, (elements, bits) in held.items()}, format=kind)


ARCHITECTURES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "phi3",
    "gemma3_text",
)
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


QWEN3_TRAINED_CONTEXT = 32_768
QWEN3_MAX_CONTEXT = 40_960  # which leaves 8,192 tokens for a prompt beside 32,768 of output


def trained_context(architecture: str, max_context: int) -> int:
    """Tokens that YaRN's factor refers to: the model's limit, but for Qwen3 what its model card says (32,768)."""
    qwen3 = architecture.startswith("qwen3") and max_context == QWEN3_MAX_CONTEXT
    return QWEN3_TRAINED_CONTEXT if qwen3 else max_context


@dataclass(frozen=True, kw_only=True)
class ModelShape(Checked):
    """An immutable model shape. Raises InvalidField (a ValueError) for fields that are wrong, alone or together.

    The ranges are far wider than real models; they keep a corrupt file from becoming an absurd prediction.
    """

    name: str = name_text()
    architecture: str = one_of(ARCHITECTURES)
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

    def _owner(self) -> str:
        return f"model {brief(self.name)}: "

    def _contradiction(self) -> str | None:
        return self._heads_problem() or self._experts_problem() or self._latent_problem() or self._size_problem()

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
        both = self._nope + self._rope
        if self.head_dim != both:
            return f"head_dim is {self.head_dim}; allowed: nope_head_dim + rope_head_dim, {both}"
        return None

    def _size_problem(self) -> str | None:
        if self.parameters > MAX_PARAMETERS:
            return f"these sizes make {self.parameters:.3g} parameters; allowed: up to {MAX_PARAMETERS:.0e}"
        cached = self.layers * self.kv_elements_per_token_per_layer
        if cached > MAX_CACHED_ELEMENTS:
            return f"these sizes cache {cached:.3g} numbers per token; allowed: up to {MAX_CACHED_ELEMENTS:.3g}"
        return None

    @property
    def trained_context(self) -> int:
        """Tokens that YaRN's factor refers to."""
        return trained_context(self.architecture, self.max_context)

    @property
    def is_moe(self) -> bool:
        """Whether any layer has a mixture of experts."""
        return self.experts > 0

    @property
    def is_mla(self) -> bool:
        """Whether attention caches a latent row in place of keys and values (multi-head latent attention)."""
        return self.latent_rank is not None

    # The widths of MLA as plain numbers, 0 where the model has none.
    @property
    def _latent(self) -> int:
        return self.latent_rank or 0

    @property
    def _rope(self) -> int:
        return self.rope_head_dim or 0

    @property
    def _nope(self) -> int:
        return self.nope_head_dim or 0

    @property
    def moe_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return self.layers - self.dense_layers if self.is_moe else 0

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, before any latent compression."""
        return self.kv_heads * self.head_dim

    @property
    def kv_elements_per_token_per_layer(self) -> int:
        """Cached numbers per token and layer: keys and values, or MLA's latent and its RoPE key."""
        return self._latent + self._rope if self.is_mla else 2 * self.kv_width

    @property
    def cached_heads(self) -> float:
        """Heads of keys and values that hold as many numbers as are cached; a fraction for MLA's latent row."""
        return self.kv_elements_per_token_per_layer / (2 * self.head_dim)

    @property
    def cached_rows(self) -> int:
        """Rows of keys and values that attention reads per token: one per KV head, or MLA's single latent row."""
        return 1 if self.is_mla else self.kv_heads

    @property
    def score_dim(self) -> int:
        """Multiply-adds per query head and cached token of q . k; under MLA in its absorbed form (decode)."""
        return self._latent + self._rope if self.is_mla else self.head_dim

    @property
    def value_dim(self) -> int:
        """Multiply-adds per query head and cached token of p . v; under MLA in its absorbed form (decode)."""
        return self._latent if self.is_mla else self.head_dim

    @property
    def attention_params_per_layer(self) -> int:
        """Elements of the projection matrices of one attention layer."""
        if not self.is_mla:
            return 2 * self.hidden * (self.q_width + self.kv_width)
        rank = self.q_lora_rank
        queries = rank * (self.hidden + self.q_width) if rank else self.hidden * self.q_width
        value = self.v_head_dim or 0
        latent = self.hidden * self.score_dim + self._latent * self.q_heads * (self._nope + value)
        return queries + latent + self.q_heads * value * self.hidden

    @property
    def dense_mlp_params(self) -> int:
        """Gate, up and down matrices of one dense MLP."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_params(self) -> int:
        """Gate, up and down matrices of one routed expert."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def shared_experts_params(self) -> int:
        """Gate, up and down matrices of all shared experts of one layer, which every token uses."""
        return 3 * self.hidden * self.shared_experts_intermediate

    @property
    def router_params(self) -> int:
        """The matrix that scores the experts of one layer."""
        return self.hidden * self.experts

    @property
    def vector_params_per_layer(self) -> int:
        """Norms and biases of one layer: they take memory but are never quantized."""
        head_norms = 2 * self.head_dim if self.qk_norm else 0
        latent_norms = (self.q_lora_rank or 0) + self._latent
        biases = self.q_width + 2 * self.kv_width if self.attention_bias else 0
        return self.norms_per_layer * self.hidden + head_norms + latent_norms + biases

    @property
    def norms_per_layer(self) -> int:
        """Norms of a layer's stream: before attention and the MLP, and in some families after them too."""
        return 4 if self.sandwich_norms else 2

    @property
    def embedding_params(self) -> int:
        """One vocabulary table; the output head is a second one unless the embeddings are tied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters of the model."""
        per_moe_layer = self.experts * self.expert_params + self.shared_experts_params + self.router_params
        mlps = self.moe_layers * per_moe_layer + (self.layers - self.moe_layers) * self.dense_mlp_params
        attention = self.layers * (self.attention_params_per_layer + self.vector_params_per_layer)
        return mlps + attention + self.hidden + self.embedding_params * (1 if self.tied_embeddings else 2)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: no idle experts, and no input table (a look-up)."""
        idle = self.moe_layers * (self.experts - self.experts_per_token) * self.expert_params
        return self.parameters - idle - (0 if self.tied_embeddings else self.embedding_params)


def sizes_of(shape: ModelShape) -> tuple[int, ...]:
    """The sizes by which models are told apart."""
    return tuple(getattr(shape, name) for name in SIZES)
