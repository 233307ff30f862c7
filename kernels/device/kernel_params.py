"""Arguments of CUDA C++ kernels: one structure per kernel, with the same layout here and in its params.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

INT_RANGE = range(-(1 << 31), 1 << 31)


class KernelParams(ctypes.Structure):
    """Base of the structures: `_fields_` of a subclass lists the fields of the C++ struct of the same name.

    constants: those of the C++ source on which the launch depends, by name.
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
    """C++ assertions that the struct named like `params` has the same layout, and the source the same constants.

    NVRTC has no header for `offsetof`; `__INTADDR__` is what the front end of NVIDIA's compilers turns it into.
    """
    name = params.__name__
    lines = [f'static_assert({key} == {value}, "{key}");' for key, value in params.constants.items()]
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
