"""Layers on the host of a CUDA device: graphs that copy them generate what graphs without a limit do."""

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.roofline.plan.plan import HostPart
from ridgeplan.runtime.buffers import HostMemory

pytestmark = pytest.mark.gpu
LAYERS = 6


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model(agreeable=True, num_hidden_layers=LAYERS).folder


@pytest.fixture(scope="module")
def shape(folder, shape_of):
    return shape_of(folder)


def load(plan, folder):
    return runtime.load(plan, folder, device="cuda", dtype=torch.float32)


def test_pinned_pages_are_read_and_written_by_address():
    memory = HostMemory.allocate(1 << 20, torch.device("cuda"))
    (view,) = memory.split([(torch.Size((1 << 18,)), torch.int32)])
    assert view.is_cuda
    view.copy_(torch.arange(1 << 18, device="cuda"))
    assert int(view.sum()) == sum(range(1 << 18))
    before = torch.cuda.memory_allocated()
    del memory, view
    assert torch.cuda.memory_allocated() == before  # it is the host's


@pytest.mark.parametrize("kv, gamma", [("int4x2", 4), ("int4x2", 0), ("bf16", 0), ("bf16", 2)])
@pytest.mark.parametrize("part", list(HostPart))
def test_the_same_tokens_as_without_a_limit(part, kv, gamma, folder, shape, limited, make_plan, prompts):
    if part is HostPart.LOWER and kv == "bf16":
        kv, gamma = "int4x2", 1
    sparse = {"selection": "streamingllm", "ratio": 0.3, "floor": 40, "sinks": 2} if kv == "bf16" and gamma else {}
    plan = make_plan(kv, gamma, batch=3, **sparse)
    placed, host_layers = limited(plan, shape, 1, part, 128, cuda=True)
    plain, offloaded = load(plan, folder), load(placed, folder)
    assert offloaded.cache.config.host_layers == host_layers > 0
    for ids in (prompts(128, 70, 37), prompts(30, 99, 64)):  # the second replays the graph of the first
        assert offloaded.generate(ids, 90).tokens == plain.generate(ids, 90).tokens


@pytest.mark.parametrize("gamma", [0, 3])
def test_layers_leave_while_tokens_are_generated(gamma, folder, shape, limited, make_plan, prompts):
    plan, ids = make_plan("int4x2", gamma, batch=2, context=64, new_tokens=400), prompts(60, 37)
    placed, _ = limited(plan, shape, 4, HostPart.ALL, cuda=True, adaptive=True)
    engine = load(placed, folder)
    expected = load(plan, folder).generate(ids, 400).tokens
    assert engine.generate(ids, 400).tokens == expected
    assert engine.statistics.moved_layers > 1
    steps = engine.stream_batch(ids, 400)
    for _ in range(40):
        next(steps)
    steps.close()
    assert engine.generate(ids, 400).tokens == expected
