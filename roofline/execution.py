"""Rules of execution that the planner, the runtime and the kernels share, each defined once.

Predictions only hold for what really runs. Limits and rules that decide how a plan is executed are defined here; the
runtime and the cost model both import them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ridgeplan.roofline.cost import Term, indicator, maximum, minimum, where

MAX_TOKENS = 1 << 24  # the longest context that a plan may have
MAX_ACCEPTANCE_LENGTH = 5  # tokens of a pass that verifies 4 proposals, which is how users state acceptance
MAX_GAMMA = 15  # gamma + 1 verification queries fill one 16-row tensor-core tile

# Prefill runs layer by layer over a whole prompt: projections and MLPs in chunks of tokens, attention for as many KV
# heads at once as PREFILL_ATTENDED_TOKENS / tokens allows.
PREFILL_CHUNK_TOKENS = 4096  # enough rows for full speed, few enough for a small workspace
TORCH_STATE_TOKENS = 512  # of a prompt that go through a recurrent state together in torch, in float32
MAX_STATE_WIDTH = 128  # of heads whose prompts take a GPU's kernels; wider ones were not run there, and stay in torch
CPU_PREFILL_CHUNK_TOKENS = 512  # the same on a CPU, whose caches hold the activations of so many
PREFILL_ATTENDED_TOKENS = 1 << 16  # enough to fill a GPU
# Kernels that a GPU's host launches for a dense layer of a prompt, and how many more where weights are codes, of which
# each product copies its own, and where KV becomes codes.
LAYER_LAUNCHES, WEIGHT_COPY_LAUNCHES, KV_CODE_LAUNCHES = 14, 4, 2

# cuDNN plans its attention anew for every length of a prompt, 62 ms each on an H200. Prompts from PADDED_PROMPT_TOKENS
# on attend at the next multiple of PROMPT_STEP_TOKENS, so that few lengths are ever planned: with the layers of an 8B
# model a plan has paid off after 3 prompts of 8192 tokens, or one of 16384, but after 12 of 4096. Shorter ones take
# FlashAttention, which plans nothing.
PADDED_PROMPT_TOKENS = 8192
PROMPT_STEP_TOKENS = 256

# Queries of a chunk that attend to what was kept of earlier ones, too, and softmaxes with sinks take FlashAttention,
# however many queries there are: on an H200 it computes at this share of cuDNN's rate, and at the second of shorter
# prompts, the mean of six sizes of 1536 and 6000 tokens (0.41 to 0.54; suite_kernels_h200.json).
HELD_ATTENTION_SHARE, SHORT_ATTENTION_SHARE = 0.6, 0.46

# Prompts' routed experts on an H200, against the dense library's rate, with the spread between models. In a library's
# grouped products (a device's `grouped_experts`) each expert takes the time of so many rows more than it has, by the
# weights' bits and for MXFP4: the products' last tiles, reading of weights, dense copies of codes, and launches. They
# are faster from so many rows of an expert on. In Triton, which decodes codes anew for every 64 rows, experts reach a
# share of the rate. Attention over expanded latents was not timed: its spread is half to twice the time.
GROUPED_EXTRA_ROWS: Mapping[int, int] = MappingProxyType({16: 380, 8: 815, 4: 640})
GROUPED_MXFP4_EXTRA_ROWS = 690
GROUPED_ROWS, GROUPED_MXFP4_ROWS = 32, 64
PROMPT_EXPERTS_SHARE: Mapping[int, float] = MappingProxyType({16: 0.31, 8: 0.087, 4: 0.125})
PROMPT_MXFP4_SHARE = 0.23
PROMPT_EXPERTS_SPREAD = 0.3
UNTIMED_PROMPT_SPREAD = 1.0

# Scores that an eviction policy computes at once, in fp32: enough to fill a GPU, and a workspace of 64 MiB.
EVICTION_SCORE_ELEMENTS = 1 << 24

# Largest number of rows of activations that this package's matrix-product kernels take; beyond, the library is faster.
CUDA_SKINNY_GEMM_ROWS = 16
CUDA_LARGE_GEMM_ROWS = 8  # the same of weights with more than CUDA_MANY_CHANNELS inputs or outputs
CUDA_MANY_CHANNELS = 8192
CPU_SKINNY_GEMM_ROWS = 64
CUDA_LIBRARY_GEMM_ROWS = 128  # from here on a library's products are bound by arithmetic, as in prefill
MAX_QUANTIZED_ROWS = 64  # of products of codes; with more, reading these once per 16 rows costs more than a dense copy
CUDA_FUSED_SWIGLU_ROWS = 8  # most rows for which the gate and up product also applies SwiGLU, dense or 4-bit

# Products of codes in groups of INTEGER_GROUP that the CUDA C++ kernels compute as integers: of few rows, of x that
# registers hold (112 a thread for the most inputs), and of the most elements of x by bits beyond which a layer of them
# is not faster.
INTEGER_GROUP = 128
MAX_INTEGER_ROWS = 4
MAX_INTEGER_INPUTS = 14 * 1024
INTEGER_ELEMENTS: Mapping[int, int] = MappingProxyType({4: 2 * 14336, 8: 4 * 14336})

# Most query heads of a KV head, and channels of a head, for which the CUDA C++ kernels scan 2-bit keys; Triton's scan
# all others.
CUDA_SCAN_HEADS, CUDA_SCAN_HEAD_DIM = 8, 128

QUANTIZATION_GROUPS = (32, 64, 128, 256)  # weights, or tokens of the KV cache, per scale and minimum

# Plans with contexts this long keep a copy of the draft's weights on the host, so prompts may use the weights' memory
# on the device. Restoring what a prompt overwrote takes 0.4% to 2% of its time. Shorter prompts save too little memory
# to be worth the copy.
DRAFT_SWAP_PROMPT_TOKENS = 1 << 16

# Largest dense copy of a quantized weight that products of many rows hold beside the codes.
DENSE_COPY_BYTES = 128 << 20
EXPERT_COPY_BYTES = 1 << 30  # the same of routed experts: of a layer's, or of as many as fit

# What torch gives cuBLAS for each stream on Hopper, at its first call and for good (older GPUs: 8.1 MiB). Prompts are
# one stream; captured rounds are another, which calls cuBLAS if its products have more rows than this package's take.
CUBLAS_WORKSPACE_BYTES = 32 << 20

# Drafts of a round among which adaptive gamma chooses, and its plan's largest. A CUDA graph is captured for each. Times
# per token between two of them are within 2% of the better one.
GAMMA_LADDER = (0, 1, 2, 4, 6, 8, 11)

# Tokens of a suffix that a lookup compares at most; a longer match is a match of as many.
MAX_SUFFIX_TOKENS = 16

# Most that an adaptive gamma loses against plain decoding, as shares of its time: for the tokens that rounds yield, and
# once for the whole generation, before rounds have gained anything.
RUNNING_LOSS = 0.015
STARTING_LOSS = 0.01

GATHER_ROW_BYTES = 256  # of the rows that calibration gathers: one token's key of 128 channels in 16 bits
HOST_PIECE_BYTES = 512  # of the pieces that calibration gathers from the host: such a token's key and value
HOST_PAGE_BYTES = 1 << 16  # of the host's memory, as the device's page tables have it
SPLIT_TOKENS = 256  # fewest tokens per split of split-KV attention

# Tiles that an SM works on at once: outputs by inputs of a product, the latter what one stage of a pipeline holds of
# 4-bit weights that are multiplied as floats (as integers half as many); tokens of a KV head in decode attention.
TILE_OUTPUTS = 16
TILE_INPUTS = 4096
TILE_TOKENS = 128
FULL_TILES = 8  # tiles per SM from which on its pipelines are full


class RoundShape(NamedTuple):
    """The tiers of a round: who drafts, how often, and how many tokens.

    gamma: most drafts of a sequence that the target verifies. passes: passes of the self-draft. depth: tokens that the
    plan's drafter proposes at a time: to each such pass, which verifies them (a cascade), or to the target if there
    are none. Without depth each pass drafts one token.
    """

    gamma: int
    passes: int
    depth: int

    @property
    def proposes_to_target(self) -> bool:
        """Whether the target verifies proposals, without a self-draft between."""
        return self.depth > 0 and self.passes == 0


# A round, as schedules name it: by gamma alone where self-drafts alone draft.
RoundKind = int | RoundShape


def round_shape(kind: RoundKind) -> RoundShape:
    """The shape of a round; of a number, self-drafts of that many passes."""
    return kind if isinstance(kind, RoundShape) else RoundShape(kind, kind, 0)


def short_attention_factor(tokens: Term, on_gpu: Term) -> Term:
    """How many times as long attention of a prompt of `tokens` tokens computes as cuDNN's, which is calibrated."""
    return where(on_gpu * (1 - indicator(PADDED_PROMPT_TOKENS, tokens)), 1 / SHORT_ATTENTION_SHARE, 1)


def padded_prompt(tokens: Term) -> Term:
    """Tokens at which a prompt of `tokens` tokens attends: itself, or its padded length."""
    padding = -tokens % PROMPT_STEP_TOKENS
    return tokens + padding * indicator(PADDED_PROMPT_TOKENS, tokens)


def prefill_chunk_tokens(asynchronous: Term, grouped_experts: Term = 0) -> Term:
    """Tokens of a prompt that are projected together: on a GPU, which is `asynchronous`, or on a CPU.

    grouped_experts: 1 where routed experts are grouped products, which gain from more rows of each expert.
    """
    return where(asynchronous, PREFILL_CHUNK_TOKENS * (1 + grouped_experts), CPU_PREFILL_CHUNK_TOKENS)


def prompt_chunks(tokens: Term, chunk: Term) -> Term:
    """Chunks in which a prompt of `tokens` tokens goes through all layers, of up to `chunk` tokens each."""
    return -(-tokens // chunk)


def product_tiles(outputs: Term, inputs: Term) -> Term:
    """Tiles of a product with a weight of `outputs` x `inputs`."""
    return outputs / TILE_OUTPUTS * -(-inputs // TILE_INPUTS)


def attention_tiles(kv_rows: Term, tokens: Term) -> Term:
    """Tiles of a decode attention that reads `tokens` tokens for each of `kv_rows` (batch row, KV head) pairs."""
    return kv_rows * -(-tokens // TILE_TOKENS)


def many_channels(kind: str, width: float, depth: float) -> bool:
    """Whether dense products from `depth` inputs to `width` outputs go to the library from fewer rows on than others.

    Output heads do, too, but are a class of kernels of their own.
    """
    return kind == "linear" and max(width, depth) > CUDA_MANY_CHANNELS


def library_rows(rows: Term) -> Term:
    """What `rows` rows of a dense product of many channels count as in rates: where the library takes them, as many as
    it takes of every dense product."""
    few = indicator(rows, CUDA_LARGE_GEMM_ROWS)
    return few * rows + (1 - few) * maximum(rows, CUDA_SKINNY_GEMM_ROWS + 1)


def rate_rows(kind: str, rows: int, width: float, depth: float) -> int:
    """What the rows of one call of a kernel class count as in its rates."""
    return int(library_rows(rows)) if many_channels(kind, width, depth) else rows


def most_integer_inputs(rows: Term, elements: Term) -> Term:
    """Most inputs of products of integers with `rows` rows of x, which has at most `elements` elements; 0 for none."""
    return indicator(rows, MAX_INTEGER_ROWS) * minimum(MAX_INTEGER_INPUTS, elements / rows)


def takes_integers(inputs: Term, most: Term) -> Term:
    """1 where products with `inputs` inputs, of at most `most`, are computed as integers, else 0."""
    return indicator(inputs, most) * (1 - minimum(inputs % INTEGER_GROUP, 1))


def runs_integers(bits: int, rows: int, inputs: int) -> bool:
    """Whether one product of x [rows, inputs] with `bits`-bit weights in groups of INTEGER_GROUP is of integers."""
    return bool(takes_integers(inputs, most_integer_inputs(rows, INTEGER_ELEMENTS[bits])))


def filled(tiles: Term) -> Term:
    """How far an SM's pipelines are filled by `tiles` tiles of its own: 1 with FULL_TILES or more."""
    return minimum(tiles / FULL_TILES, 1)


def adaptive_gammas(largest: int) -> tuple[int, ...]:
    """The gammas of a plan whose gamma adapts up to `largest`, ascending; 0 is plain decoding."""
    return (*(gamma for gamma in GAMMA_LADDER if gamma < largest), largest)


def next_gamma(gamma: int) -> int:
    """The largest gamma of a plan that adapts around `gamma`, which is one of `adaptive_gammas` of it."""
    return min((rung for rung in GAMMA_LADDER if rung > gamma), default=gamma) if gamma in GAMMA_LADDER else gamma


def uses_draft_swap(context: Term) -> Term:
    """1 where prompts of plans with this context use the memory of the draft's weights, if any; else 0."""
    return indicator(DRAFT_SWAP_PROMPT_TOKENS, context)


def fitting_group(inputs: int, group: int) -> int | None:
    """The group size for a weight with `inputs` inputs in a plan with groups of `group`.

    The largest of `group`, 64 and 32 that is at most `group` and divides the inputs; None where none does.
    """
    return max((size for size in (group, 64, 32) if size <= group and inputs % size == 0), default=None)


def quantized_groups(tokens: int, group: int) -> int:
    """Groups held as codes of a sequence of `tokens` tokens: all whole ones but the last (QuantSpec, section 4.3.2).

    So `group` to 2 x `group` - 1 recent tokens stay in full precision, wherever rounds ended.
    """
    return max(0, tokens // group - 1)


def state_ring_rows(taps: Term, queries: Term) -> Term:
    """Latest tokens whose inputs a recurrent state's ring holds: what a pass of `queries` tokens adds, as many that it
    may replay, and the convolution's inputs ahead of these."""
    return taps - 1 + 2 * queries


def padded_head_dim(head_dim: int) -> int:
    """Channels of a head of keys and values as it is held: kernels' tiles are powers of two, and zeros fill them.

    Smaller heads than 64, which no published model of today has, stay as they are.
    """
    return head_dim if head_dim <= 64 else 1 << (head_dim - 1).bit_length()


def token_row_bytes(head_dim: Term) -> Term:
    """Bytes of a token's 8-bit key or value on the host: its codes, and a scale and a minimum, in words of 16 bytes."""
    return head_dim + 16


def layer_capacity(units: Term, layers: Term, resident: Term, host_units: Term) -> Term:
    """Units of memory that each of `resident` layers on the device may take of `units` that all layers share.

    Each of the other layers, which are on the host, takes `host_units` (SpeContext, Eq 7 solved for S).
    """
    return (units - (layers - resident) * host_units) // resident


def mean_quantized_tokens(tokens: Term, group: Term) -> Term:
    """Tokens held as codes, averaged over lengths around `tokens`.

    The smooth form of `quantized_groups` x `group`: the buffer holds 3/2 groups on average.
    """
    return maximum(tokens - 3 * group / 2, 0)


def mean_splits(batch: Term, kv_heads: Term, tokens: Term, num_sms: Term) -> Term:
    """The smooth form of `choose_splits`: with it, the splits of all rows together never shrink as rows are added."""
    return maximum(1, minimum(2 * num_sms / (batch * kv_heads), tokens / SPLIT_TOKENS))


def choose_splits(batch: Term, kv_heads: Term, tokens: Term, num_sms: Term) -> Term:
    """How many ways split-KV attention cuts each sequence: two programs per SM, each of at least SPLIT_TOKENS."""
    filling = -(-2 * num_sms // (batch * kv_heads))
    return maximum(1, minimum(filling, -(-tokens // SPLIT_TOKENS)))
