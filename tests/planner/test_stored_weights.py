"""Plans whose weights are those of a GGUF file: when they are searched, what they cost, and what they give up."""

import math
from dataclasses import replace

import pytest
from gguf_headers import Q4_K_M_BYTES, llama_8b_header, llama_8b_q4_k_m

from ridgeplan import planner
from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.planner.lowering import kernel_class, strategy_of
from ridgeplan.planner.quality import Quality, losses, quality_of
from ridgeplan.planner.search import named_plan
from ridgeplan.roofline.catalog.gguf import weight_bits_of
from ridgeplan.roofline.catalog.gguf_types import BLOCK_FORMATS
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import STORED_SHARE_ON_CPU, profile_for, shipped_profiles
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.latency import STORED_LINEAR, Device, Machine
from ridgeplan.roofline.plan.plan import DrafterKind, Plan, PlanError, Weights, Workload
from ridgeplan.roofline.plan.presets import describe, preset_name, short_name
from ridgeplan.roofline.plan.support import as_loaded, missing_execution

LAPTOP = "rtx4060-laptop"  # 8 GB
UNMEASURED = tuple(
    replace(profile, classes={name: rates for name, rates in profile.classes.items() if name != STORED_LINEAR})
    for profile in shipped_profiles()
)
GPU = Device(memory_bytes=8e9, element_bytes=2, num_sms=24)
CPU = Device(memory_bytes=8e9, element_bytes=4, num_sms=2, asynchronous=0)
WORKLOAD = Workload("Llama-3.1-8B-Q4_K_M", LAPTOP, 8192)
STORED = Plan(WORKLOAD, Weights(stored=True))


@pytest.fixture(scope="module")
def shape():
    return llama_8b_q4_k_m()


@pytest.fixture(scope="module")
def answer(shape):
    return planner.recommend(shape, LAPTOP, 8192)


def test_an_8b_model_in_4_bits_fits_a_laptop_of_8_gb(answer):
    assert answer.plan.weights.stored and answer.fits_device and answer.model_runs
    assert answer.predicted.best.peak_memory_bytes < 0.9 * 8.6e9
    assert missing_execution(answer.plan, answer.shape) == []
    assert any("read the file's own; all others decode them while loading" in note for note in answer.notes)
    assert "stored weights" in answer.explain()


def test_speed_ups_say_that_they_are_over_decoded_weights(shape):
    answer = planner.recommend(shape, "rtx3060", 8192)
    assert f"{answer.predicted.speedup:.2f}x plain decoding in full precision (" in answer.explain()
    assert answer.baseline_text == "plain decoding in full precision, which does not fit"
    assert any("as does plain decoding, which speed-ups compare with" in note for note in answer.notes)
    compared = planner.compare([shape], ["rtx3060"], 8192)
    assert any("as does plain decoding" in note for note in compared.notes)
    bf16, engines = (
        planner.recommend("Llama-3.1-8B", "h200", 8192),
        planner.recommend(shape, "h200", 8192, backend="vllm"),
    )
    assert bf16.baseline_text == engines.baseline_text == "plain decoding"  # an engine reads the file's weights


def test_gamma_is_that_of_a_plan_that_fits(shape):
    """QuantSpec's plan has weights in full precision: twice the memory of this GPU."""
    cells = planner.best_gamma(shape, LAPTOP, contexts=(4096, 8192), batches=(1,))
    assert {cell.plan for cell in cells} == {"stored+int4x2+upper"} and not any(cell.plain_fits for cell in cells)
    assert all(cell.fits and cell.gamma > 0 for cell in cells)
    larger = planner.best_gamma(shape, "rtx4090", contexts=(8192,), batches=(1,))
    assert [(cell.plan, cell.fits, cell.plain_fits) for cell in larger] == [("quantspec", True, True)]
    (named,) = planner.best_gamma(shape, "rtx4090", preset="stored+int4x2+upper", contexts=(8192,), batches=(1,))
    assert named.plan == "stored+int4x2+upper" and named.fits


def test_the_best_of_such_plans_is_listed_where_unmeasured_rates_hold_them_back(shape):
    assert planner.recommend(shape, "rtx4070", 8192).plan.weights.stored
    answer = planner.recommend(shape, "rtx4070", 8192, profile=profile_for(load_hardware("rtx4070"), UNMEASURED))
    assert not answer.plan.weights.stored
    listed, *_ = [row for row in answer.alternatives if row.plan.weights.stored]
    assert listed.rejected.startswith("not measured")
    assert listed.predicted.best.peak_memory_bytes < 0.7 * answer.predicted.best.peak_memory_bytes


def test_fewer_bits_are_no_remedy_where_they_allow_no_more(shape):
    answer = planner.recommend(shape, LAPTOP, 32768)
    assert [fix.changes for fix in answer.on_device if "context" in fix.changes and "quality" in fix.changes] == []
    assert any(fix.changes.keys() == {"context"} for fix in answer.on_device)


def test_without_such_a_file_nothing_fits_there():
    with pytest.raises(planner.NothingFits):
        planner.recommend("meta-llama/Llama-3.1-8B", LAPTOP, 8192, offload=False)


def test_stored_weights_give_up_nothing(answer):
    assert losses(STORED) == [] and quality_of(STORED) is Quality.EXACT
    exact = planner.recommend(answer.shape, LAPTOP, 8192, quality="exact")
    assert exact.plan.weights.stored and exact.losses == ()


def test_drafts_of_such_plans_read_the_same_weights(answer):
    plans = [answer.plan, *(other.plan for other in answer.alternatives)]
    stored = [plan for plan in plans if plan.weights.stored]
    assert len(stored) > 3 and all(plan.weights.draft_bits == 16 for plan in stored)
    assert any(plan.speculation.active for plan in stored)


def test_suffix_drafts_are_searched_on_stored_weights(shape):
    answer = planner.recommend(shape, LAPTOP, 8192, text="code")
    proposing = [answer.plan, *(other.plan for other in answer.alternatives)]
    assert any(plan.weights.stored and plan.speculation.drafter.kind is DrafterKind.SUFFIX for plan in proposing)


def test_memory_is_the_files_with_scales_of_8_bits(shape):
    held = as_loaded(shape)
    weights = predicted_memory(STORED, held, GPU).weights
    header = llama_8b_header()
    blocks = [(sizes, kind) for sizes, kind in zip(header.tensors.values(), header.types.values(), strict=True) if kind]
    exact = sum(sizes[0] * sizes[1] * BLOCK_FORMATS[kind].held_bits / 8 for sizes, kind in blocks)
    norms = 65 * 4096 * 2
    assert weights == pytest.approx(exact + norms, rel=1e-9)
    assert 1.01 * Q4_K_M_BYTES < weights < 1.03 * Q4_K_M_BYTES
    dense = predicted_memory(Plan(WORKLOAD), held, GPU).weights
    assert dense == pytest.approx(2 * shape.parameters, rel=1e-6)


def test_matrices_of_16_bits_stay_beside_blocks_and_cost_their_bytes(shape):
    """An embedding in F16, as in Google's QAT files, and a matrix of a layer in BF16: bytes by tensor."""
    header = llama_8b_header()
    mixed = {**header.types, "token_embd.weight": 1, "blk.3.ffn_up.weight": 30}
    bits = weight_bits_of(replace(header, types=mixed)).stored
    held = as_loaded(replace(shape, weight_bits=replace(shape.weight_bits, stored=bits)))
    sizes = [(math.prod(header.tensors[name]), kind) for name, kind in mixed.items() if kind]
    for device in (GPU, CPU):
        blocks = {kind: described.held_bits / 8 for kind, described in BLOCK_FORMATS.items()}
        exact = sum(count * blocks.get(kind, device.element_bytes) for count, kind in sizes)
        weights = predicted_memory(STORED, held, device).weights
        assert weights == pytest.approx(exact + 65 * 4096 * device.element_bytes, rel=1e-9)
    tied = as_loaded(replace(held, tied_embeddings=True, weight_bits=held.weight_bits.tied()))
    assert kernel_class(STORED, held, "target", "head") == STORED_LINEAR
    assert kernel_class(STORED, tied, "target", "head") == "head"
    untied_bytes, tied_bytes = (predicted_memory(STORED, each, GPU).weights for each in (held, tied))
    assert untied_bytes - tied_bytes == pytest.approx(shape.embedding_params * bits.head / 8)
    assert strategy_of(STORED, tied, GPU, 1.0).target.head_bytes == GPU.element_bytes


def test_a_tied_table_is_held_once(shape):
    tied = replace(shape, tied_embeddings=True, weight_bits=shape.weight_bits.tied())
    untied_bytes, tied_bytes = (predicted_memory(STORED, as_loaded(each), GPU).weights for each in (shape, tied))
    stored = shape.weight_bits.stored
    assert tied.weight_bits.stored.head == stored.embedding
    assert untied_bytes - tied_bytes == pytest.approx(shape.embedding_params * stored.head / 8)


def test_steps_read_the_stored_bytes_at_rates_of_their_own(shape):
    held = as_loaded(shape)
    strategy = strategy_of(STORED, held, GPU, 1.0)
    assert strategy.target.weight_bytes == shape.weight_bits.stored.layers / 8 == strategy.draft.weight_bytes
    assert (strategy.target.dense, strategy.target.head_dense) == (0, 0)
    classes = [kernel_class(STORED, held, part, kind) for part in ("target", "draft") for kind in ("linear", "head")]
    assert classes == [STORED_LINEAR] * 4 and kernel_class(STORED, held, "prefill", "linear") == "prefill_linear"
    machine = Machine.of(profile_for(load_hardware(LAPTOP), shipped_profiles()))
    rates = planner.lowering.rates_of(STORED, held, machine)
    seconds = evaluate(held, machine, strategy, rates).tpot_s
    assert float(seconds) > 4.8e9 / 256e9  # all but the embedding, at the datasheet's bandwidth


def test_stored_weights_are_priced_by_the_kernels_that_run():
    """Triton's on every GPU, whatever is fastest there for other codes; and on a CPU a copy that is decoded."""
    h200 = profile_for(load_hardware("h200"), shipped_profiles())
    laptop = profile_for(load_hardware(LAPTOP), shipped_profiles())
    assert h200.rates(STORED_LINEAR).source == "calibrated" and laptop.rates(STORED_LINEAR).source == "transferred"
    # What instructions bind on an H200, memory binds where it is slower for each SM.
    assert h200.rates(STORED_LINEAR).bandwidth_utilization < 0.3 < laptop.rates(STORED_LINEAR).bandwidth_utilization
    for name in ("h200", LAPTOP):
        unmeasured = profile_for(load_hardware(name), UNMEASURED)
        assert unmeasured.rates(STORED_LINEAR).source == "prior"
        assert unmeasured.rates(STORED_LINEAR).bandwidth_utilization < 1
    h200 = profile_for(load_hardware("h200"), UNMEASURED)
    cpu = replace(h200, hardware=replace(h200.hardware, kind="cpu"))
    share = cpu.rates(STORED_LINEAR).bandwidth_utilization / cpu.rates("linear").bandwidth_utilization
    assert share == pytest.approx(STORED_SHARE_ON_CPU)


def test_plans_of_other_checkpoints_and_engines_keep_none(shape):
    question = planner.recommend("meta-llama/Llama-3.1-8B", "h200", 8192)
    engines = planner.recommend(shape, "rtx4090", 8192, backend="vllm")
    for each in (question, engines):
        assert not any(plan.weights.stored for plan in [each.plan, *(other.plan for other in each.alternatives)])
    named = "weights as a GGUF file stores them, of meta-llama/Llama-3.1-8B"
    assert named in missing_execution(STORED, load_shape("meta-llama/Llama-3.1-8B"))[0]


def test_a_type_without_products_keeps_no_weights():
    header = llama_8b_header()
    others = {name: 10 if name == "blk.3.ffn_up.weight" else kind for name, kind in header.types.items()}  # Q2_K
    assert weight_bits_of(header).stored.layers and not weight_bits_of(replace(header, types=others)).stored.layers


def test_names_and_json_round_trip():
    assert describe(STORED) == preset_name(STORED) == "stored weights" and short_name(describe(STORED)) == "stored"
    assert named_plan("stored+int8", WORKLOAD).weights == Weights(stored=True)
    assert Plan.from_json(STORED.to_json()) == STORED and "stored" not in Plan(WORKLOAD).to_json()
    with pytest.raises(PlanError, match="target_bits is 8 and draft_bits 8 where stored is true; allowed: 16"):
        Weights(8, 8, stored=True)
