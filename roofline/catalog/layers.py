"""The layers of a decoder: softmax attention, recurrent state, MLP. Cost, memory and cache read these descriptions.

A layer mixes tokens by attention or by a state, and has an MLP, dense or routed; some hybrids have layers with only one
of these. A family of models is data that `config_json` reads into these descriptions, never a branch of the cost model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from ridgeplan.roofline.catalog.validation import Checked, flag, one_of, part_or_none, whole, wholes

if TYPE_CHECKING:
    from ridgeplan.roofline.cost import Term

MAX_HEADS = 10_000
MAX_WIDTH = 10**7
INDEX_KEY_BYTES = 1 + 4 / 128  # per element of an indexer's cached key: fp8, and an fp32 scale per 128
DELTA_RULE, MAMBA2 = "gated_delta", "mamba2"
# FLOPs per element of the state and token: decay and outer-product update and the query's product, 1 + 2 + 2; the delta
# rule also reads what the state holds for the key, 2 (Gated DeltaNet, Eq 10; Mamba-2, section 7).
STATE_FLOPS = {DELTA_RULE: 7, MAMBA2: 5}


@dataclass(frozen=True, kw_only=True)
class Attention(Checked):
    """Softmax attention over cached keys and values, or (`latent_rank`) over one latent row of all heads (MLA)."""

    q_heads: int = whole(1, MAX_HEADS)
    kv_heads: int = whole(1, MAX_HEADS)
    head_dim: int = whole(1, MAX_HEADS)  # of queries and keys; under MLA: nope_head_dim + rope_head_dim
    v_head_dim: int | None = whole(1, MAX_HEADS, default=None)  # None: head_dim
    window_tokens: int | None = whole(1, 10**9, default=None)  # None: all tokens
    latent_rank: int | None = whole(1, 10**6, default=None)
    q_lora_rank: int | None = whole(1, 10**6, default=None)
    rope_head_dim: int | None = whole(1, MAX_HEADS, default=None)
    nope_head_dim: int | None = whole(1, MAX_HEADS, default=None)
    index_heads: int = whole(0, MAX_HEADS, default=0)  # of a sparse indexer (DSA), which scores all tokens
    index_head_dim: int = whole(0, MAX_HEADS, default=0)
    index_tokens: int = whole(0, 10**9, default=0)  # that attention reads of those it scored
    gate_width: int = whole(0, MAX_WIDTH, default=0)  # of a projection that gates the output
    shares_cache: bool = flag(False)  # reads what an earlier layer cached: no projections of keys and values
    shares_values: bool = flag(False)  # values are the keys' projection

    @property
    def is_latent(self) -> bool:
        """Whether a latent row is cached in place of keys and values."""
        return self.latent_rank is not None

    @property
    def heads(self) -> tuple[int, int, int]:
        """Heads of queries, of keys, and their channels."""
        return self.q_heads, self.kv_heads, self.head_dim

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, before any latent compression."""
        return self.kv_heads * self.head_dim

    @property
    def output_head_dim(self) -> int:
        """Width of one head's output."""
        return self.v_head_dim or self.head_dim

    @property
    def attended_elements(self) -> int:
        """Numbers that attention reads per cached token: keys and values, or the latent and its RoPE key."""
        if self.is_latent:
            return (self.latent_rank or 0) + (self.rope_head_dim or 0)
        if self.v_head_dim is None:
            return 2 * self.kv_width
        return self.kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def cached_elements(self) -> int:
        """Numbers that the layer itself caches per token, without an indexer's keys."""
        return 0 if self.shares_cache else self.attended_elements

    @property
    def index_key_bytes(self) -> float:
        """Bytes of an indexer's cached key per token."""
        return self.index_head_dim * INDEX_KEY_BYTES

    @property
    def cached_heads(self) -> float:
        """Heads of keys and values that hold as many numbers as are cached; a fraction for a latent row."""
        return self.cached_elements / (2 * self.head_dim)

    @property
    def coded_sizes(self) -> tuple[float, int, int]:
        """What a plan may hold of a token as codes: heads, their channels, and 1 if values go with keys, else 0.

        A latent is both: keys alone. The rotated key beside it stays in full precision.
        """
        return (1, self.latent_rank or 0, 0) if self.is_latent else (self.cached_heads, self.head_dim, 1)

    @property
    def cached_rows(self) -> int:
        """Rows that attention reads per token: one per KV head, or a single latent row."""
        return 1 if self.is_latent else self.kv_heads

    @property
    def score_dim(self) -> int:
        """Multiply-adds per query head and cached token of q . k; under MLA in its absorbed form (decode)."""
        return self.attended_elements if self.is_latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Multiply-adds per query head and cached token of p . v; under MLA in its absorbed form (decode)."""
        return (self.latent_rank or 0) if self.is_latent else self.output_head_dim

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that RoPE may turn."""
        return self.rope_head_dim or self.head_dim

    @property
    def in_width(self) -> int:
        """Outputs of the projections of the stream: queries, what is cached, an output gate, an indexer's keys."""
        return self.q_width + self.cached_elements + self.gate_width + self.index_heads + self.index_head_dim

    def input_params(self, hidden: Term) -> Term:
        """Elements of all projections but that of the output."""
        rank = self.q_lora_rank
        queries = rank * (hidden + self.q_width) if rank else hidden * self.q_width
        index = self.index_heads * self.index_head_dim * (rank or hidden)
        index = index + hidden * (self.index_heads + self.index_head_dim if index else 0)
        if self.shares_cache:
            keys_values = 0
        elif self.is_latent:
            keys_values = hidden * self.score_dim + self.factor_params
        else:
            keys_values = hidden * (self.kv_width if self.shares_values else self.cached_elements)
        return queries + index + keys_values + hidden * self.gate_width

    @property
    def factor_params(self) -> int:
        """Elements of the projections between a latent and all heads' keys and values; 0 without a latent.

        They are in full precision in every plan: decoding multiplies queries by one and outputs by the other.
        """
        return (self.latent_rank or 0) * self.q_heads * ((self.nope_head_dim or 0) + (self.v_head_dim or 0))

    def output_params(self, hidden: Term) -> Term:
        """Elements of the output projection."""
        return self.q_heads * self.output_head_dim * hidden

    def params(self, hidden: Term) -> Term:
        """Elements of all projection matrices."""
        return self.input_params(hidden) + self.output_params(hidden)


@dataclass(frozen=True, kw_only=True)
class State(Checked):
    """A recurrent state per sequence in place of a cache: a gated delta rule, or Mamba-2.

    Mamba-2's heads are value heads of `value_dim`, its groups key heads, and its state size is `key_dim`.
    gate_rank: rank of the output gate and of a decay by key channel (Kimi Delta Attention); 0 where the gate is a full
    projection and the decay one number a head. step_limit: largest step size; 2 lets eigenvalues be negative (Grazzi et
    al. 2024).
    """

    rule: str = one_of(STATE_FLOPS)
    key_heads: int = whole(1, MAX_HEADS)
    value_heads: int = whole(1, MAX_HEADS)
    key_dim: int = whole(1, MAX_HEADS)
    value_dim: int = whole(1, MAX_HEADS)
    conv_width: int = whole(1, 1024, default=4)  # taps of the short convolution
    gate_rank: int = whole(0, 10**6, default=0)
    bytes_per_element: int = one_of((2, 4), default=4)  # of the state; the convolution's is in full precision
    step_limit: int = one_of((1, 2), default=1)

    @property
    def value_width(self) -> int:
        """Width of all value heads together, which is that of the output."""
        return self.value_heads * self.value_dim

    @property
    def key_width(self) -> int:
        """Width of all key heads together."""
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Channels of the short convolution: queries and keys (Mamba-2's C and B), and values."""
        return 2 * self.key_width + self.value_width

    @property
    def elements(self) -> int:
        """Numbers of a sequence's state, which do not grow with its length."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def scalars(self) -> int:
        """Numbers by head that steer the update: a step size, and under the delta rule a decay."""
        return self.value_heads * (2 if self.rule == DELTA_RULE and not self.gate_rank else 1)

    @property
    def decays(self) -> int:
        """Decays of a token: one per head, or one per channel of its keys."""
        return self.key_width if self.gate_rank else self.value_heads

    @property
    def in_width(self) -> int:
        """Outputs of the projections of the stream."""
        gates = 2 * self.gate_rank if self.gate_rank else self.value_width
        return self.channels + gates + self.scalars

    def input_params(self, hidden: Term) -> Term:
        """Elements of all projections but that of the output."""
        return hidden * self.in_width + self.gate_rank * (self.key_width + self.value_width)

    def output_params(self, hidden: Term) -> Term:
        """Elements of the output projection."""
        return self.value_width * hidden

    def params(self, hidden: Term) -> Term:
        """Elements of all projection matrices."""
        return self.input_params(hidden) + self.output_params(hidden)

    @property
    def vector_params(self) -> int:
        """Taps of the convolution, decays, step biases, skips and the norm of the output."""
        mamba = self.rule == MAMBA2
        taps = self.channels * (self.conv_width + mamba)
        return (
            taps
            + self.value_heads * (2 if mamba else 1)
            + self.decays
            + (self.value_width if mamba else self.value_dim)
        )


@dataclass(frozen=True)
class Routing:
    """How a router's logits choose experts and weigh them.

    Scores are a softmax over all experts, or each expert's sigmoid. The `per_token` highest are chosen; a bias by
    expert, where a model has one, counts in the choice only. With `groups`, experts of the `kept_groups` best groups
    alone may be chosen, a group being as good as the sum of its `group_members` best experts (DeepSeek-V3, section
    2.1.2; V2, section 2.2.2: of the best one). normalized: weights are divided by their sum, at least `min_sum`.
    """

    per_token: int
    sigmoid: bool = False
    normalized: bool = True
    groups: int = 1
    kept_groups: int = 1
    group_members: int = 2
    scale: float = 1.0
    min_sum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MLP(Checked):
    """A dense MLP, or routed experts with those that every token uses (shared ones, or a dense MLP beside them)."""

    intermediate: int = whole(0, MAX_WIDTH, default=0)  # of the dense MLP; 0 where there is none
    gated: bool = flag(True)  # gate, up and down; else up and down
    experts: int = whole(0, 100_000, default=0)
    experts_per_token: int = whole(0, 100_000, default=0)
    expert_intermediate: int = whole(0, MAX_WIDTH, default=0)
    shared_intermediate: int = whole(0, MAX_WIDTH, default=0)  # summed over all shared experts
    expert_hidden: int | None = whole(1, 10**6, default=None)  # of routed experts that work on a projected stream

    def _contradiction(self) -> str | None:
        if not self.experts:
            return None if self.intermediate else "an MLP needs intermediate or experts"
        if not 1 <= self.experts_per_token <= self.experts:
            return f"num_experts_per_tok is {self.experts_per_token}; allowed: 1 to {self.experts}, the experts"
        return None if self.expert_intermediate else "expert_intermediate is 0; allowed: 1 or more with experts"

    @property
    def matrices(self) -> int:
        """Matrices of one MLP."""
        return 3 if self.gated else 2

    def dense_params(self, hidden: Term) -> Term:
        """The dense MLP's matrices."""
        return self.matrices * hidden * self.intermediate

    def expert_params(self, hidden: Term) -> Term:
        """Matrices of one routed expert."""
        return self.matrices * (self.expert_hidden or hidden) * self.expert_intermediate

    def shared_params(self, hidden: Term) -> Term:
        """Matrices of all shared experts, and the projections to routed experts' own width and back."""
        projections = 2 * hidden * self.expert_hidden if self.expert_hidden else 0
        return self.matrices * hidden * self.shared_intermediate + projections

    def router_params(self, hidden: Term) -> Term:
        """The matrix that scores the experts."""
        return hidden * self.experts

    def params(self, hidden: Term) -> Term:
        """All matrices."""
        routed = self.experts * self.expert_params(hidden) + self.router_params(hidden)
        return self.dense_params(hidden) + routed + self.shared_params(hidden)


@dataclass(frozen=True, kw_only=True)
class LayerGroup(Checked):
    """Layers that are alike. indices: which of the model's layers they are; empty where only their number is known."""

    count: int = whole(1, 10_000)
    indices: tuple[int, ...] = wholes(0, 10_000, default=())
    attention: Attention | None = part_or_none(Attention)
    state: State | None = part_or_none(State)
    mlp: MLP | None = part_or_none(MLP)

    def _contradiction(self) -> str | None:
        if self.indices and len(self.indices) != self.count:
            return f"indices lists {len(self.indices)} layers; allowed: {self.count}, the count"
        if self.attention and self.state:
            return "a layer mixes tokens by attention or by a state, not by both"
        if not (self.attention or self.state or self.mlp):
            return "a layer needs attention, a state or an MLP"
        return None

    @property
    def blocks(self) -> int:
        """Residual blocks of each layer."""
        return sum(block is not None for block in (self.attention, self.state, self.mlp))


Described = TypeVar("Described", bound=Checked)


def trusted(kind: type[Described], **values: Any) -> Described:
    """A description of sizes that were checked before, or are symbols, which would fail a check."""
    instance = object.__new__(kind)
    defaults = {item.name: item.default for item in fields(kind) if item.default is not MISSING}  # type: ignore[arg-type]
    vars(instance).update(defaults | values)
    return instance


def counted(items: Iterable[tuple[Any, Term]]) -> tuple[tuple[Any, Term], ...]:
    """Equal descriptions once, with their counts added up, in the order of their first layer."""
    counts: dict[Any, Term] = {}
    for item, count in items:
        if item is not None:
            counts[item] = counts.get(item, 0) + count
    return tuple(counts.items())
