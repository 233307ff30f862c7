"""Early launches: what the driver is told, what is refused, and that kernels which write codes let none start."""

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeplan.kernels.attention.cuda import AttentionParams
from ridgeplan.kernels.device import cuda
from ridgeplan.kernels.device.cuda import (
    PROGRAMMATIC_STREAM_SERIALIZATION,
    KernelParams,
    LaunchAttribute,
    LaunchConfig,
    assertions,
    launch_with_pdl,
    pdl_options,
)
from ridgeplan.kernels.kv_cache.cuda import QuantizedPlanes

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
        config: LaunchConfig = configuration._obj
        attribute = config.attributes[0]
        assert config.attribute_count == 1
        assert attribute.id == PROGRAMMATIC_STREAM_SERIALIZATION
        self.early = bool(attribute.value)
        self.asked.append((kernel, [*config.grid], [*config.block], config.shared_bytes, config.stream))
        self.values = values
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    monkeypatch.setattr(cuda, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    return fake


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
        pair = ctypes.cast(values[0], ctypes.POINTER(Pair))[0]
        read.append((len(values), pair.count, pair.share))
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
        "experts.cu",
        "linear.cu",
        "merge.cu",
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


# Arguments of CUDA kernels: what their structures hold, and what they refuse.


class Params(KernelParams):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("absent", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("share", ctypes.c_double),
    )


def test_tensors_are_pointers_and_numbers_are_values() -> None:
    x = torch.zeros(3)
    params = Params(x=x, absent=None, count=-9, scale=0.1, share=0.1)
    assert params.x == x.data_ptr()
    assert params.absent is None
    assert (params.count, params.share) == (-9, 0.1)
    assert params.scale == torch.tensor(0.1, dtype=torch.float32).item()


@pytest.mark.parametrize("number", [1 << 31, -(1 << 31) - 1])
def test_integers_beyond_32_bits_are_refused(number: int) -> None:
    """ctypes would take their lower halves."""
    values = {"x": None, "absent": None, "scale": 0.0, "share": 0.0}
    with pytest.raises(ValueError, match=f"count is {number}; allowed: 32-bit integers"):
        Params(**values, count=number)
    for count in ((1 << 31) - 1, -(1 << 31)):
        assert Params(**values, count=count).count == count


def test_every_field_is_given() -> None:
    """ctypes would leave a missing one zero."""
    with pytest.raises(TypeError, match=r"Params got other fields than its own: \['share'\]"):
        Params(x=None, absent=None, count=0, scale=0.0)
    with pytest.raises(TypeError, match=r"\['shares'\]"):
        Params(x=None, absent=None, count=0, scale=0.0, share=0.0, shares=0.0)


def test_layouts_are_checked_down_to_nested_fields() -> None:
    """Sixteen pointers, two times four, then integers: 8 bytes each, as a 64-bit C++ compiler lays them out."""
    lines = assertions(AttentionParams).splitlines()
    assert "static_assert(__INTADDR__(&(((AttentionParams*)0)->value_codes)) == 160," in "\n".join(lines)
    assert "static_assert(__INTADDR__(&(((AttentionParams*)0)->value_codes.scale)) == 176," in "\n".join(lines)
    assert "static_assert(__INTADDR__(&(((AttentionParams*)0)->batch)) == 192," in "\n".join(lines)
    nested = 2 * len(QuantizedPlanes._fields_)
    assert len(lines) == len(AttentionParams.constants) + 1 + len(AttentionParams._fields_) + nested


# What NVRTC is given of a source; what does not compile is a warning, and the caller's fallback.

DEVICE = torch.device("cuda", 0)


class Kernel:
    """Stands in for what torch compiles; remembers its shared memory."""

    shared_bytes = 0

    def __init__(self, code: bytes) -> None:
        self.code = code

    def set_shared_memory_config(self, shared_bytes: int) -> None:
        self.shared_bytes = shared_bytes


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replaces torch's compiler by a function of the test's, on any machine."""
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(cuda, "_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda._utils, "_cuda_load_module", lambda code, names: {names[0]: Kernel(code)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda compiler: monkeypatch.setattr(torch.cuda._utils, "_nvrtc_compile", compiler)


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)]
)
def test_hopper_alone_has_wgmma(capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda, "_capability", lambda _: capability)
    assert cuda.has_wgmma(DEVICE) is expected


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

    def compile_kernel(source: str, entry: str, compute_capability: str, nvcc_options: list[str]) -> tuple[bytes, str]:
        seen.append((source, entry, compute_capability, nvcc_options))
        return b"code\n\0", "mangled"

    compiling(compile_kernel)
    include = cuda.include_options()
    large = cuda.compile_kernel("source", "entry", ("-DA=1",), DEVICE, shared_bytes=100_000, fallback="")
    assert large is not None and large.shared_bytes == 100_000
    small = cuda.compile_kernel("source", "entry", [], DEVICE, fallback="", arch_specific=True)
    assert small is not None and small.shared_bytes == 0
    assert seen == [("source", "entry", "90", [*include, "-DA=1"]), ("source", "entry", "90a", include)]


def test_a_kernel_is_compiled_once_for_all_processes(
    compiling: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Until the program, its options, the GPU, torch or the file with its code change."""
    codes = (f"code {count}\n\0".encode() for count in itertools.count())
    compiling(lambda *_, **__: (next(codes), "mangled"))

    def code(*options: str) -> bytes:
        kernel = cuda.compile_kernel("source", "entry", options, DEVICE, fallback="")
        assert kernel is not None
        return kernel.code

    assert code() == code() == b"code 0\n\0"
    assert code("-DA=1") == b"code 1\n\0"
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "_capability", lambda _: (8, 0))
        assert code() == b"code 2\n\0"
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "git_version", "9.9")
        assert code() == b"code 3\n\0"
    for path in (tmp_path / "ridgeplan" / "kernels").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert code() == code() == b"code 4\n\0"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert (code(), code()) == (b"code 5\n\0", b"code 6\n\0")


def test_what_does_not_compile_is_a_warning(compiling: Any) -> None:
    def compile_kernel(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such instruction")

    compiling(compile_kernel)
    with pytest.warns(UserWarning, match="^Triton runs instead: no such instruction"):
        assert cuda.compile_kernel("source", "entry", [], DEVICE, fallback="Triton runs instead") is None
