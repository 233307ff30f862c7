"""Inverse questions: what they name fits, and one more does not."""

from dataclasses import replace
from functools import partial

import pytest

from ridgeplan import planner
from ridgeplan.planner.capacity import peak_bytes
from ridgeplan.planner.queries.fit import fit_gpus
from ridgeplan.planner.question import ask
from ridgeplan.roofline.catalog.hardware import list_hardware
from ridgeplan.roofline.catalog.model_shape import WeightBits
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset

LLAMA = "meta-llama/Llama-3.1-8B"


def peak(name, context, batch, gpu="rtx4090"):
    question = ask(LLAMA, gpu, 1)
    plan = preset(name, Workload(LLAMA, gpu, context, 1024, batch))
    return peak_bytes(plan, question.shape, question.machine), question.memory_limit_bytes


@pytest.mark.parametrize("name", ["autoregressive", "int8", "quantspec", "dapq"])
def test_of_a_preset_the_largest_sizes_fit_to_the_last_token(name):
    answer = planner.fit(LLAMA, "rtx4090", preset=name, batches=(1, 4), contexts=(4096,))
    for row in answer.contexts:
        assert row.plan == name
        needed, limit = peak(name, row.context, row.batch)
        assert needed == pytest.approx(row.peak_bytes)
        assert needed <= limit
        assert row.context == 131_072 or limit < peak(name, row.context + 1, row.batch)[0]
    (row,) = answer.batches
    assert peak(name, 4096, row.batch)[0] <= answer.memory_limit_bytes < peak(name, 4096, row.batch + 1)[0]


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_it_agrees_with_recommend(batch):
    """`recommend` also tries other sizes of quantization groups, which matter most where the cache is small."""
    recommend = partial(planner.recommend, LLAMA, "rtx4090", memory_limit=16e9, offload=False)
    answer = planner.fit(LLAMA, "rtx4090", batches=(batch,), contexts=(8192,), memory_limit=16e9)
    (row,), (rows,) = answer.contexts, answer.batches
    assert recommend(row.context, batch=batch)
    with pytest.raises(planner.NothingFits, match=f"context up to {row.context} with batch {batch}"):
        recommend(row.context + 1, batch=batch)
    assert recommend(8192, batch=rows.batch)
    with pytest.raises(planner.NothingFits, match=f"batch up to {rows.batch} with context 8k"):
        recommend(8192, batch=rows.batch + 1)


def test_the_model_limits_what_memory_does_not():
    answer = planner.fit(LLAMA, "h200", batches=(1, 64))
    assert (answer.contexts[0].context, answer.contexts[0].limited_by) == (131_072, "model")
    assert answer.contexts[0].plan == "autoregressive"  # all plans reach it, this is the most exact and simplest
    assert answer.contexts[1].limited_by == "memory"
    assert answer.contexts[1].plan == "int8-weights-int8"
    stretched = planner.fit(LLAMA, "h200", batches=(1,), yarn=True).contexts[0]
    assert stretched.context > 131_072
    assert stretched.limited_by == "memory"


def test_contexts_are_powers_of_2_up_to_the_models_limit():
    answer = planner.fit("Qwen/Qwen2.5-0.5B", "h200", batches=(1,))
    assert [row.context for row in answer.batches] == [4096, 8192, 16384, 32768]
    short = replace(load_shape("Qwen/Qwen2.5-0.5B"), max_context=1000)
    assert [row.context for row in planner.fit(short, "h200").batches] == [1000]


def test_small_models_reach_the_largest_batch_of_a_plan():
    (row,) = planner.fit("HuggingFaceTB/SmolLM2-135M", "h200", contexts=(512,), new_tokens=16).batches
    assert (row.batch, row.limited_by) == (4096, "plan")


def test_where_not_even_1_fits_the_plan_is_empty():
    answer = planner.fit("meta-llama/Llama-3.1-70B", "rtx4090", batches=(1,), contexts=(4096,))
    for row in (*answer.contexts, *answer.batches):
        assert row.plan == ""
        assert row.peak_bytes > answer.memory_limit_bytes
    assert (answer.contexts[0].context, answer.batches[0].batch) == (0, 0)


@pytest.mark.parametrize("preset", [None, "autoregressive", "quantspec"])
def test_converted_weights_take_what_they_are_converted_to(preset):
    """The runtime decodes a GGUF of 4.5 bits to 16, whoever chose the plan."""
    shape = load_shape(LLAMA)
    bits = WeightBits(attention=4.5, mlp=4.5, embedding=4.5, head=8.5, format="gguf")
    converted, full = (planner.fit(shape_of_weights, "rtx4090", batches=(1,), contexts=(8192,), preset=preset)
                   for shape_of_weights in (replace(shape, weight_bits=bits), shape))  # fmt: skip
    assert (converted.contexts, converted.batches) == (full.contexts, full.batches)


def test_limits_and_reserves_are_recommends():
    roomy, tight = (planner.fit(LLAMA, "rtx4090", batches=(4,), memory_utilization=share) for share in (1.0, 0.9))
    assert roomy.contexts[0].context > tight.contexts[0].context
    limited = planner.fit(LLAMA, "h200", batches=(1,), memory_limit=20e9)
    assert limited.memory_limit_bytes == 20e9
    assert limited.contexts[0].peak_bytes <= 20e9
    with pytest.raises(planner.PlanError, match="context 200000 is beyond the limit"):
        planner.fit(LLAMA, "h200", contexts=(200_000,))
    with pytest.raises(planner.PlanError, match="batch is 0"):
        planner.fit(LLAMA, "h200", batches=(0,))
    with pytest.raises(planner.PlanError, match="unknown preset 'x'"):
        planner.fit(LLAMA, "h200", preset="x")


def test_offloaded_presets_reach_further_than_what_stays():
    """Every layer but its budget may leave the GPU: the prompt's own buffers are what ends there."""
    staying, leaving = (planner.fit(LLAMA, "rtx4090", preset=name, batches=(4,), yarn=True).contexts[0]
                        for name in ("autoregressive", "specontext"))  # fmt: skip
    assert leaving.context > 4 * staying.context


def test_json_is_plain():
    data = planner.fit(LLAMA, "rtx4090", batches=(1,), contexts=(4096,)).to_dict()
    assert set(data) == {"model", "hardware", "contexts", "batches", "notes", "memory_limit_bytes"}
    assert set(data["contexts"][0]) == {"context", "batch", "plan", "peak_bytes", "limited_by"}
    assert data["notes"] == ("rtx4090 is not calibrated: utilizations are those of NVIDIA H200",)


def test_every_gpu_is_asked_from_the_smallest_up_to_its_own_memory():
    """A limit of 30 GB is no error on a GPU with less memory, which is limited by what it has."""
    gpus = fit_gpus(LLAMA, 4096, 1, preset="autoregressive", memory_limit=30e9)
    sizes = [gpu.memory_bytes for gpu in gpus]
    assert sizes == sorted(sizes)
    assert {gpu.gpu for gpu in gpus} == {gpu.name for gpu in list_hardware()}
    assert min(sizes) < 12e9
    assert all(
        max(gpu.context.peak_bytes, gpu.batch.peak_bytes) <= min(30e9, gpu.memory_bytes) for gpu in gpus if gpu.fits
    )


def test_several_gpus_are_no_remedy_for_evictions_which_engines_do_not_execute():
    answer = planner.fit("mistralai/Mixtral-8x22B-v0.1", "b200", batches=(1,), preset="dapq-quantspec")
    assert not any(row.plan for row in answer.contexts)
    assert not answer.fixes
