"""The benchmark of SpeContext's system: wherever its layers are, a generation has the same tokens."""

from dataclasses import replace

import pytest
import torch
from specontext_bench import TINY, Setting, Sizes, SpeContextBench

from ridgeplan.planner.capacity import departure_lengths, offloaded_layers
from ridgeplan.planner.prediction import predict
from ridgeplan.planner.resolution import resolve
from ridgeplan.validate.random_model import llama_like_shape

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny():
    shape, profile = resolve(llama_like_shape(4, 128, 256, 4, 2, 32), "h200")
    setting = Setting(shape, profile, CPU, False)
    return SpeContextBench(setting, setting, replace(TINY, new_tokens=160))


def test_every_placement_generates_the_same_tokens(tiny):
    rows = {name: measure() for name, measure in tiny.placed().items()}
    assert [row["tokens_equal"] for row in rows.values()] == [None, True, True, True]
    assert [row["layers_on_host"] for row in rows.values()] == [0, 3, 3, 3]
    assert rows["adaptive"]["moved_at"] == rows["adaptive"]["thresholds"]
    assert not any(rows[name]["moved_at"] for name in ("without a limit", "static", "all on the host"))


def test_the_measured_placements_differ_as_they_should():
    setting = Setting(*resolve("Llama-3.2-1B", "h200"), CPU, True)
    bench = SpeContextBench(setting, setting, Sizes())
    few = bench.setting("placed")
    plans = bench.plans("placed")
    layers = {name: offloaded_layers(plan, few.shape, few.machine).layers for name, plan in plans.items()}
    assert layers == {"without a limit": 0, "adaptive": 2, "static": 2, "all on the host": 4}
    first, last = departure_lengths(plans["adaptive"], few.shape, few.machine)
    assert 2048 < first < last < 2048 + 32768, "layers leave on the way"
    for plan in plans.values():
        limit = plan.placement.memory_bytes
        assert not limit or predict(plan, few.shape, few.profile).best.peak_memory_bytes <= limit
