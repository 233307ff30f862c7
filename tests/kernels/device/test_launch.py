"""Early launches: what the driver is told, what is refused, and that kernels which write codes let none start."""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeplan.kernels.device import launch
from ridgeplan.kernels.device.launch import (
    PROGRAMMATIC_STREAM_SERIALIZATION,
    Configuration,
    launch_with_pdl,
    pdl_options,
)
from ridgeplan.kernels.kv_cache.quantize_cuda import source

KERNELS = Path(launch.__file__).parent
KERNEL = SimpleNamespace(func="kernel")
TRIGGER, WAIT = "griddepcontrol.launch_dependents", "griddepcontrol.wait"


class Driver:
    """Notes what it is asked to launch, and answers `status`."""

    def __init__(self) -> None:
        self.status = 0
        self.early = False
        self.asked: list[tuple[Any, ...]] = []

    def cuLaunchKernelEx(self, configuration: Any, kernel: str, values: Any, extra: None) -> int:
        told: Configuration = configuration._obj
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
    monkeypatch.setattr(launch, "driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    return found


def test_structures_lie_as_the_driver_has_them() -> None:
    """The header cuda.h: CUlaunchConfig and CUlaunchAttribute on 64-bit machines."""
    fields = (Configuration.stream, Configuration.attributes, Configuration.attribute_count)
    assert [field.offset for field in fields] == [32, 40, 48]
    assert ctypes.sizeof(Configuration) == 56
    assert (ctypes.sizeof(launch._Attribute), launch._Attribute.value.offset) == (72, 8)


def test_a_launch_is_early_and_passes_its_arguments(driver: Driver) -> None:
    x, read = torch.zeros(3), []
    types = (ctypes.c_void_p, ctypes.c_int, ctypes.c_double)

    def reading(configuration: Any, kernel: str, values: Any, extra: None) -> int:
        """Arguments live as long as the call."""
        read.extend(ctypes.cast(at, ctypes.POINTER(kind))[0] for at, kind in zip(values, types, strict=True))
        return Driver.cuLaunchKernelEx(driver, configuration, kernel, values, extra)

    driver.cuLaunchKernelEx = reading  # type: ignore[method-assign]
    launch_with_pdl(KERNEL, (5, 6, 7), (128, 2, 1), [x, -9, 0.25], 4096)
    assert driver.asked == [("kernel", [5, 6, 7], [128, 2, 1], 4096, 77)]
    assert read == [x.data_ptr(), -9, 0.25]
    assert driver.early
    launch_with_pdl(KERNEL, (5, 6, 7), (128, 2, 1), [x, -9, 0.25], early=False)
    assert not driver.early


@pytest.mark.parametrize("number", [1 << 31, -(1 << 31) - 1])
def test_integers_beyond_32_bits_are_refused(driver: Driver, number: int) -> None:
    """ctypes would pass their lower halves."""
    with pytest.raises(ValueError, match=f"{number} does not fit"):
        launch_with_pdl(KERNEL, (1, 1, 1), (1, 1, 1), [number])
    launch_with_pdl(KERNEL, (1, 1, 1), (1, 1, 1), [(1 << 31) - 1, -(1 << 31)])
    assert len(driver.asked) == 1


def test_what_the_driver_refuses_is_an_error(driver: Driver) -> None:
    driver.status = 701
    with pytest.raises(RuntimeError, match=r"grid \(1, 2, 3\), block \(4, 1, 1\): error 701"):
        launch_with_pdl(KERNEL, (1, 2, 3), (4, 1, 1), [])


def test_on_a_cpu_nothing_starts_early() -> None:
    assert pdl_options(torch.zeros(1)) == {"PDL": False, "launch_pdl": False}


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.cu")), ids=lambda path: path.name)
def test_a_cuda_source_that_lets_the_next_start_waits_for_the_last(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert TRIGGER not in text or WAIT in text


def test_quantization_waits_and_lets_none_start() -> None:
    """Attention reads codes before it waits."""
    text = source()
    body = text[re.search(r"__global__.*?\{", text, re.S).end() :]  # type: ignore[union-attr]
    assert TRIGGER not in text
    assert WAIT in body.strip().splitlines()[1]
