"""Arguments of CUDA kernels: what their structures hold, and what they refuse."""

import ctypes

import pytest
import torch

from ridgeplan.kernels.attention.cuda import AttentionParams
from ridgeplan.kernels.device.cuda import KernelParams, assertions
from ridgeplan.kernels.kv_cache.cuda import QuantizedPlanes


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
    """Thirteen pointers, two times four, then integers: 8 bytes each, as a 64-bit C++ compiler lays them out."""
    lines = assertions(AttentionParams).splitlines()
    assert "static_assert(__INTADDR__(&(((AttentionParams*)0)->value_codes)) == 136," in "\n".join(lines)
    assert "static_assert(__INTADDR__(&(((AttentionParams*)0)->value_codes.scale)) == 152," in "\n".join(lines)
    assert "static_assert(__INTADDR__(&(((AttentionParams*)0)->batch)) == 168," in "\n".join(lines)
    nested = 2 * len(QuantizedPlanes._fields_)
    assert len(lines) == len(AttentionParams.constants) + 1 + len(AttentionParams._fields_) + nested
