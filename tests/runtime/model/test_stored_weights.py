"""A GGUF file's weights, loaded and executed as the file stores them."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf

from ridgeplan import runtime
from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind, Plan, Speculation, Weights
from ridgeplan.roofline.plan.support import as_loaded
from ridgeplan.runtime.errors import UnsupportedPlan
from ridgeplan.runtime.model.linear import Dense, Stored
from ridgeplan.runtime.model.source import model_source

SIZES = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
MIXES = [
    ["Q4_K", "Q6_K"], ["Q8_0", "Q4_K", "Q5_K"], ["Q4_0", "Q5_0", "Q4_1", "Q5_1"], ["Q4_K"],
    ["F16", *["Q4_0"] * 40], ["Q4_0", "F16", "Q4_0", "BF16", "Q5_0"],
]  # fmt: skip
IDS = ["+".join(dict.fromkeys(kinds)) for kinds in MIXES]
QAT = MIXES[4]  # as Google publishes models that were trained to be Q4_0: the embedding alone is F16


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def written(tiny_model, tmp_path):
    """Writes a Llama of mixed types, and returns the file with a transformers model of the same values."""

    def write(kinds=MIXES[0], **sizes):
        model = copy.deepcopy(tiny_model(**SIZES, **sizes).reference)
        write_gguf(tmp_path / "mixed.gguf", model, kinds=kinds)
        return tmp_path / "mixed.gguf", model

    return write


def stored(plan: Plan) -> Plan:
    return replace(plan, weights=Weights(stored=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kinds", MIXES, ids=IDS)
def test_logits_are_those_of_the_decoded_weights(kinds, tied, written, make_plan):
    path, model = written(kinds, tie_word_embeddings=tied)
    engine = runtime.load(stored(make_plan()), str(path), device="cpu")
    kept = [isinstance(linear, Stored) for layer in engine.weights.layers for linear in layer.projections]
    assert all(kept) or ((kinds is MIXES[-1] and any(kept)) and engine.weights.format.stored)
    assert (engine.weights.table is None) == (kinds is QAT)
    assert isinstance(
        engine.weights.head, Dense if (kinds is QAT and tied) or (kinds is MIXES[-1] and not tied) else Stored
    )
    tokens = list(range(40))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    actual = engine.teacher_forced_logits([tokens], [[]])[0, -1]
    assert (actual - expected).abs().max() < 2e-5 * expected.abs().max()
    decoded = runtime.load(make_plan(), str(path), device="cpu")
    assert engine.generate(tokens, 20).tokens == decoded.generate(tokens, 20).tokens


def test_values_are_those_of_the_file_bit_by_bit(written, make_plan):
    path, _ = written()
    kept, decoded = (runtime.load(plan, str(path), device="cpu") for plan in (stored(make_plan()), make_plan()))
    for ours, dense in zip(kept.weights.layers, decoded.weights.layers, strict=True):
        for linear, expected in zip(ours.projections, dense.projections, strict=True):
            assert torch.equal(torch.cat([weight.dequantize() for weight in linear.weights]), expected.weight)
    tokens = torch.arange(60).view(2, 30)
    assert torch.equal(kept.weights.embedded(tokens), decoded.weights.embedded(tokens))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kinds", [MIXES[0], *MIXES[-2:]], ids=[IDS[0], *IDS[-2:]])
def test_memory_is_as_predicted_and_as_the_file_has_it(kinds, tied, written, make_plan):
    """But for the vectors' type, scales of 6 bits that take 8, and numbers of 16 bits that take 32 on a CPU."""
    path, _ = written(kinds, tie_word_embeddings=tied)
    plan, shape = stored(make_plan()), as_loaded(load_shape(str(path)))
    engine = runtime.load(plan, str(path), device="cpu")
    device = Device(memory_bytes=1e12, element_bytes=4, num_sms=2, asynchronous=0)
    assert engine.weights.bytes == pytest.approx(predicted_memory(plan, shape, device).weights, rel=1e-6)
    assert engine.weights.bytes < (1.03 if kinds is MIXES[0] else 2) * path.stat().st_size
    assert engine.config.shape.weight_bits.stored == shape.weight_bits.stored


def test_drafts_and_caches_of_other_plans_work_on_stored_weights(written, make_plan, prompts):
    path, _ = written()
    ids = prompts(100, 37)
    plain = runtime.load(stored(make_plan(batch=2)), str(path), device="cpu").generate(ids, 30).tokens
    suffix = Speculation(3, drafter=Drafter(DrafterKind.SUFFIX, 3))
    proposing = replace(stored(make_plan(batch=2)), speculation=suffix)
    assert runtime.load(proposing, str(path), device="cpu").generate(ids, 30).tokens == plain
    coded = [stored(make_plan("int4x2", gamma, batch=2)) for gamma in (0, 3)]
    results = [runtime.load(plan, str(path), device="cpu").generate(ids, 30).tokens for plan in coded]
    assert results[0] == results[1]


def test_no_dense_copy_is_written(written):
    """A file for each layer, so that a layer at a time is in memory."""
    path, _ = written()
    folder = Path(model_source(str(path)))
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 3 and sum(file.stat().st_size for file in files) < 1.1 * path.stat().st_size
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "gguf"


def test_other_checkpoints_have_no_stored_weights(tiny_model, make_plan):
    with pytest.raises(UnsupportedPlan, match=r"weights as a GGUF file stores them, of .* stores float32"):
        runtime.load(stored(make_plan()), tiny_model().folder, device="cpu")


@pytest.mark.parametrize(("kinds", "sizes"), [([], {}), (["Q4_0"], {"head_dim": 80})])
def test_files_of_other_types_and_heads_have_none(kinds, sizes, tiny_model, tmp_path, make_plan):
    """Blocks cannot be padded to heads that the kernels take."""
    write_gguf(tmp_path / "other.gguf", copy.deepcopy(tiny_model(**{**SIZES, **sizes}).reference), kinds=kinds)
    assert not as_loaded(load_shape(str(tmp_path / "other.gguf"))).weight_bits.stored.layers
    with pytest.raises(UnsupportedPlan, match="weights as a GGUF file stores them"):
        runtime.load(stored(make_plan()), str(tmp_path / "other.gguf"), device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", MIXES, ids=IDS)
def test_stored_weights_generate_the_same_tokens_on_a_gpu(kinds, written, make_plan, prompts):
    path, _ = written(kinds)
    ids = prompts(100, 37, 65)
    plans = [stored(make_plan("int4x2", gamma, batch=3)) for gamma in (0, 4)]
    results = [runtime.load(plans[0], str(path), device="cpu", dtype=torch.float32).generate(ids, 60).tokens]
    results += [
        runtime.load(plan, str(path), device="cuda", dtype=torch.float32).generate(ids, 60).tokens for plan in plans
    ]
    assert results[0] == results[1] == results[2]


@pytest.mark.gpu
def test_stored_weights_on_a_gpu_equal_decoded_ones_in_bfloat16(written, make_plan):
    """Products round the stored weights to what decoding rounds them to."""
    path, _ = written()
    tokens = list(range(40))
    kept, decoded = (
        runtime.load(plan, str(path), device="cuda").teacher_forced_logits([tokens], [[]])
        for plan in (stored(make_plan()), make_plan())
    )
    assert (kept - decoded).abs().max() < 0.02 * decoded.abs().max()
