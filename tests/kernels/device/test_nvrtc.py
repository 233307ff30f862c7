"""CUDA sources are joined as they stand; what does not compile is a warning, and the caller's fallback."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeplan.kernels.device import nvrtc

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


def test_sources_are_joined_in_order() -> None:
    folder = Path(nvrtc.__file__).parents[1] / "sampling" / "csrc"
    first, second = ((folder / name).read_text(encoding="utf-8") for name in ("radix_select.cuh", "top_k_top_p.cu"))
    assert nvrtc.joined("sampling", "radix_select.cuh", "top_k_top_p.cu") == f"{first}\n{second}"


def test_a_kernel_gets_its_options_and_shared_memory(compiling: Any) -> None:
    seen = []

    def compile_kernel(source: str, entry: str, nvcc_options: list[str]) -> Kernel:
        seen.append((source, entry, nvcc_options))
        return Kernel()

    compiling(compile_kernel)
    assert (
        nvrtc.compiled("source", "entry", ("-DA=1",), DEVICE, shared_bytes=100_000, failing="").shared_bytes == 100_000
    )
    assert nvrtc.compiled("source", "entry", [], DEVICE, failing="").shared_bytes == 0
    assert seen == [("source", "entry", ["-DA=1"]), ("source", "entry", [])]


def test_what_does_not_compile_is_a_warning(compiling: Any) -> None:
    def compile_kernel(*_: Any, **__: Any) -> Kernel:
        raise RuntimeError("no such instruction")

    compiling(compile_kernel)
    with pytest.warns(UserWarning, match="^Triton runs instead: no such instruction"):
        assert nvrtc.compiled("source", "entry", [], DEVICE, failing="Triton runs instead") is None
