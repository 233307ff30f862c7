"""Peaks of memory, plans that do not fit, and what is freed when memory runs out."""

import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ridgeplan.planner.capacity import peak_bytes
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import Placement
from ridgeplan.runtime import memory
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.memory import (
    MemoryMeter,
    PeakMemory,
    readable_out_of_memory,
    require_memory,
    require_weight_memory,
)

pytestmark = pytest.mark.memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Says what /proc would: resident memory now and at its peak, in kB."""
    status, clear, mappings = tmp_path / "status", tmp_path / "clear_refs", tmp_path / "smaps"
    clear.write_text("")
    monkeypatch.setattr(memory, "_MAPPINGS", mappings)
    monkeypatch.setattr(memory, "_STATUS", status)
    monkeypatch.setattr(memory, "_CLEAR", clear)

    def says(resident, peak, libraries=0):
        status.write_text(f"Name:\tpython\nVmHWM:\t{peak} kB\nVmRSS:\t{resident} kB\n")
        mappings.write_text(
            f"7f00-7f01 r-xp 00000000 08:01 42   /usr/lib/libtorch_cpu.so.1\nSize: 999 kB\nRss: {libraries} kB\n"
            "7f01-7f02 r--p 00000000 08:01 43   /tmp/model.safetensors\nSize: 999 kB\nRss: 70 kB\n"
            "7f02-7f03 rw-p 00000000 00:00 0 \nRss: 80 kB\nVmFlags: rd wr\n"
        )
        return clear

    return says


def test_a_cpus_peak_is_what_the_process_grew_by_and_the_weights_it_had(process):
    clear = process(resident=500, peak=800)
    meter = MemoryMeter(CPU, shared_bytes=100 * 1024)
    assert clear.read_text() == "5"  # as proc(5) has it, resets the peak
    process(resident=600, peak=900)
    assert meter.peak_bytes() == (900 - 500 + 100) * 1024
    process(resident=100, peak=300)
    assert meter.peak_bytes() == 0


def test_code_that_is_loaded_meanwhile_does_not_count(process):
    process(resident=500, peak=500, libraries=100)
    meter = MemoryMeter(CPU)
    process(resident=600, peak=650, libraries=130)
    assert meter.peak_bytes() == (650 - 500 - 30) * 1024
    with meter.uncounted():
        process(resident=660, peak=660, libraries=150)  # 40 of modules, 20 of their libraries
    process(resident=700, peak=700, libraries=150)
    assert meter.peak_bytes() == (700 - 500 - 50 - 40) * 1024


def test_a_gpus_peaks_are_torchs_and_the_drivers(monkeypatch):
    """100 GB of which another process, the context and kernels take what torch has not reserved."""
    figures = {"max_memory_allocated": 30, "max_memory_reserved": 40, "memory_reserved": 20}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (75, 100))
    meter = MemoryMeter(CUDA)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (72, 100))  # kernels of 3 were loaded since
    assert meter.peak() == PeakMemory(allocated=30, device=40 + (100 - 72 - 20), outside=100 - 75 - 20)


def test_an_unknown_peak_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "absent")
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "absent")
    assert MemoryMeter(CPU).peak() == PeakMemory(None, None, None)


def test_a_plan_has_to_fit_into_what_is_free_beside_shared_weights(make_plan, monkeypatch):
    plan, shape, shared = make_plan("int4x2", 3, context=4096), load_shape("meta-llama/Llama-3.1-8B"), 16 * 10**9
    needed = int(peak_bytes(plan, shape, Device(memory_bytes=0, element_bytes=2, num_sms=132)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    for missing in (0, 2):
        free = needed + 1 - shared - missing
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 * 10**9))
        if missing:
            with pytest.raises(WorkloadError, match=r"the plan needs .* GB may be used; allowed: context up to"):
                require_memory(plan, shape, CUDA, torch.bfloat16, shared)
        else:
            require_memory(plan, shape, CUDA, torch.bfloat16, shared)


def test_a_placement_that_allows_more_than_is_free_frees_nothing(make_plan, monkeypatch):
    plan, shape = make_plan("int4x2", 3, context=4096), load_shape("meta-llama/Llama-3.1-8B")
    host = Device(memory_bytes=0, element_bytes=4, num_sms=torch.get_num_threads(), asynchronous=0)
    monkeypatch.setattr(memory, "available_bytes", lambda: int(peak_bytes(plan, shape, host)) - 1)
    usual, generous = (
        replace(plan, placement=Placement(offload=True, budget=2048, memory_bytes=limit)) for limit in (0, 10**12)
    )
    layers, spare_bytes = require_memory(usual, shape, CPU, torch.float32, 0)
    assert layers > 0
    assert require_memory(generous, shape, CPU, torch.float32, 0) == (layers, spare_bytes)


@pytest.mark.parametrize("share, fits", [(0.9, True), (0.89, False), (1.0, True)])
def test_of_a_gpus_memory_a_share_stays_free_however_much_is_free(make_plan, monkeypatch, share, fits):
    plan, shape = make_plan("int4x2", 3, context=4096), load_shape("meta-llama/Llama-3.1-8B")
    needed = peak_bytes(plan, shape, Device(memory_bytes=0, element_bytes=2, num_sms=132))
    total = int(needed / 0.899)  # the plan takes 89.9% of it
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total, total))
    refused = nullcontext() if fits else pytest.raises(WorkloadError, match=r"the plan needs .* GB may be used")
    with refused:
        require_memory(plan, shape, CUDA, torch.bfloat16, 0, share)


def test_on_a_host_a_plan_has_to_fit_into_what_its_system_calls_available(make_plan, monkeypatch):
    plan, shape = make_plan("int4x2", 3, context=4096), load_shape("meta-llama/Llama-3.1-8B")
    host = Device(memory_bytes=0, element_bytes=4, num_sms=torch.get_num_threads(), asynchronous=0)
    needed = int(peak_bytes(plan, shape, host))
    for available in (needed + 1, None):  # None: a system that does not tell
        monkeypatch.setattr(memory, "available_bytes", lambda available=available: available)
        require_memory(plan, shape, CPU, torch.float32, 0)
    monkeypatch.setattr(memory, "available_bytes", lambda: needed - 1)
    with pytest.raises(WorkloadError, match=r"the plan needs .* GB may be used; allowed: context up to"):
        require_memory(plan, shape, CPU, torch.float32, 0)
    require_memory(plan, shape, CPU, torch.float32, shared_bytes=2)  # weights that are there already


def test_weights_have_to_fit_whatever_their_configuration_says(tiny_model, monkeypatch):
    tiny = tiny_model()
    elements = sum(parameter.numel() for parameter in tiny.reference.parameters())
    for dtype, element_bytes in ((torch.float32, 4), (torch.bfloat16, 2)):
        monkeypatch.setattr(memory, "available_bytes", lambda size=elements * element_bytes: size)
        require_weight_memory(tiny.folder, load_shape(f"{tiny.folder}/config.json"), CPU, dtype)
        monkeypatch.setattr(memory, "available_bytes", lambda size=elements * element_bytes: size - 1)
        with pytest.raises(WorkloadError, match=r"the weights in .* GB are free; allowed: a smaller model"):
            require_weight_memory(tiny.folder, load_shape(f"{tiny.folder}/config.json"), CPU, dtype)


@pytest.mark.parametrize(
    "exhausted", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")]
)
def test_a_host_that_runs_out_says_so_in_one_line(exhausted):
    message = "^out of memory on cpu; allowed: a shorter context, a smaller batch or another KV format$"
    with pytest.raises(WorkloadError, match=message), readable_out_of_memory(CPU):
        raise exhausted


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes"), readable_out_of_memory(CPU):
        raise RuntimeError("shapes")


def test_tensors_of_what_failed_are_freed_although_the_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_500_000_000, 2_000_000_000))
    results: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        workspace = torch.zeros(8)
        results.append(weakref.ref(workspace))
        raise torch.OutOfMemoryError("CUDA out of memory")

    message = r"out of memory: 1\.5 of 2\.0 GB are free on cuda"
    with pytest.raises(WorkloadError, match=message) as kept, readable_out_of_memory(torch.device("cuda")):
        work()
    assert kept.value.__cause__ is not None
    assert results[0]() is None


def test_an_abandoned_generation_frees_its_workspace(tiny_model, make_plan, prompts, monkeypatch) -> None:
    from ridgeplan import runtime

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    engine = runtime.load(make_plan("int4x2", 2), tiny_model().folder, device="cpu")
    expected = engine.generate(prompts(60), 20).tokens
    results: list[weakref.ref[torch.Tensor]] = []

    def exhausted(decoder, weights, *_, **__):
        hidden = torch.zeros(8)
        results.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("ridgeplan.runtime.engine.prefill_all", exhausted)
        with pytest.raises(WorkloadError, match="out of memory") as kept:
            engine.generate(prompts(60), 20)
    assert kept.value.__cause__ is not None
    assert results[0]() is None
    assert engine.generate(prompts(60), 20).tokens == expected
