"""Early launches: what the driver is told, what is refused, and that kernels which write codes let none start."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeplan.kernels.device import cuda
from ridgeplan.kernels.device.cuda import (
    PROGRAMMATIC_STREAM_SERIALIZATION,
    LaunchAttribute,
    LaunchConfig,
    launch_with_pdl,
    pdl_options,
)

KERNELS = Path(cuda.__file__).parents[1]
KERNEL = SimpleNamespace(func="kernel")


class Pair(ctypes.Structure):
    """Arguments of a kernel."""

    _fields_ = (("count", ctypes.c_int), ("share", ctypes.c_double))


class Driver:
    """Notes what it is asked to launch, and answers `status`."""

    def __init__(self) -> None:
        self.status = 0
        self.early = False
        self.asked: list[tuple[Any, ...]] = []

    def cuLaunchKernelEx(self, configuration: Any, kernel: str, values: Any, extra: None) -> int:
        told: LaunchConfig = configuration._obj
        attribute = told.attributes[0]
        assert told.attribute_count == 1
        assert attribute.id == PROGRAMMATIC_STREAM_SERIALIZATION
        self.early = bool(attribute.value)
        self.asked.append((kernel, [*told.grid], [*told.block], told.shared_bytes, told.stream))
        self.values = values
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(cuda, "driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    return found


def test_structures_lie_as_the_driver_has_them() -> None:
    """The header cuda.h: CUlaunchConfig and CUlaunchAttribute on 64-bit machines."""
    fields = (LaunchConfig.stream, LaunchConfig.attributes, LaunchConfig.attribute_count)
    assert [field.offset for field in fields] == [32, 40, 48]
    assert ctypes.sizeof(LaunchConfig) == 56
    assert (ctypes.sizeof(LaunchAttribute), LaunchAttribute.value.offset) == (72, 8)


def test_a_launch_is_early_and_passes_its_arguments(driver: Driver) -> None:
    params, read = Pair(-9, 0.25), []

    def reading(configuration: Any, kernel: str, values: Any, extra: None) -> int:
        """A kernel's one argument is a structure, of which the driver gets the address."""
        found = ctypes.cast(values[0], ctypes.POINTER(Pair))[0]
        read.append((len(values), found.count, found.share))
        return Driver.cuLaunchKernelEx(driver, configuration, kernel, values, extra)

    driver.cuLaunchKernelEx = reading  # type: ignore[method-assign]
    launch_with_pdl(KERNEL, (5, 6, 7), (128, 2, 1), params, 4096)
    assert driver.asked == [("kernel", [5, 6, 7], [128, 2, 1], 4096, 77)]
    assert read == [(1, -9, 0.25)]
    assert driver.early
    launch_with_pdl(KERNEL, (5, 6, 7), (128, 2, 1), params, early=False)
    assert not driver.early


def test_what_the_driver_refuses_is_an_error(driver: Driver) -> None:
    driver.status = 701
    with pytest.raises(RuntimeError, match=r"grid \(1, 2, 3\), block \(4, 1, 1\): error 701"):
        launch_with_pdl(KERNEL, (1, 2, 3), (4, 1, 1), Pair())


def test_on_a_cpu_nothing_starts_early() -> None:
    assert pdl_options(torch.zeros(1)) == {"PDL": False, "launch_pdl": False}


def test_cuda_sources_that_let_the_next_kernel_start_wait_for_the_last() -> None:
    kernels = {path.name: path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.cu")}
    assert kernels.keys() == {
        "attention.cu",
        "linear.cu",
        "index_list.cu",
        "progressive.cu",
        "quantize.cu",
        "top_k_top_p.cu",
        "two_bit_choose.cu",
        "two_bit_scan.cu",
    }
    assert all("pdl_wait()" in text for text in kernels.values())


def test_quantization_waits_first_and_lets_no_kernel_start() -> None:
    """Attention reads codes before it waits."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (KERNELS / "kv_cache").rglob("*.cu*")}
    assert not [name for name, text in texts.items() if "pdl_launch_dependents" in text]
    body = texts["quantize.cu"].partition("__global__")[2].partition("{")[2]
    statements = [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("//")]
    assert statements[0] == "pdl_wait();"
