"""What runs out of memory is freed, also while someone keeps the error."""

import weakref

import pytest
import torch

from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.memory import readable_out_of_memory


def test_tensors_of_what_failed_are_freed_although_the_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_500_000_000, 2_000_000_000))
    made: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        workspace = torch.zeros(8)
        made.append(weakref.ref(workspace))
        raise torch.OutOfMemoryError("CUDA out of memory")

    message = r"out of memory: 1\.5 of 2\.0 GB are free on cuda"
    with pytest.raises(WorkloadError, match=message) as kept, readable_out_of_memory(torch.device("cuda")):
        work()
    assert kept.value.__cause__ is not None
    assert made[0]() is None


def test_an_abandoned_generation_frees_its_workspace(tiny_model, make_plan, prompts, monkeypatch) -> None:
    from ridgeplan import runtime

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    engine = runtime.load(make_plan("int4x2", 2), tiny_model().folder, device="cpu")
    expected = engine.generate(prompts(60), 20).tokens
    made: list[weakref.ref[torch.Tensor]] = []

    def exhausted(decoder, weights, *_, **__):
        hidden = torch.zeros(8)
        made.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("ridgeplan.runtime.engine.prefill", exhausted)
        with pytest.raises(WorkloadError, match="out of memory") as kept:
            engine.generate(prompts(60), 20)
    assert kept.value.__cause__ is not None
    assert made[0]() is None
    assert engine.generate(prompts(60), 20).tokens == expected
