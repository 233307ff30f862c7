"""What NVRTC is given of a source; what does not compile is a warning, and the caller's fallback."""

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeplan.kernels.device import cuda
from ridgeplan.kernels.device.cuda import KernelParams

DEVICE = torch.device("cuda", 0)


class Kernel:
    """Stands in for what torch compiles; remembers its shared memory."""

    shared_bytes = 0

    def set_shared_memory_config(self, shared_bytes: int) -> None:
        self.shared_bytes = shared_bytes


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces torch's compiler by a function of the test's, on any machine."""
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return lambda compiler: monkeypatch.setattr(torch.cuda, "_compile_kernel", compiler)


def test_a_program_includes_its_source_and_checks_its_arguments() -> None:
    class Point(KernelParams):
        _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_double))

    include, *checks = cuda.program("sampling/csrc/top_k_top_p.cu", Point).splitlines()
    assert include == '#include "sampling/csrc/top_k_top_p.cu"'
    assert [check[: check.index(",")] for check in checks] == [
        "static_assert(sizeof(Point) == 16",
        "static_assert(__INTADDR__(&(((Point*)0)->x)) == 0",
        "static_assert(__INTADDR__(&(((Point*)0)->y)) == 8",
    ]


def test_every_include_is_found() -> None:
    """NVRTC reads them at run time, also from where the package is installed."""
    (option,) = cuda.include_options()
    root = Path(option.removeprefix("-I"))
    sources = [*root.rglob("*.cu"), *root.rglob("*.cuh")]
    assert len(sources) > 20
    for source in sources:
        lines = source.read_text(encoding="utf-8").splitlines()
        assert ("#pragma once" in lines) == (source.suffix == ".cuh"), source
        for line in lines:
            if line.startswith("#include"):
                assert (source.parent / line.split('"')[1]).is_file(), f"{source}: {line}"


def test_a_kernel_gets_its_options_and_shared_memory(compiling: Any) -> None:
    seen = []

    def compile_kernel(source: str, entry: str, nvcc_options: list[str]) -> Kernel:
        seen.append((source, entry, nvcc_options))
        return Kernel()

    compiling(compile_kernel)
    include = cuda.include_options()
    large = cuda.compile_kernel("source", "entry", ("-DA=1",), DEVICE, shared_bytes=100_000, fallback="")
    assert large is not None and large.shared_bytes == 100_000
    small = cuda.compile_kernel("source", "entry", [], DEVICE, fallback="")
    assert small is not None and small.shared_bytes == 0
    assert seen == [("source", "entry", [*include, "-DA=1"]), ("source", "entry", include)]


def test_what_does_not_compile_is_a_warning(compiling: Any) -> None:
    def compile_kernel(*_: Any, **__: Any) -> Kernel:
        raise RuntimeError("no such instruction")

    compiling(compile_kernel)
    with pytest.warns(UserWarning, match="^Triton runs instead: no such instruction"):
        assert cuda.compile_kernel("source", "entry", [], DEVICE, fallback="Triton runs instead") is None
