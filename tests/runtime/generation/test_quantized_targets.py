"""Targets with 4-bit weights: what is computed, what stays in memory, and that drafts change nothing."""

import copy
import weakref

import pytest
import torch
from grids import pairs
from torch.nn import functional

from ridgeplan import runtime
from ridgeplan.kernels.linear.weights import Int4Weight
from ridgeplan.roofline.memory import weight_memory
from ridgeplan.roofline.passes import weight_bytes
from ridgeplan.runtime import loading
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.memory import MemoryMeter
from ridgeplan.runtime.model import checkpoint
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.model.linear import Dense, Int4, Int8
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.model.prefill_layer import prefill_layer
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization import calibration
from ridgeplan.runtime.quantization.calibration import rounded_target

FORMATS = ["bf16", "bf16+int4", "int8", "int4x2"]


@pytest.fixture
def exact(monkeypatch):
    """Products with 4-bit weights in float32: torch's kernel for CPUs rounds to bfloat16, which may decide ties."""
    monkeypatch.setattr(calibration, "LibraryInt4Weight", Int4Weight)


def projections(layer):
    return [*layer.projections]


@torch.inference_mode()
def logits_of(engine, tokens, prompt_tokens):
    """Prefill of the first tokens, then one decode step for each of the others: [steps, vocab]."""
    engine.cache.reset(1)
    ids = torch.tensor(tokens)
    steps = [prefill(engine.decoder, engine.weights, engine.cache, 0, ids[:prompt_tokens])]
    for token in ids[prompt_tokens:]:
        metadata = AttentionMetadataBuilder(engine.cache).target_metadata(1)
        steps.append(engine.decoder.step(engine.weights, engine.cache, token.view(1, 1), metadata)[0, 0])
        engine.cache.advance(torch.ones(1, dtype=torch.int32))
    return torch.stack(steps)


# Modules of a transformers layer in the order of the rows of our projections.
MODULES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def dequantized(reference, weights):
    """transformers' model with the weights that the codes stand for."""
    model = copy.deepcopy(reference)
    for layer, ours in zip(model.model.layers, weights.layers, strict=True):
        for names, projection in zip(MODULES, projections(ours), strict=True):
            parts = [layer.get_submodule(name).weight for name in names]
            values = projection.weight.dequantize().split([len(part) for part in parts])
            for part, value in zip(parts, values, strict=True):
                part.data.copy_(value)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_are_those_of_the_dequantized_weights(family, exact, tiny_model, make_plan, prompts):
    model, [tokens] = tiny_model(family), prompts(90)
    engine = runtime.load(make_plan(target_bits=4), model.folder, device="cpu")
    actual = logits_of(engine, tokens, 70)
    models = dequantized(model.reference, engine.weights), model.reference
    with torch.inference_mode():
        expected, dense = (each(torch.tensor([tokens])).logits[0, 69:] for each in models)
    assert (actual - expected).abs().max() < 1e-4
    assert (dense - expected).abs().max() > 0.1  # 4 bits make a difference


def test_a_cpus_own_kernel_rounds_to_bfloat16_and_no_more(tiny_model, make_plan, prompts, monkeypatch):
    [tokens, text], plan, folder = prompts(90, 100), make_plan(target_bits=4), tiny_model().folder
    rounded = logits_of(runtime.load(plan, folder, device="cpu", calibration=text), tokens, 70)
    monkeypatch.setattr(calibration, "LibraryInt4Weight", Int4Weight)
    expected = logits_of(runtime.load(plan, folder, device="cpu", calibration=text), tokens, 70)
    assert (rounded - expected).abs().mean() < 0.02 * expected.std()  # a bfloat16 has 8 bits; errors add up in 2 layers


@pytest.mark.parametrize("kv, gamma, agreeable", pairs(FORMATS, [(4, True), (1, False)], 0))
def test_drafts_of_int4_targets_change_nothing(kv, gamma, agreeable, exact, tiny_model, make_plan, prompts):
    folder, ids = tiny_model(agreeable=agreeable).folder, prompts(120, 57, 85)
    plan, drafting = (make_plan(kv, each, batch=3, target_bits=4) for each in (0, gamma))
    engine = runtime.load(plan, folder, device="cpu")
    plain = engine.generate(ids, 78)
    drafted = runtime.load(drafting, folder, device="cpu", weights=engine.weights).generate(ids, 78)
    assert drafted.tokens == plain.tokens
    if kv in ("bf16", "int8"):
        assert drafted.statistics.acceptance == 1  # drafts read what the target reads
    else:
        assert 0 < drafted.statistics.accepted < drafted.statistics.num_draft_tokens_verified
    assert kv == "bf16" or drafted.statistics.flushes >= 9


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("tied", [False, True])
def test_int4_memory_is_what_the_plan_says(group, tied, exact, tiny_model, make_plan):
    folder = tiny_model(intermediate_size=128, tie_word_embeddings=tied).folder
    engine = runtime.load(make_plan("int4x2", 3, target_bits=4, weight_group=group), folder, device="cpu")
    weights = engine.weights
    assert engine.draft_weights is weights
    kinds = {type(projection) for layer in weights.layers for projection in projections(layer)}
    assert (kinds, type(weights.head)) == ({Int4}, Dense)
    assert weights.bytes == weight_memory(engine.config.shape, weight_bytes(4, group, 4), 4)


def test_dense_layers_are_made_one_at_a_time_and_dropped(tiny_model, make_plan, prompts, monkeypatch):
    results, alive, dicts = [], [], []
    full, layer_of = loading.load_state_dict, checkpoint.read_layer

    def layer(*arguments):
        alive.append(sum(ref() is not None for ref in results))
        dense = layer_of(*arguments)
        results.append(weakref.ref(dense.mixer.qkv.weight))
        return dense

    def state(*arguments):
        dicts.append(full(*arguments))
        return dicts[-1]

    monkeypatch.setattr(checkpoint, "read_layer", layer)
    monkeypatch.setattr(loading, "load_state_dict", state)
    engine = runtime.load(
        make_plan(target_bits=4), tiny_model(num_hidden_layers=5).folder, device="cpu", calibration=prompts(50)[0]
    )
    assert len(engine.weights.layers) == len(results) == 5
    assert max(alive) <= 1
    assert not any(ref() is not None for ref in results)
    assert dicts[0].tensors == {}


def test_a_text_of_the_models_own_is_written_with_4_bit_weights(tiny_model):
    """On a GPU, so that a model whose dense weights do not fit there can be quantized there."""
    folder = tiny_model().folder
    config, cpu = decoder_config(checkpoint.load_config(folder), folder), torch.device("cpu")
    dense = checkpoint.load_state_dict(folder, config, torch.float32)
    writer = rounded_target(dense.ends(cpu), dense.layers(cpu), WeightFormat(4, 32))
    assert len(writer.layers) == 2
    assert {type(projection) for layer in writer.layers for projection in projections(layer)} == {Int4}


def test_calibration_changes_the_target(tiny_model, make_plan, prompts):
    plan, folder, [text] = make_plan(target_bits=4), tiny_model().folder, prompts(200)
    engines = [runtime.load(plan, folder, device="cpu", calibration=each) for each in (None, text, text)]
    packed = [engine.weights.layers[1].mlp.down.weight.packed for engine in engines]
    assert not torch.equal(packed[0], packed[1])
    assert torch.equal(packed[1], packed[2])


def test_weights_are_shared_by_plans_of_their_format_and_read_again_by_others(tiny_model, make_plan):
    folder = tiny_model(intermediate_size=128).folder
    dense, int4, wide = (
        make_plan("int4x2", 2, target_bits=bits, weight_group=group) for bits, group in ((16, 32), (4, 32), (4, 64))
    )
    for held in (dense, int4):
        weights = runtime.load(held, folder, device="cpu").weights
        for plan in (dense, int4, wide):
            loaded_weights = runtime.load(plan, folder, device="cpu", weights=weights).weights
            assert (loaded_weights is weights) == (plan is held)
            assert loaded_weights.format == WeightFormat(*plan.weights.target_format)


@pytest.mark.slow
@pytest.mark.model
def test_a_real_models_text_is_hardly_less_likely(smollm2, make_plan, long_text):
    """From GGUF; for Llama-2-7B, 4 bits add 0.05 nats to 1.70 (AWQ, Table 4), and small models lose more."""

    def loss(**options):
        engine = runtime.load(make_plan(weight_group=128, **options), str(smollm2), device="cpu")
        tokens = torch.tensor(engine.tokenizer(long_text[30_000:33_000])["input_ids"][:400])
        hidden = functional.embedding(tokens, engine.weights.embedding)
        with torch.inference_mode():
            for index, layer in enumerate(engine.weights.layers):
                prefill_layer(engine.decoder, index, layer, hidden)
            logits = engine.weights.logits(engine.weights.norm(hidden, None)[1])
        return float(functional.cross_entropy(logits[:-1], tokens[1:]))

    dense, quantized = loss(), loss(target_bits=4)
    assert dense < quantized < dense + 0.2


# Target weights in 8 bits, plain or hierarchical: identity with plain decoding, one copy, and real models.

INT8_FORMATS = ("bf16", "bf16+int4", "int8", "int4x2")
KINDS = pytest.mark.parametrize("draft_bits", [8, 4], ids=["plain", "hierarchical"])


@pytest.fixture
def exact_int8(monkeypatch):
    """The package's own layout, whose products on a CPU are in float32 throughout."""
    monkeypatch.setattr(calibration, "LibraryInt4Weight", Int4Weight)


def eight_bits(make_plan, kv="bf16", gamma=1, draft_bits=4, **options):
    """A plan with 8-bit target weights; without drafts they are plain ones."""
    return make_plan(kv, gamma, target_bits=8, draft_bits=draft_bits if gamma else 8, **options)


def int8_logits(engine, tokens):
    with torch.inference_mode():
        engine.cache.reset(1)
        return prefill(engine.decoder, engine.weights, engine.cache, 0, torch.tensor(tokens))


@KINDS
def test_8_bits_are_nearer_to_full_precision_than_4(draft_bits, exact_int8, tiny_model, make_plan, prompts):
    [tokens, text], folder = prompts(90, 100), tiny_model().folder
    dense = int8_logits(runtime.load(make_plan(), folder, device="cpu"), tokens)

    def distance(plan):
        return float((int8_logits(runtime.load(plan, folder, device="cpu", calibration=text), tokens) - dense).norm())

    assert distance(eight_bits(make_plan, draft_bits=draft_bits)) < 0.25 * distance(make_plan(target_bits=4))


@pytest.mark.parametrize("kv, gamma, agreeable", pairs(INT8_FORMATS, [(1, False), (4, True)], 0))
def test_drafts_of_int8_targets_change_nothing(kv, gamma, agreeable, exact_int8, tiny_model, make_plan, prompts):
    """Greedy output of a hierarchical target, drafted by its upper plane, is that of its own plain decoding."""
    folder, ids = tiny_model(agreeable=agreeable).folder, prompts(120, 57, 85)
    drafting = runtime.load(eight_bits(make_plan, kv, gamma, batch=3), folder, device="cpu")
    undrafted, cpu = eight_bits(make_plan, kv, 0, batch=3), torch.device("cpu")
    plain = Engine(undrafted, folder, drafting.config, drafting.weights, cpu, MemoryMeter(cpu))
    drafted = drafting.generate(ids, 45)
    assert drafted.tokens == plain.generate(ids, 45).tokens
    assert 0 < drafted.statistics.accepted < drafted.statistics.num_draft_tokens_verified


SPARSE = {"ratio": 0.2, "floor": 8, "sinks": 2, "recent": 6}
COMBINED = {
    "chosen tokens": {"selection": "quest", **SPARSE},
    "2-bit keys": {"selection": "progressive", **SPARSE},
    "an eviction": {"evict": "snapkv", "budget": 45},
    "an eviction and chosen tokens": {"evict": "snapkv", "budget": 45, "selection": "quest", **SPARSE},
    "an adaptive gamma": {"adaptive": True},
}
PART = ("chosen tokens", "an eviction")  # of "an eviction and chosen tokens"


@pytest.mark.parametrize(
    "what",
    [name if name not in PART else pytest.param(name, marks=pytest.mark.slow) for name in COMBINED],
)
def test_other_axes_combine_with_8_bits(what, exact_int8, tiny_model, make_plan, prompts, h200_profile):
    """Upper planes draft over chosen or evicted tokens of upper codes; output is that of the 8-bit, evicted target."""
    folder, ids, cpu = tiny_model(agreeable=True).folder, prompts(120, 57, 85), torch.device("cpu")
    evicted = {name: COMBINED[what][name] for name in ("evict", "budget") if name in COMBINED[what]}
    plan = eight_bits(make_plan, "int4x2", 3, batch=3, **COMBINED[what])
    drafting = runtime.load(plan, folder, device="cpu", profile=h200_profile)
    undrafted = eight_bits(make_plan, "int4x2", 0, batch=3, **evicted)
    plain = Engine(undrafted, folder, drafting.config, drafting.weights, cpu, MemoryMeter(cpu))
    drafted = drafting.generate(ids, 45)
    assert drafted.tokens == plain.generate(ids, 45).tokens
    assert drafted.statistics.accepted > 0
    assert {type(layer.mixer.qkv) for layer in drafting.draft_weights.layers} == {Int4}


def test_drafts_and_target_share_one_copy(exact_int8, tiny_model, make_plan):
    engine = runtime.load(eight_bits(make_plan), tiny_model(intermediate_size=128).folder, device="cpu")
    target, drafts = engine.weights, engine.draft_weights
    assert {type(layer.mixer.qkv) for layer in target.layers} == {type(target.head)} == {Int8}
    assert {type(layer.mixer.qkv) for layer in drafts.layers} == {type(drafts.head)} == {Int4}
    held = {tensor.data_ptr() for tensor in target.tensors()}
    assert {tensor.data_ptr() for tensor in drafts.tensors()} < held


@KINDS
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("tied", [False, True])
def test_int8_memory_is_what_the_plan_says(draft_bits, group, tied, exact_int8, tiny_model, make_plan):
    folder = tiny_model(intermediate_size=128, tie_word_embeddings=tied).folder
    engine = runtime.load(eight_bits(make_plan, draft_bits=draft_bits, weight_group=group), folder, device="cpu")
    per_parameter = weight_bytes(8, group, 4)
    assert engine.weights.bytes == weight_memory(engine.config.shape, per_parameter, 4, per_parameter, 1)


def test_plans_share_weights_of_their_own_kind(tiny_model, make_plan):
    folder = tiny_model(intermediate_size=128).folder
    kinds = [eight_bits(make_plan, draft_bits=bits) for bits in (8, 4)]
    for held in kinds:
        weights = runtime.load(held, folder, device="cpu").weights
        for plan in kinds:
            loaded_weights = runtime.load(plan, folder, device="cpu", weights=weights).weights
            assert (loaded_weights is weights) == (plan is held)
            assert loaded_weights.format == WeightFormat(*plan.weights.target_format)


def test_the_embedding_stays_in_full_precision(tiny_model, make_plan):
    """A row of it is a token's first hidden state, and only that row is read."""
    folder = tiny_model(tie_word_embeddings=True).folder
    dense, eight = (runtime.load(plan, folder, device="cpu").weights for plan in (make_plan(), eight_bits(make_plan)))
    assert isinstance(dense.head, Dense)
    assert torch.equal(dense.embedding, eight.embedding)
