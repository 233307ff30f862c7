"""Target weights in 8 bits, plain or hierarchical: identity with plain decoding, one copy, and real models."""

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.kernels.linear.weights import Int4Weight
from ridgeplan.roofline.memory import weight_memory
from ridgeplan.roofline.passes import weight_bytes
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.memory import MemoryMeter
from ridgeplan.runtime.model.linear import Dense, Int4, Int8
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization import calibration

FORMATS = ("bf16", "bf16+int4", "int8", "int4x2")
KINDS = pytest.mark.parametrize("draft_bits", [8, 4], ids=["plain", "hierarchical"])


@pytest.fixture
def exact(monkeypatch):
    """The package's own layout, whose products on a CPU are in float32 throughout."""
    monkeypatch.setattr(calibration, "LibraryInt4Weight", Int4Weight)


def eight_bits(make_plan, kv="bf16", gamma=1, draft_bits=4, **options):
    """A plan with 8-bit target weights; without drafts they are plain ones."""
    return make_plan(kv, gamma, target_bits=8, draft_bits=draft_bits if gamma else 8, **options)


def logits_of(engine, tokens):
    with torch.inference_mode():
        engine.cache.reset(1)
        return prefill(engine.decoder, engine.weights, engine.cache, 0, torch.tensor(tokens))


@KINDS
def test_8_bits_are_nearer_to_full_precision_than_4(draft_bits, exact, tiny_model, make_plan, prompts):
    [tokens, text], folder = prompts(90, 100), tiny_model().folder
    dense = logits_of(runtime.load(make_plan(), folder, device="cpu"), tokens)

    def distance(plan):
        return float((logits_of(runtime.load(plan, folder, device="cpu", calibration=text), tokens) - dense).norm())

    assert distance(eight_bits(make_plan, draft_bits=draft_bits)) < 0.25 * distance(make_plan(target_bits=4))


@pytest.mark.parametrize("gamma, agreeable", [(1, False), (4, True)])
@pytest.mark.parametrize("kv", FORMATS)
def test_drafts_change_nothing(kv, gamma, agreeable, exact, tiny_model, make_plan, prompts):
    """Greedy output of a hierarchical target, drafted by its upper plane, is that of its own plain decoding."""
    folder, ids = tiny_model(agreeable=agreeable).folder, prompts(100, 37, 65)
    drafting = runtime.load(eight_bits(make_plan, kv, gamma, batch=3), folder, device="cpu")
    undrafted, cpu = eight_bits(make_plan, kv, 0, batch=3), torch.device("cpu")
    plain = Engine(undrafted, folder, drafting.config, drafting.weights, cpu, MemoryMeter(cpu))
    drafted = drafting.generate(ids, 70)
    assert drafted.tokens == plain.generate(ids, 70).tokens
    assert 0 < drafted.statistics.accepted < drafted.statistics.judged


SPARSE = {"ratio": 0.2, "floor": 8, "sinks": 2, "recent": 6}
COMBINED = {
    "chosen tokens": {"selection": "quest", **SPARSE},
    "2-bit keys": {"selection": "progressive", **SPARSE},
    "an eviction": {"evict": "snapkv", "budget": 45},
    "an eviction and chosen tokens": {"evict": "snapkv", "budget": 45, "selection": "quest", **SPARSE},
    "an adaptive gamma": {"adaptive": True},
}


@pytest.mark.parametrize("what", COMBINED)
def test_other_axes_combine_with_8_bits(what, exact, tiny_model, make_plan, prompts, h200_profile):
    """Upper planes draft over chosen or evicted tokens of upper codes; output is that of the 8-bit, evicted target."""
    folder, ids, cpu = tiny_model(agreeable=True).folder, prompts(100, 37, 65), torch.device("cpu")
    evicted = {name: COMBINED[what][name] for name in ("evict", "budget") if name in COMBINED[what]}
    plan = eight_bits(make_plan, "int4x2", 3, batch=3, **COMBINED[what])
    drafting = runtime.load(plan, folder, device="cpu", profile=h200_profile)
    undrafted = eight_bits(make_plan, "int4x2", 0, batch=3, **evicted)
    plain = Engine(undrafted, folder, drafting.config, drafting.weights, cpu, MemoryMeter(cpu))
    drafted = drafting.generate(ids, 70)
    assert drafted.tokens == plain.generate(ids, 70).tokens
    assert drafted.statistics.accepted > 0
    assert {type(one.qkv) for one in drafting.draft_weights.layers} == {Int4}


def test_drafts_and_target_share_one_copy(exact, tiny_model, make_plan):
    engine = runtime.load(eight_bits(make_plan), tiny_model(intermediate_size=128).folder, device="cpu")
    target, drafts = engine.weights, engine.draft_weights
    assert {type(one.qkv) for one in target.layers} == {type(target.head)} == {Int8}
    assert {type(one.qkv) for one in drafts.layers} == {type(drafts.head)} == {Int4}
    held = {tensor.data_ptr() for tensor in target.tensors()}
    assert {tensor.data_ptr() for tensor in drafts.tensors()} < held


@KINDS
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("tied", [False, True])
def test_what_stays_in_memory_is_what_the_plan_says(draft_bits, group, tied, exact, tiny_model, make_plan):
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
            found = runtime.load(plan, folder, device="cpu", weights=weights).weights
            assert (found is weights) == (plan is held)
            assert found.format == WeightFormat(*plan.weights.target_format)


def test_the_embedding_stays_in_full_precision(tiny_model, make_plan):
    """A row of it is a token's first hidden state, and only that row is read."""
    folder = tiny_model(tie_word_embeddings=True).folder
    dense, eight = (runtime.load(plan, folder, device="cpu").weights for plan in (make_plan(), eight_bits(make_plan)))
    assert isinstance(dense.head, Dense)
    assert torch.equal(dense.embedding, eight.embedding)
