"""The shift of the buffer of recent tokens, after its oldest group has been quantized."""

from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.roofline.cost import Cost


def shift_slots(keys: Tensor, values: Tensor, group: int, mask: Tensor, *, backend: Backend = "auto") -> None:
    """Moves slots `group`, `group` + 1, ... of rows where `mask` is True to slots 0, 1, ..., in place.

    keys, values: [B, Hkv, slots, D], any strides with contiguous channels. mask: bool [B] on the device, so that a
    captured CUDA graph can flush conditionally (QuantSpec sec. 4.3.2). The last `group` slots keep their contents.
    Raises ValueError when shapes disagree, and for a group of 0 slots or of more than the buffer has.
    """
    if keys.shape != values.shape or mask.shape != keys.shape[:1]:
        raise ValueError(
            f"keys {list(keys.shape)}, values {list(values.shape)} and mask {list(mask.shape)} must have the same rows "
            "and keys and values one shape"
        )
    if not 0 < group <= keys.shape[2]:
        raise ValueError(f"group is {group}; allowed: 1 to the {keys.shape[2]} slots of the buffer")
    if not uses_gpu_kernel(backend, keys):
        shift_slots_reference(keys, values, group, mask)
        return
    from ridgeplan.kernels.kv_cache.shift_triton import shift_slots_triton

    shift_slots_triton(keys, values, group, mask)


def shift_slots_reference(keys: Tensor, values: Tensor, group: int, mask: Tensor) -> None:
    """The same in plain torch. Only rows that move are read, which are few in most rounds."""
    rows = mask.nonzero().squeeze(1)
    for store in (keys, values):
        store[rows, :, : store.shape[2] - group] = store[rows, :, group:]


def shift_slots_cost(keys: Tensor, values: Tensor, group: int) -> Cost:
    """What `shift_slots` moves when every row shifts: `ridgeplan.roofline.ops.shift_slots` at these sizes."""
    kept = keys.shape[2] - group
    moved_bytes = (keys.nbytes + values.nbytes) * kept // keys.shape[2]
    return Cost(read_bytes=moved_bytes, write_bytes=moved_bytes)
