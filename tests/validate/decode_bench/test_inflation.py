"""An inflated model computes the small model's function."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ridgeplan.kernels.linear.weights import Int4Weight
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import DraftCodes, KVFormat, Workload
from ridgeplan.roofline.plan.policies.dense import quantspec_kv
from ridgeplan.runtime import load
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.attention_metadata import AttentionMetadata, LayerKV
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.memory import MemoryMeter
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.linear import Dense
from ridgeplan.runtime.model.norms import RMSNorm
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.model.prefill_layer import prefill_layer
from ridgeplan.runtime.quantization import calibration
from ridgeplan.runtime.quantization.calibration import CalibrationText, quantized_draft
from ridgeplan.runtime.speculation.draft_head import DraftHead, DraftHeadConfig, HeadCheckpoint
from ridgeplan.validate.decode_bench.inflation import (
    ChannelMap,
    Inflater,
    InflationError,
    inflated_config,
    inflated_shape,
)
from ridgeplan.validate.random_model import RandomDecoder, llama_like_shape
from ridgeplan.validate.timing import Bench

CPU = torch.device("cpu")
PROMPT = torch.randint(128, (90,), generator=torch.Generator().manual_seed(2))


def inflated_weights(config, weights, shape, seed=0):
    """Weights for `inflated_config(config, shape)` that compute the function of `weights`, on their device.

    They do not depend on RoPE scaling. Raises InflationError naming what does not fit.
    """
    inflater = Inflater.build(config, shape, weights.embedding.device, seed)
    return replace(inflater.ends(weights), layers=tuple(inflater.layers(weights)))


def small(q_heads=6, kv_heads=2, biased=False):
    """A small decoder's configuration and weights."""
    bench = Bench.build(CPU, 1 << 20, 1, 0.0)
    model = RandomDecoder.build(bench, llama_like_shape(2, 48, 80, q_heads, kv_heads, 16), 100, 1)
    weights = model.weights()
    if biased:
        layers = tuple(layer.with_projections(with_bias) for layer in weights.layers)
        weights = replace(weights, layers=layers)
    return model.decoder.config, weights


def with_bias(linear):
    return Dense(linear.weight, torch.randn(len(linear.weight), generator=torch.Generator().manual_seed(1)))


def logits(config, weights, prompt=PROMPT):
    cache = Cache(config.shape, KVCacheConfig(1, len(prompt) + 1), CPU, torch.float32)
    return prefill(Decoder(config, CPU), weights, cache, 0, prompt)


@pytest.mark.parametrize("q_heads, kv_heads, biased", [(6, 2, False), (4, 4, True), (8, 1, True)])
def test_logits_are_the_small_models(q_heads, kv_heads, biased):
    config, weights = small(q_heads, kv_heads, biased)
    shape = llama_like_shape(3, 160, 200, 8, 4, 32, vocab=300)
    large_config, large = inflated_config(config, shape), inflated_weights(config, weights, shape)
    expected, actual = logits(config, weights), logits(large_config, large)
    assert (actual[:128] - expected).abs().max() < 1e-4 * expected.std()
    assert actual[128:].max() < expected.min()
    assert large.embedding.shape == (300, 160)
    assert large.layers[2].mixer.qkv.weight.std() > 0  # layers that add nothing compute something


def test_a_draft_head_proposes_as_the_small_models():
    config, _ = small()
    keys = {
        "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": config.shape.vocab, "draft_vocab_size": 50, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    sizes, generator = DraftHeadConfig.of(keys, config.shape, "head").sizes, torch.Generator().manual_seed(4)
    tensors = {name: torch.randn(size, generator=generator) * size[-1] ** -0.5 for name, size in sizes.items()}
    checkpoint = HeadCheckpoint.of(keys, tensors, config.shape, "head")
    inflater = Inflater.build(config, llama_like_shape(3, 160, 200, 8, 4, 32, vocab=300), CPU)
    streams, tokens = torch.randn(3, 1, 5, 48, generator=generator), torch.arange(5)[None]
    padded = torch.zeros(3, 1, 5, 160).index_copy_(3, inflater.channel_map.hidden_channels, streams)
    padded[..., inflater.channel_map.constant_channel] = 2.0**-10
    embedding = torch.randn(config.shape.vocab, 48, generator=generator)
    cases = (checkpoint, embedding, streams), (inflater.draft_head(checkpoint), inflater.embedding(embedding), padded)
    results = []
    for each, embedded, taken in cases:
        head = DraftHead.of(each, embedded)
        shape = each.config.layer.shape
        keys_of, values = torch.zeros(2, 1, shape.kv_heads, 5, shape.head_dim)
        residual, queries = head.project(tokens, head.fused(taken), tokens, tokens, keys_of, values)
        begin, end = torch.zeros(1, dtype=torch.int32), torch.full((1,), 5, dtype=torch.int32)
        reads = AttentionMetadata(tokens, tokens, begin, end, None, lower=False)
        kv = LayerKV(keys_of, values, begin, end, None, None)
        cache = SimpleNamespace(layer_kv=lambda layer, metadata, kv=kv: nullcontext(kv))
        results.append(head.finish(residual[:, -1:], queries[:, -1:], cache, reads)[1])
    assert (results[1] - results[0]).abs().max() < 1e-4 * results[0].std()


def test_the_vocabulary_grows_to_hold_the_small_models():
    config, weights = small()
    shape = inflated_shape(config.shape, llama_like_shape(2, 160, 200, 8, 4, 32, vocab=64))
    assert (shape.vocab, shape.tied_embeddings) == (128, False)
    assert inflated_weights(config, weights, shape).head.weight.shape == (128, 160)


@pytest.mark.parametrize(
    "shape, message",
    [
        (llama_like_shape(1, 160, 200, 8, 4, 32), "needs 2 layers; allowed by 'random': up to 1"),
        (llama_like_shape(2, 48, 200, 8, 4, 32), "needs 49 hidden"),
        (llama_like_shape(2, 160, 200, 8, 4, 8), "needs 16 head_dim"),
        (llama_like_shape(2, 160, 79, 8, 4, 32), "needs 80 MLP channels"),
        (llama_like_shape(2, 160, 200, 2, 1, 32), "needs 4 KV heads"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(shape, message):
    with pytest.raises(InflationError, match=message):
        inflated_weights(*small(), shape)


def test_a_model_with_norms_of_queries_and_keys_is_refused():
    config, weights = small()
    norm = RMSNorm(torch.ones(8, 16), 1e-5)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, qk_norm=norm)) for layer in weights.layers)
    with pytest.raises(InflationError, match="normalizes queries and keys; allowed: families without such norms"):
        inflated_weights(config, replace(weights, layers=layers), llama_like_shape(3, 160, 200, 8, 4, 32))


def grouped():
    """A small decoder whose weights are quantized in groups of 64, as 128 does not divide its sizes, and its inflation.

    As in Llama-3.1-8B's shape, query heads of a group and whole KV heads are added, and heads become twice as wide.
    """
    torch.manual_seed(0)
    bench = Bench.build(CPU, 1 << 20, 1, 0.0)
    model = RandomDecoder.build(bench, llama_like_shape(2, 192, 192, 3, 3, 64), 100, 1)
    config, weights = model.decoder.config, model.weights()
    shape = llama_like_shape(3, 768, 640, 4, 4, 128, vocab=300)
    return (config, weights), (inflated_config(config, shape), inflated_weights(config, weights, shape))


@pytest.mark.parametrize("seed", [0, 1])
def test_codes_of_keys_and_values_are_the_small_models(seed):
    """Zeros do not widen a token's range of values, so that drafts err as the small model's do."""
    prompt = torch.randint(128, (400,), generator=torch.Generator().manual_seed(seed))
    results = []
    for config, weights in grouped():
        sizes = KVCacheConfig(1, 410, KVFormat.HIERARCHICAL, 128, 1, DraftCodes.UPPER)
        cache = Cache(config.shape, sizes, CPU, torch.float32)
        decoder, token = Decoder(config, CPU), torch.tensor([[5]])
        prefill(decoder, weights, cache, 0, prompt)
        steps = [AttentionMetadataBuilder(cache).draft_metadata(0), AttentionMetadataBuilder(cache).target_metadata(1)]
        results.append([decoder.step(weights, cache, token, metadata)[0, 0, :128] for metadata in steps])
    (draft, target), (large_draft, large_target) = results
    tolerance = 1e-3 * target.std()
    assert (large_draft - draft).abs().max() < tolerance
    assert (large_target - target).abs().max() < tolerance
    assert (draft - target).abs().max() > 10 * tolerance  # 4 bits make a difference


@pytest.mark.parametrize("natural", [True, False])
def test_4_bit_weights_err_as_the_small_models_do(natural, monkeypatch):
    """Up to ties: rounding the other way changes what GPTQ makes up for later."""
    monkeypatch.setattr(calibration, "LibraryInt4Weight", Int4Weight)  # computes in float32
    text = CalibrationText(torch.randint(128, (4, 200), generator=torch.Generator().manual_seed(1)), natural)
    drafts, dense = [], []
    for config, weights in grouped():
        decoder = Decoder(config, CPU)
        for kind, weights_of_kind in ((weights, dense), (quantized_draft(decoder, weights, 128, text), drafts)):
            weights_of_kind.append(all_logits(config, kind)[:, :128])
    small, large = drafts
    error = (small - dense[0]).square().mean().sqrt()
    assert (large - small).square().mean().sqrt() < 0.25 * error
    assert error > 0.1 * dense[0].std()


@torch.no_grad()
def all_logits(config, weights):
    hidden = torch.nn.functional.embedding(PROMPT, weights.embedding)
    for index, layer in enumerate(weights.layers):
        prefill_layer(Decoder(config, CPU), index, layer, hidden)
    return weights.logits(weights.norm(hidden, None)[1])


def test_a_small_models_group_has_a_group_to_itself():
    config, _ = grouped()[0]
    wide, narrow = (ChannelMap(config, llama_like_shape(3, hidden, 640, 4, 4, 128)) for hidden in (768, 512))
    # The constant has the first 256 channels, the largest group; then 64 of every 128 are used.
    assert wide.hidden_channels.tolist() == [256 + 128 * group + place for group in range(3) for place in range(64)]
    assert wide.mlp_channels.tolist() == [128 * group + place for group in range(3) for place in range(64)]
    assert wide.quiet_channels == 768  # 576 + 64 used, in whole groups of 256
    assert narrow.hidden_channels.tolist() == list(range(1, 193))  # 256 + 384 channels do not fit
    assert narrow.quiet_channels == 256
    for channel_map in (wide, narrow):
        assert channel_map.constant_channel not in channel_map.hidden_channels


def test_idle_channels_are_silent_and_all_else_is_noise():
    _, (_, large) = grouped()
    layer = large.layers[0]
    values = layer.mixer.qkv.weight[-4 * 128 :].unflatten(0, (4, 128))
    assert values[3].abs().max() == 0
    assert values[:3, 32:64].abs().max() == values[:3, 96:].abs().max() == 0
    assert values[:3, :32].abs().min() == 0 < values[:3, :32].abs().max()  # the small model's, in its input channels
    gates, ups = layer.mlp.gate_up.weight.chunk(2)
    assert gates[64:128].abs().max() == 0
    assert ups[64:128].abs().min() > 0
    assert layer.mixer.qkv.weight[4 * 128 + 32 : 4 * 128 + 64].abs().min() > 0  # keys that zero queries never see
    assert large.head.weight[:, 640:].abs().max() == 0  # all 768 channels share groups with used ones
    assert large.layers[2].mixer.qkv.weight.abs().min() > 0


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_generates_the_same_tokens(smollm2, long_text):
    """Speculation included: the codes hold the small model's KV, so drafts are accepted as its are."""
    workload = Workload("smollm2", "cpu", 245, 20, 1)  # with a flush at 256 tokens
    source = load(quantspec_kv(workload), str(smollm2))
    shape = llama_like_shape(31, 640, 1600, 12, 3, 128, vocab=50_000)
    config = inflated_config(source.config, shape)
    weights = inflated_weights(source.config, source.weights, shape)
    engine = Engine(quantspec_kv(workload), str(smollm2), config, weights, CPU, MemoryMeter(CPU))
    prompt = source.tokenizer(long_text[30_000:40_000])["input_ids"][:245]
    plain, inflated = source.generate(prompt, 20), engine.generate(prompt, 20)
    assert inflated.tokens == plain.tokens
    assert inflated.statistics.flushes == 1
    assert inflated.statistics.acceptance > plain.statistics.acceptance - 0.1
    difference = logits(config, weights, torch.tensor(prompt))[: source.config.shape.vocab] - logits(
        source.config, source.weights, torch.tensor(prompt)
    )
    assert difference.abs().max() < 1e-3


@torch.no_grad()
def acceptance(config, weights, text, tokens, context, vocab):
    """Of drafts with 4-bit codes, and of those with 4-bit weights too: mean of sum(min(p, q)) over `tokens`."""
    sizes = KVCacheConfig(1, len(tokens), KVFormat.HIERARCHICAL, 128, 1, DraftCodes.UPPER)
    cache, decoder = Cache(config.shape, sizes, CPU, torch.float32), Decoder(config, CPU)
    drafts = weights, quantized_draft(decoder, weights, 128, text)
    prefill(decoder, weights, cache, 0, torch.tensor(tokens[:context]))

    def probabilities(kind, token, metadata):
        return decoder.step(kind, cache, torch.tensor([[token]]), metadata)[0, 0, :vocab].softmax(-1)

    agreed = []
    for token in tokens[context:]:
        drafted = [probabilities(draft, token, AttentionMetadataBuilder(cache).draft_metadata(0)) for draft in drafts]
        target = probabilities(weights, token, AttentionMetadataBuilder(cache).target_metadata(1))
        agreed.append([float(torch.minimum(target, row).sum()) for row in drafted])
        cache.advance(torch.ones(1, dtype=torch.int32))
    return torch.tensor(agreed).mean(0)


@pytest.mark.model
@pytest.mark.slow
def test_drafts_of_smollm2_are_accepted_as_often_as_natively(smollm2, long_text):
    """Measured: 0.974 for 4-bit codes and 0.861 with 4-bit weights, in both."""
    source = load(quantspec_kv(Workload("smollm2", "cpu", 384, 48, 1)), str(smollm2), device="cpu")
    vocab, decoder = source.config.shape.vocab, Decoder(source.config, CPU)
    tokens = source.tokenizer(long_text[30_000:40_000])["input_ids"][:432]
    text = CalibrationText.of_model(decoder, source.weights)
    shape = llama_like_shape(31, 1536, 1792, 16, 4, 128, vocab=50_000)
    config, weights = inflated_config(source.config, shape), inflated_weights(source.config, source.weights, shape)
    native = acceptance(source.config, source.weights, text, tokens, 384, vocab)
    inflated = acceptance(config, weights, text, tokens, 384, vocab)
    assert (inflated - native).abs().max() < 0.01
    assert native.min() > 0.7


def test_shapes_of_the_catalog_are_large_enough():
    config, _ = small()
    assert inflated_shape(config.shape, load_shape("meta-llama/Llama-3.1-8B")).vocab == 128256
