"""The tensors of a QuantizedKV as parameters of CUDA C++ kernels (csrc/quantized_kv_params.cuh)."""

import ctypes

from ridgeplan.kernels.device.kernel_params import KernelParams
from ridgeplan.kernels.kv_cache.layout import QuantizedKV

GROUP = 128  # tokens of a group, in every CUDA C++ kernel that reads or writes codes
HEAD_DIMS = (64, 128)  # that these kernels support


class QuantizedPlanes(KernelParams):
    """Pointers to the codes, scales and minima of keys or of values."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("upper", "lower", "scale", "minimum"))


def key_planes(codes: QuantizedKV | None) -> QuantizedPlanes:
    """The planes of the keys; null pointers for missing lower codes, or if there are no codes."""
    if codes is None:
        return QuantizedPlanes(upper=None, lower=None, scale=None, minimum=None)
    return QuantizedPlanes(upper=codes.key_upper, lower=codes.key_lower, scale=codes.key_scale, minimum=codes.key_min)


def value_planes(codes: QuantizedKV | None) -> QuantizedPlanes:
    """The planes of the values, likewise."""
    if codes is None:
        return QuantizedPlanes(upper=None, lower=None, scale=None, minimum=None)
    return QuantizedPlanes(
        upper=codes.value_upper, lower=codes.value_lower, scale=codes.value_scale, minimum=codes.value_min
    )
