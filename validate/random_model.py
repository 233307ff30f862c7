"""Models with random weights and filled caches: their decoders, and timed rounds of a plan on them.

A round's time depends on sizes and formats, not on what the weights have learned. The tokens that it yields depend on
the weights, so they are measured on real models (suite/generations.py).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from ridgeplan.kernels.experts import SWIGLU, Activation
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.linear.weights import MXFP4_GROUP, Mxfp4Weight
from ridgeplan.kernels.state import DeltaVectors
from ridgeplan.planner.capacity import Capacity, offloaded_layers
from ridgeplan.roofline.catalog.layers import MLP, LayerGroup, Routing, State
from ridgeplan.roofline.catalog.model_shape import KEPT_FORMAT, ModelShape
from ridgeplan.roofline.execution import TILE_OUTPUTS, RoundKind, round_shape
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import DrafterKind, Plan
from ridgeplan.roofline.plan.support import missing_head
from ridgeplan.roofline.strategy import HEAD_VOCAB
from ridgeplan.runtime.errors import UnsupportedPlan
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.kv.storage import KVStore
from ridgeplan.runtime.model.decoder import Decoder, DecoderConfig, layer_settings
from ridgeplan.runtime.model.experts import RoutedMLP, StackedExperts
from ridgeplan.runtime.model.latent import LatentAttentionWeights
from ridgeplan.runtime.model.linear import Dense, GatedMLP, Linear, Mxfp4
from ridgeplan.runtime.model.norms import RMSNorm
from ridgeplan.runtime.model.weights import (
    AttentionWeights,
    DecoderWeights,
    DeltaWeights,
    LayerWeights,
    TokenMixer,
    WeightFormat,
)
from ridgeplan.runtime.offload.host_store import HostKVStore
from ridgeplan.runtime.policies import token_selector
from ridgeplan.runtime.quantization.calibration import linear_of, plane_parts
from ridgeplan.runtime.quantization.gptq import Parts
from ridgeplan.runtime.retrieval.head import Head, HeadConfig, HeadWeights, probe_of
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.speculation.draft_head import DraftHead, DraftHeadConfig, HeadCheckpoint
from ridgeplan.runtime.speculation.proposer import make_proposer
from ridgeplan.runtime.speculation.rounds import EagerRounds, GraphRounds, Rounds
from ridgeplan.runtime.speculation.sparse_target import SparseTargetAttention
from ridgeplan.runtime.speculation.speculator import RoundResult, Speculator
from ridgeplan.runtime.speculation.train_head import HeadTraining, head_keys
from ridgeplan.validate.measure import is_busy, spread_of
from ridgeplan.validate.timing import Bench


def llama_like_shape(
    layers: int, hidden: int, intermediate: int, q_heads: int, kv_heads: int, head_dim: int, vocab: int = 128
) -> ModelShape:
    """A small dense shape with tied embeddings and 4096 tokens of context."""
    return ModelShape(
        name="random", architecture="llama", layers=layers, hidden=hidden, q_heads=q_heads, kv_heads=kv_heads,
        head_dim=head_dim, intermediate=intermediate, vocab=vocab, max_context=4096, tied_embeddings=True,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class RandomDecoder:
    """A decoder of `shape` with an empty cache for plain decoding."""

    shape: ModelShape
    decoder: Decoder
    cache: Cache
    bench: Bench

    @classmethod
    def build(cls, bench: Bench, shape: ModelShape, context: int, new_tokens: int, batch: int = 1) -> RandomDecoder:
        """A decoder whose cache holds `context` + `new_tokens` tokens of `batch` sequences."""
        sizes = KVCacheConfig(batch, context + new_tokens)
        cache = Cache(shape, sizes, bench.device, bench.pool.dtype)
        return cls(shape, Decoder(DecoderConfig.plain(shape), bench.device), cache, bench)

    def weights(self, shared: bool = False) -> DecoderWeights:
        """Random weights in memory of their own in every layer, so that a step reads them from there.

        shared: layers that are alike share it, where all would not fit.
        """
        hidden, groups = self.shape.hidden, self.shape.group_of_each
        embedding = self.bench.random(self.shape.vocab, hidden)
        if shared:
            alike = {group: self._layer(group) for group in dict.fromkeys(groups)}
            layers = tuple(alike[group] for group in groups)
        else:
            layers = tuple(map(self._layer, groups))
        return DecoderWeights(embedding, layers, self._norm(hidden), Dense(embedding))

    def tokens(self, queries: int) -> Tensor:
        """Token ids [batch, queries]."""
        shape = (self.cache.config.batch, queries)
        return torch.randint(self.shape.vocab, shape, device=self.bench.device)

    def _dense(self, outputs: int, inputs: int, bias: Tensor | None = None) -> Dense:
        return Dense(self.bench.random(outputs, inputs) / inputs**0.5, bias)  # keeps activations near 1

    def _mlp(self, mlp: MLP | None) -> GatedMLP | RoutedMLP:
        """A dense MLP, or experts with a random router, which spreads tokens evenly; experts are copies of one."""
        assert mlp is not None, "the runtime executes layers with attention and an MLP"
        hidden, other = self.shape.hidden, "other activation" in self.shape.traits

        def gated(width: int) -> GatedMLP:
            activation = "gelu_tanh" if other else "silu"
            return GatedMLP(self._dense(2 * width, hidden), self._dense(hidden, width), activation)

        if not mlp.experts:
            return gated(mlp.intermediate)
        width = mlp.expert_intermediate
        gate_up, down = (self._experts(mlp.experts, *sizes) for sizes in ((2 * width, hidden), (hidden, width)))
        shared = gated(mlp.shared_intermediate) if mlp.shared_intermediate else None
        router = self._dense(mlp.experts, hidden).weight
        routing, activation = Routing(per_token=mlp.experts_per_token), CLAMPED if other else SWIGLU
        return RoutedMLP(router, routing, gate_up, down, shared=shared, activation=activation)

    def _experts(self, count: int, outputs: int, inputs: int) -> StackedExperts:
        if self.shape.weight_bits.format != KEPT_FORMAT:
            return StackedExperts.of(self._dense(outputs, inputs).weight.repeat(count, 1, 1))
        bytes_of = partial(torch.randint, dtype=torch.uint8, device=self.bench.device)
        codes = bytes_of(256, (count * outputs, inputs // 2))
        scales = bytes_of(118, 122, (count * outputs, inputs // MXFP4_GROUP))
        return StackedExperts(Mxfp4(Mxfp4Weight(codes, scales)), count)

    def _norm(self, *sizes: int) -> RMSNorm:
        return RMSNorm(self.bench.random(*sizes), self.decoder.config.norm_eps)

    def _attention(self, gate_width: int) -> AttentionWeights:
        shape, dense = self.shape, self._dense
        projected, heads = shape.q_width + 2 * shape.kv_width, shape.q_heads + shape.kv_heads
        bias = self.bench.random(projected).clone() if shape.attention_bias else None
        return AttentionWeights(
            qkv=dense(projected, shape.hidden, bias),
            output=dense(shape.hidden, shape.q_width),
            qk_norm=self._norm(heads, shape.head_dim) if shape.qk_norm else None,
            gate=dense(gate_width, shape.hidden) if gate_width else None,
            sinks=self.bench.random(shape.q_heads).float() if "attention sinks" in self.shape.traits else None,
        )

    def _latent_attention(self) -> LatentAttentionWeights:
        shape, heads = self.shape, self.shape.q_heads
        latent, plain, width = shape.latent_rank or 0, shape.nope_head_dim or 0, shape.v_head_dim or 0
        rank, row = shape.q_lora_rank, latent + (shape.rope_head_dim or 0)
        keys, values = (self._dense(heads * each, latent).weight.unflatten(0, (heads, -1)) for each in (plain, width))
        return LatentAttentionWeights(
            down=self._dense((rank or shape.q_width) + row, shape.hidden),
            up=self._dense(shape.q_width, rank) if rank else None,
            query_norm=self._norm(rank) if rank else None,
            latent_norm=self._norm(latent),
            keys=keys,
            values=values,
            output=self._dense(shape.hidden, heads * width),
        )

    def _state(self, state: State) -> DeltaWeights:
        by_head = torch.zeros(state.value_heads, device=self.bench.device)
        taps = self._dense(state.channels, state.conv_width).weight
        vectors = DeltaVectors(taps, by_head, by_head, state.key_heads, state.key_dim)
        inputs, output = (
            self._dense(state.in_width, self.shape.hidden),
            self._dense(self.shape.hidden, state.value_width),
        )
        return DeltaWeights(inputs, vectors, self._norm(state.value_dim), output)

    def _layer(self, group: LayerGroup) -> LayerWeights:
        attention, state = group.attention, group.state
        mixer: TokenMixer
        if state:
            mixer = self._state(state)
        elif self.shape.is_mla:
            mixer = self._latent_attention()
        else:
            mixer = self._attention(attention.gate_width if attention else 0)
        norm = self._norm(self.shape.hidden)
        output_norms = (norm, norm) if self.shape.sandwich_norms else ()
        return LayerWeights(norm, mixer, norm, self._mlp(group.mlp), *output_norms)


CLAMPED = Activation(1.702, 7.0, 1.0)  # gpt-oss
WARM_ROUNDS = 2
TIMED_ROUNDS = {"cuda": 12, "cpu": 5}
MAX_TRIES = 3
SAMPLING = SamplingParams(temperature=1.0)  # the cost model prices draws, not greedy decoding


@dataclass(frozen=True)
class RoundTimes:
    """Median seconds of a round's parts: one draft step, verification with sampling, keeping, and waits between rounds.

    Rounds that quantize a group are few, so the medians leave flushes out. grown: tokens that a sequence gained.
    spread: interquartile range of whole rounds over their median. passes: of the self-draft in a round.
    """

    passes: int
    draft_s: float
    verify_s: float
    keep_s: float
    idle_s: float
    grown: int
    spread: float | None

    @property
    def total_s(self) -> float:
        """A whole round."""
        return self.passes * self.draft_s + self.verify_s + self.keep_s + self.idle_s

    @classmethod
    def of(cls, passes: int, results: list[RoundResult]) -> RoundTimes:
        """The medians over some rounds."""

        def median(phase: str) -> float:
            return statistics.median(result.seconds.get(phase, 0.0) for result in results)

        grown = sum(len(row.tokens) for result in results for row in result.rows) / len(results[0].rows)
        draft_s = median("draft") / passes if passes else 0.0
        spread = spread_of([result.seconds["draft"] + result.seconds["verify"] for result in results])
        parts = draft_s, median("verify"), median("flush"), median("idle")
        return cls(passes, *parts, max(1, math.ceil(grown)), spread)


@dataclass(frozen=True, eq=False)
class RandomModel:
    """A model of `shape` with random weights. quantized: its weights as codes, made when first needed.

    machine: what plans run on; its memory is what the weights and a plan's cache may take together.
    """

    shape: ModelShape
    decoder: Decoder
    weights: DecoderWeights
    device: torch.device
    machine: Device
    quantized: dict[WeightFormat, DecoderWeights] = field(default_factory=dict)

    @classmethod
    def build(cls, shape: ModelShape, device: torch.device, machine: Device) -> RandomModel:
        """Random weights in the models' dtype; layers have memory of their own, so that a step reads all of it.

        Of a model that only fits as codes, dense layers share memory.
        """
        mixer_width = max([shape.q_width + 2 * shape.kv_width, *(state.in_width for state, _ in shape.states)])
        largest = max(shape.vocab, 2 * shape.intermediate, mixer_width) * shape.hidden
        bench = Bench.build(device, largest * (2 if device.type == "cuda" else 4), 0, 0.0)
        plain = DecoderConfig.plain(shape)
        decoder = Decoder(dataclasses.replace(plain, layers=layer_settings(shape.group_of_each)), device)
        empty = Cache(shape, KVCacheConfig(1, 1), device, bench.pool.dtype)
        too_large = shape.parameters * bench.element_bytes > machine.memory_bytes
        weights = RandomDecoder(shape, decoder, empty, bench).weights(shared=too_large)
        # Small logits, so that rows sample tokens of their own: equal ones would hit the same experts.
        norm = RMSNorm(bench.random(shape.hidden) / shape.hidden, plain.norm_eps)
        return cls(shape, decoder, dataclasses.replace(weights, norm=norm), device, machine)

    def fitting(self, plans: Sequence[Plan]) -> list[Plan]:
        """The plans whose predicted peak is within the memory."""
        return list(compress(plans, Capacity(plans, self.shape, self.machine).fits()))

    def cache_config(self, plan: Plan) -> KVCacheConfig:
        """The cache that executes the plan, with the layers on the host that have to be."""
        sizes = self.shape.kv_layers, *offloaded_layers(plan, self.shape, self.machine)
        return KVCacheConfig.of(plan, *sizes, self.decoder.config.attention_windows)

    def target(self, plan: Plan) -> DecoderWeights:
        """The weights that the plan's verification reads; 4-bit ones have a dense head."""
        if plan.weights.stored:
            raise UnsupportedPlan("random weights are of no GGUF file; allowed: plans without stored weights")
        if plan.weights.dense:
            return self.weights
        weights = self._quantized(WeightFormat(*plan.weights.target_format))
        return weights if plan.weights.target_bits == 8 else dataclasses.replace(weights, head=self.weights.head)

    def drafter(self, plan: Plan) -> DecoderWeights:
        """The weights that the plan's drafts read."""
        if plan.weights.hierarchical:
            return self.target(plan).upper
        return self._quantized(WeightFormat(4, plan.weights.group)) if plan.weights.draft_copy else self.target(plan)

    def _quantized(self, kind: WeightFormat) -> DecoderWeights:
        """Weights as codes. Layers are copies of the first one of their kind."""
        if kind not in self.quantized:
            self.quantized[kind] = self._packed(kind)
        return self.quantized[kind]

    def _packed(self, kind: WeightFormat) -> DecoderWeights:
        tiles: dict[int, tuple[Parts, ...]] = {}  # by inputs

        def packed(linear: Linear) -> Linear:
            """A layer that draws each group of inputs from the groups of one quantized tile, which is fast.

            Repeating the tile's outputs would make all rows alike, and experts would be hit as by a single row.
            """
            if not isinstance(linear, Dense):  # as it is stored
                return linear
            outputs, inputs = linear.weight.shape
            if inputs not in tiles:
                tiles[inputs] = plane_parts(linear.weight[:TILE_OUTPUTS], kind)
            groups = tiles[inputs][0][1].shape[1]
            drawn = torch.randint(TILE_OUTPUTS * groups, (outputs, groups), device=linear.weight.device)
            planes = [
                (codes.unflatten(1, (groups, -1)).flatten(0, 1)[drawn].flatten(1), scale.flatten()[drawn],
                 zero.flatten()[drawn])
                for codes, scale, zero in tiles[inputs]
            ]  # fmt: skip
            return linear_of(planes, linear.bias, kind.hierarchical)

        def parts(layer: LayerWeights) -> tuple[type, type]:
            return type(layer.mixer), type(layer.mlp)

        firsts = {parts(layer): layer for layer in reversed(self.weights.layers)}
        codes = {kinds: layer.with_projections(packed) for kinds, layer in firsts.items()}
        layers = tuple(codes[parts(layer)].with_projections(copy.deepcopy) for layer in self.weights.layers)
        return dataclasses.replace(self.weights, layers=layers, head=packed(self.weights.head))


class BusyMachine(ValueError):
    """Rounds differ too much to be compared with a prediction."""


@torch.inference_mode()
def measured_round(model: RandomModel, plan: Plan, cache: Cache | None = None, steady: bool = True) -> RoundTimes:
    """A round of `plan` at its context, on CUDA as the graph that the runtime replays, with all layers.

    cache: one of the plan that has been filled; by default it is made here. Measured again while the spread says that
    the machine is busy; raises BusyMachine if it stays so, unless it need not be `steady`.
    """
    for _ in range(MAX_TRIES):
        times = _round_times(model, plan, cache)
        if not steady or not is_busy(times.spread):
            return times
    raise BusyMachine(f"machine busy, spread {times.spread:.0%}")


def _round_times(model: RandomModel, plan: Plan, cache: Cache | None) -> RoundTimes:
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # of the last plan's cache and graph
    speculator = _speculator(model, plan, cache or random_cache(model, plan))  # graphs do not keep what they read
    rounds = _prepared(speculator, plan)
    count = TIMED_ROUNDS[model.device.type]
    results = [_next_round(rounds, plan.speculation.round_kind) for _ in range(WARM_ROUNDS + count)]
    return RoundTimes.of(round_shape(plan.speculation.round_kind).passes, results[WARM_ROUNDS:])


def random_cache(model: RandomModel, plan: Plan, generated: int = 0) -> Cache:
    """A cache that holds random prompts of the plan's context, and `generated` tokens after each."""
    cache = Cache(model.shape, model.cache_config(plan), model.device, model.weights.embedding.dtype)
    fill(cache, plan.workload.context)
    cache.lengths += generated
    if cache.states is not None:  # after a step, whose token the states do not hold yet
        cache.states.committed.copy_(cache.accepted - 1)
    return cache


def random_head(shape: ModelShape, embedding: Tensor) -> Head:
    """A retrieval head with random weights for a model of `shape`, with as many heads as it has."""
    config = HeadConfig(
        model=shape.name, hidden=shape.hidden, vocab=shape.vocab, q_heads=shape.q_heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, context=shape.max_context,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    heads = (shape.q_heads, shape.kv_heads)
    q, k = (torch.randn(count * shape.head_dim, shape.hidden, generator=generator) for count in heads)
    scale = shape.hidden**-0.5
    return Head(config, HeadWeights(torch.ones(shape.hidden), q * scale, k * scale, probe_of(embedding)))


def random_draft_head(shape: ModelShape, embedding: Tensor) -> DraftHead:
    """A draft head with random weights, for a model of this shape and embedding [vocab, hidden]."""
    keys = head_keys(shape, HeadTraining(draft_vocab=HEAD_VOCAB), shape.rope_theta, 1e-5)
    config = DraftHeadConfig.of(keys, shape, "random")
    tensors = {name: embedding.new_empty(size).normal_(std=size[-1] ** -0.5) for name, size in config.sizes.items()}
    return DraftHead.of(HeadCheckpoint(keys, config, tensors, torch.arange(config.draft_vocab)), embedding)


def _speculator(model: RandomModel, plan: Plan, cache: Cache) -> Speculator:
    """The plan's speculator over a filled cache."""
    seed = torch.zeros((), dtype=torch.int64, device=model.device)
    embedding = model.weights.embedding
    head = random_head(model.shape, embedding).for_model(model.shape, embedding) if missing_head(plan) else None
    selector = token_selector(plan.speculation.selection.among_all, AttentionMetadataBuilder(cache), head)
    sparse_target = SparseTargetAttention.of(plan.attention.chosen, cache, head)
    target, drafter = model.target(plan), model.drafter(plan)
    trained = random_draft_head(model.shape, embedding) if plan.speculation.drafter.kind is DrafterKind.HEAD else None
    proposer = make_proposer(plan.speculation.drafter, cache, trained)
    known = seed, sparse_target, proposer, plan.speculation.drafter.depth
    speculator = Speculator(model.decoder, target, drafter, cache, selector, SAMPLING, *known)
    for each in speculator.selectors:
        each.start()
    return speculator


def _prepared(speculator: Speculator, plan: Plan) -> Rounds:
    """The plan's rounds in the state after prefill."""
    device = speculator.cache.lengths.device
    graphs = device.type == "cuda"
    rounds = GraphRounds(speculator, plan.speculation.round_kinds) if graphs else EagerRounds(speculator)
    rounds.start(torch.zeros(plan.workload.batch, dtype=torch.int64, device=device))
    return rounds


def fill(cache: Cache, tokens: int) -> None:
    """Fills a cache as prompts of `tokens` tokens do, with random keys, values and codes, all of about -1 to 1.

    Larger ones would make attention weights so small that CPUs slow down on denormal numbers.
    """
    cache.reset(cache.config.batch)
    for row in range(cache.config.batch):
        cache.finish_prompt(row, tokens)
    for store in cache.stores:
        _fill(store)


def _fill(store: KVStore | HostKVStore) -> None:
    on_host = [part for pair in store.on_host for part in pair] if isinstance(store, HostKVStore) else []
    for tensor in (store.keys, store.values, *on_host):
        tensor.normal_()
    if isinstance(store, HostKVStore) and store.two_bit:
        keys = store.two_bit.keys
        keys.codes.random_(0, 256)
        keys.minimum.fill_(-1.0)
        keys.scale.fill_(2 / 15)
    for coded in store.coded:
        for codes in (coded.codes, coded.window.codes) if coded.window else (coded.codes,):
            fill_codes(codes, lambda plane: plane.random_(0, 256))


def fill_codes(codes: QuantizedKV, draw: Callable[[Tensor], object]) -> None:
    """Fills codes so that they decode to about -1 to 1. draw: fills a plane of them with random bytes."""
    for item in dataclasses.fields(codes):
        plane = getattr(codes, item.name)
        if plane is not None and plane.dtype == torch.uint8:
            draw(plane)
        elif plane is not None:
            plane.fill_(-1.0 if item.name.endswith("min") else 2 / 15)


def _next_round(rounds: Rounds, kind: RoundKind) -> RoundResult:
    while rounds.in_flight < rounds.depth:
        rounds.launch(kind)
    return rounds.collect()
