"""The script that compares predicted peaks with measured ones."""

import json
from dataclasses import replace

import pytest
import torch
from peak_memory import CASES, MemoryCase, MemoryRow, device_like, measure_peak, zero_weights

from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.memory import weight_memory
from ridgeplan.runtime.memory import PeakMemory
from ridgeplan.validate.random_model import llama_like_shape

CPU = torch.device("cpu")
SHAPE = llama_like_shape(2, 64, 96, 4, 2, 32)


@pytest.mark.parametrize("preset", ["autoregressive", "int8", "quantspec", "int4-weights", "dapq", "pyramidkv"])
def test_every_kind_of_plan_runs(preset):
    case = MemoryCase("m", preset, 40, 2, share=0.25 if preset in ("dapq", "pyramidkv") else 0)
    row = measure_peak(case, SHAPE, CPU)
    saved = json.loads(json.dumps(row.to_dict()))
    assert (saved["preset"], saved["context"], saved["batch"]) == (preset, 40, 2)
    assert saved["predicted"]["allocated"] == predicted_memory(case.plan(), SHAPE, device_like(CPU)).peak
    if preset in ("autoregressive", "dapq"):
        # Keys and values of 2 layers x 2 heads x 32 floats: of the prompt or a quarter, 64 new tokens, and a slot.
        assert saved["measured"]["cache"] == 2 * 2 * 2 * 2 * 32 * 4 * ((10 if preset == "dapq" else 40) + 64 + 1)
        assert saved["errors"]["cache"] == 0


def test_a_prompt_in_chunks_takes_as_little_as_its_budget_and_a_chunk():
    case = MemoryCase("m", "dapq-quantspec", 400, 1, share=0.25, chunk=64)
    row = measure_peak(case, SHAPE, CPU)
    assert case.name == "m dapq-quantspec 25% in chunks of 64 400x1"
    full = predicted_memory(replace(case, chunk=0).plan(), SHAPE, device_like(CPU))
    assert row.predicted.prefill_workspace < full.prefill_workspace
    assert row.to_dict()["chunk"] == 64


def test_zero_weights_take_what_the_shape_has():
    weights = zero_weights(SHAPE, CPU)
    assert weights.bytes == weight_memory(SHAPE, 4, 4)


def test_the_drivers_figure_is_what_torch_reserves_beside_what_was_there():
    case = MemoryCase("m", "autoregressive", 4096, 1)
    predicted = predicted_memory(case.plan(), SHAPE, device_like(CPU))
    measured = PeakMemory(allocated=2 * int(predicted.peak), device=10**9, outside=10**8)
    row = MemoryRow(case, predicted, measured, None, int(predicted.kv))
    device = predicted.weights + predicted.kv + predicted.prefill_workspace + predicted.decode_workspace + 10**8
    assert row.predicted_device == device
    assert row.to_dict()["errors"] == pytest.approx({"allocated": -0.5, "device": device / 10**9 - 1, "cache": 0})


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)


def test_cases_are_of_the_catalog_and_run():
    for case in CASES:
        assert load_shape(case.model).layers
        assert case.plan().workload.context == case.context
