"""CUDA C++ kernels: their parameter structs, compilation by NVRTC at first use, and launches with PDL.

With PDL (CUDA C++ Programming Guide), once every CTA of a kernel has executed `griddepcontrol.launch_dependents` or
ended, CTAs of the next kernel start where SMs have room. They first do independent work, for example fetch the first
bytes of a weight, and read earlier results only after `griddepcontrol.wait`. In a captured graph, PDL is a separate
type of edge.

Rules for every kernel launched this way, and for Triton's with `launch_pdl=True`:
- All threads that read other kernels' results, or write anything, wait first. A chain of such kernels is then ordered
  as usual, since a kernel ends only after the ones before it.
- Before the wait, a kernel reads only data that is constant during a round: weights, and codes of the cache. Kernels
  that write such data never let the next one start early, and another kernel runs in between: a kernel may start when
  all CTAs of the one before have ended, but their writes are only guaranteed to be visible after its wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.cuda import _utils as compiler

from ridgeplan.roofline.catalog.files import NoHomeFolder, cache_folder, replacing

INT_RANGE = range(-(1 << 31), 1 << 31)


class KernelParams(ctypes.Structure):
    """Base of the structures: `_fields_` of a subclass lists the fields of the C++ struct of the same name.

    constants: members of the source's `Config` on which the launch depends, by name.
    All fields are passed by name: tensors become pointers, None a null pointer. Raises TypeError when a field is
    missing or unknown, and ValueError for an integer beyond 32 bits, which ctypes would truncate.
    """

    constants: ClassVar[Mapping[str, int]] = MappingProxyType({})

    def __init__(self, **values: Tensor | ctypes.Structure | float | None) -> None:
        names = {name for name, *_ in self._fields_}
        if values.keys() != names:
            raise TypeError(f"{type(self).__name__} got other fields than its own: {sorted(values.keys() ^ names)}")
        super().__init__(**{name: _c_value(name, value) for name, value in values.items()})


def _c_value(name: str, value: Tensor | ctypes.Structure | float | None) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, int) and value not in INT_RANGE:
        raise ValueError(f"{name} is {value}; allowed: 32-bit integers, {INT_RANGE.start} to {INT_RANGE.stop - 1}")
    return value


def assertions(params: type[KernelParams]) -> str:
    """C++ assertions that the struct named like `params` has the same layout, and `Config` the same constants.

    NVRTC has no header for `offsetof`; `__INTADDR__` is what the front end of NVIDIA's compilers turns it into.
    """
    name = params.__name__
    lines = [f'static_assert(Config::{key} == {value}, "{key}");' for key, value in params.constants.items()]
    lines.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(params)}, "size of {name}");')
    for field, offset in _offsets(params):
        address = f"__INTADDR__(&((({name}*)0)->{field}))"
        lines.append(f'static_assert({address} == {offset}, "offset of {name}::{field}");')
    return "\n".join(lines)


def _offsets(params: type[ctypes.Structure], outer: str = "", base: int = 0) -> Iterator[tuple[str, int]]:
    """Every field and its offset in bytes; fields of nested structures as `outer.inner`."""
    for name, kind, *_ in params._fields_:
        offset = base + getattr(params, name).offset
        yield outer + name, offset
        if issubclass(kind, ctypes.Structure):
            yield from _offsets(kind, f"{outer}{name}.", offset)


SOURCES = Path(__file__).parents[1]


def program(source: str, params: type[KernelParams]) -> str:
    """The translation unit of a kernel: its file, relative to this package, and assertions on it."""
    return f'#include "{source}"\n{assertions(params)}\n'


def config_options(**members: int) -> list[str]:
    """Compiler options with the values of a compiled variant, which the source's `Config` reads as CONFIG_<name>."""
    return [f"-DCONFIG_{name}={int(value)}" for name, value in members.items()]


def include_options() -> list[str]:
    """Compiler options with which `program` finds its file; all other #include lines are relative to the file."""
    return [f"-I{SOURCES}"]


def compile_kernel(
    program: str,
    entry: str,
    options: Sequence[str],
    device: torch.device,
    *,
    shared_bytes: int = 0,
    fallback: str,
    arch_specific: bool = False,
) -> Any | None:
    """The kernel `entry`, which may be launched with up to `shared_bytes` of dynamic shared memory.

    arch_specific: with instructions that newer GPUs lack, as wgmma of sm_90a. Its code is kept in the user's cache, as
    NVRTC takes seconds. None if it does not compile or load, after a warning that begins with `fallback`, which says
    what runs instead.
    """
    try:
        with torch.cuda.device(device):
            capability = "".join(map(str, _capability(device))) + "a" * arch_specific
            path = _binary_path(program, entry, options, capability)
            binary = path and _read_binary(path)
            if not binary:
                binary = Binary(*compiler._nvrtc_compile(
                    program, entry, compute_capability=capability, nvcc_options=[*include_options(), *options]
                ))  # fmt: skip
                if path:
                    _save_binary(binary, path)
            kernels = compiler._cuda_load_module(binary.code, [binary.name])
            assert isinstance(kernels, dict), "kernels by name"
            kernel: Any = kernels[binary.name]
            if shared_bytes:
                kernel.set_shared_memory_config(shared_bytes)
    except (RuntimeError, OSError, AttributeError) as error:
        warnings.warn(f"{fallback}: {error}", stacklevel=2)
        return None
    return kernel


class Binary(NamedTuple):
    """A kernel's code for one architecture, and its name in it."""

    code: bytes
    name: str


def _binary_path(program: str, entry: str, options: Sequence[str], capability: str) -> Path | None:
    """The file of a kernel's code: its name is a hash of all that the code depends on. None without a home folder."""
    identity = repr(
        (program, entry, list(options), capability, torch.version.git_version, torch.version.cuda, _sources_hash())
    )
    try:
        folder = cache_folder() / "kernels"
    except NoHomeFolder:
        return None
    return folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.cubin"


@cache
def _sources_hash() -> str:
    """Of every CUDA file of this package, as programs include them."""
    files = sorted([*SOURCES.rglob("*.cu"), *SOURCES.rglob("*.cuh")])
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def _read_binary(path: Path) -> Binary | None:
    """The code in a file; None if it is missing or damaged."""
    try:
        digest, name, code = path.read_bytes().split(b"\n", 2)
    except (OSError, ValueError):
        return None
    whole = digest == hashlib.sha256(name + code).hexdigest().encode()
    return Binary(code, name.decode()) if whole else None


def _save_binary(binary: Binary, path: Path) -> None:
    """Writes a file that appears under its name only when it is complete; where that fails, nothing is kept."""
    name = binary.name.encode()
    digest = hashlib.sha256(name + binary.code).hexdigest().encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as staging:
            staging.write_bytes(b"\n".join((digest, name, binary.code)))


PROGRAMMATIC_STREAM_SERIALIZATION = 6  # the driver's CUlaunchAttributeID


class LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def launch_with_pdl(
    kernel: Any,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    params: ctypes.Structure,
    shared_bytes: int = 0,
    *,
    early: bool = True,
) -> None:
    """Launches a kernel of `compile_kernel` on the current stream, with `params` as its only argument.

    early: the kernel may start before the previous one has ended, if that one allows it; False if data that it reads
    before its wait has only just been written. Raises RuntimeError when the driver refuses.
    """
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    attribute = LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=int(early))
    config = LaunchConfig(
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*block),
        shared_bytes,
        torch.cuda.current_stream().cuda_stream,
        ctypes.pointer(attribute),
        1,
    )
    status = driver().cuLaunchKernelEx(ctypes.byref(config), kernel.func, arguments, None)
    if status:
        raise RuntimeError(f"the CUDA driver refused a launch of grid {grid}, block {block}: error {status}")


def may_start_early(*read_first: Tensor | None) -> bool:
    """`early` of `launch_with_pdl` for a kernel that reads contiguous forms of `read_first` before its wait.

    A copy just made is not yet visible there.
    """
    return all(tensor is None or tensor.is_contiguous() for tensor in read_first)


def pdl_options(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a Triton kernel that begins with `pdl_launch_dependents_and_wait`: PDL on Hopper and newer."""
    early = is_on_hopper(tensor)
    return {"PDL": early, "launch_pdl": early}


def is_on_hopper(tensor: Tensor) -> bool:
    """Whether the tensor is on an NVIDIA GPU of Hopper's generation or a newer one."""
    return tensor.is_cuda and torch.version.cuda is not None and _capability(tensor.device) >= (9, 0)


def has_wgmma(device: torch.device) -> bool:
    """Whether the NVIDIA GPU has the products of warpgroups: Hopper's generation only, neither older nor newer."""
    return torch.version.cuda is not None and _capability(device)[0] == 9


PACK_ELEMENTS = 8  # 16-bit elements in 16 bytes, the unit of vector loads and bulk copies


def is_packed(tensor: Tensor) -> bool:
    """Whether 16-byte loads can read the rows of a tensor of 16-bit elements: contiguous and aligned channels."""
    *strides, channel_stride = tensor.stride()
    return channel_stride == 1 and tensor.data_ptr() % 16 == 0 and not any(s % PACK_ELEMENTS for s in strides)


def pack_strides(*tensors: Tensor) -> list[int]:
    """The first three strides of each tensor [., ., ., channels] of 16-bit elements, in units of 16 bytes."""
    return [stride // PACK_ELEMENTS for tensor in tensors for stride in tensor.stride()[:3]]


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def driver() -> ctypes.CDLL:
    """The CUDA driver's library, as torch loads it."""
    library: ctypes.CDLL = torch.cuda._utils._get_gpu_runtime_library()
    return library
