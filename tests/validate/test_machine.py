"""This machine's figures, and what the system's files say of it."""

from pathlib import Path

import pytest
import torch

from ridgeplan.roofline.catalog.hardware import FIGURES
from ridgeplan.validate import machine
from ridgeplan.validate.timing import Bench, KernelCall


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench.build(torch.device("cpu"), 8 << 20, 8 << 20, 0.01)


def test_cpu_hardware_is_whole_and_says_where_figures_come_from() -> None:
    hardware = machine.cpu_hardware(2e10, 1e11)
    assert hardware.kind == "cpu"
    assert hardware.element_bytes == 4
    assert hardware.name.startswith("cpu-")
    assert (hardware.bandwidth_bytes_per_s, hardware.compute_flops) == (2e10, 1e11)
    assert set(hardware.sources) == set(FIGURES)
    assert "measured by ridgeplan calibrate" in hardware.sources["compute_flops"]


def test_memory_is_what_the_kernel_reports() -> None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        pytest.skip("needs /proc/meminfo")
    total = int(meminfo.read_text().split()[1]) * 1024
    assert machine.cpu_hardware(1e10, 1e11).memory_bytes == total


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("AMD EPYC 9654 96-Core Processor", "amd-epyc-9654-96-core-processor"),
        ("Intel(R) Xeon(R) Platinum 8480+", "intel-xeon-platinum-8480"),
        ("Intel(R) Core(TM) i7-1165G7 @ 2.80GHz", "intel-core-i7-1165g7-2.80ghz"),
    ],
)
def test_names_are_normalized(model: str, slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_model", lambda: model)
    assert machine.cpu_hardware(1e10, 1e11).name == f"cpu-{slug}"


def test_the_cpu_model_is_read(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nprocessor\t: 1\nmodel name\t: Other\n")
    assert machine.cpu_model(cpuinfo) == "Some CPU @ 3 GHz"


def test_a_machine_without_cpuinfo_still_has_a_name(tmp_path: Path) -> None:
    assert machine.cpu_model(tmp_path / "missing")


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    for index, size in enumerate(["32K", "1024K", "33M", "odd"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert machine.last_cache_bytes(tmp_path) == 33 << 20
    assert machine.last_cache_bytes(tmp_path / "missing") == machine.UNKNOWN_CACHE_BYTES


def test_ceilings_are_work_over_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has 8 MiB: a copy of one half to another reads and writes as many bytes as a sum reads."""
    seconds = {"copy": 2.0, "sum": 4.0, "matmul": 0.5}

    def timed(_: Bench, call: KernelCall) -> float:
        call.run(0)
        return seconds[call.kind]

    monkeypatch.setattr(Bench, "seconds", timed)
    assert machine.copy_bytes_per_s(bench) == (8 << 20) / 2
    seconds["sum"] = 1.0
    assert machine.copy_bytes_per_s(bench) == 8 << 20
    assert machine.matmul_flops(bench, 256) == 2 * 256**3 / 0.5
