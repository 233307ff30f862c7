"""The masked shift of the recent tokens' buffer."""

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import shift_slots

BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


def buffers(rows: int, kv_heads: int, slots: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(slots)
    return tuple(torch.randn(2, rows, kv_heads, slots, head_dim, generator=generator).to(device, dtype).unbind())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("slots", "group", "head_dim"),
    [(8, 4, 16), (64, 32, 64), (69, 32, 64), (200, 32, 96), (70, 48, 10), (5, 5, 8)],
    ids=str,
)
@BACKENDS
def test_masked_rows_move_up(
    backend: str, slots: int, group: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    keys, values = buffers(3, 2, slots, head_dim, dtype, device)
    mask = torch.tensor([True, False, True], device=device)
    expected = [store.clone() for store in (keys, values)]
    for store in expected:
        store[mask] = torch.cat([store[mask][:, :, group:], store[mask][:, :, slots - group :]], dim=2)
    shifted_keys = keys.clone()
    shift_slots(keys, values, group, mask, backend=backend)
    shift_slots(shifted_keys, None, group, mask, backend=backend)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1]) and torch.equal(shifted_keys, keys)


@BACKENDS
def test_strided_storage(backend: str, device: str) -> None:
    """[rows, slots, heads, D] storage seen as [rows, heads, slots, D] moves like a contiguous copy."""
    keys, values = (store.transpose(1, 2) for store in buffers(2, 40, 3, 32, torch.float32, device))
    plain = [store.contiguous() for store in (keys, values)]
    mask = torch.tensor([False, True], device=device)
    shift_slots(keys, values, 16, mask, backend=backend)
    shift_slots(*plain, 16, mask, backend="reference")
    assert torch.equal(keys, plain[0]) and torch.equal(values, plain[1])


def test_errors_name_the_shapes() -> None:
    keys, values = buffers(2, 1, 8, 4, torch.float32, "cpu")
    every = torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"values \[1, 1, 8, 4\] and mask \[2\] must have the same rows"):
        shift_slots(keys, values[:1], 4, every)
    with pytest.raises(ValueError, match="group is 9; allowed: 1 to the 8 slots of the buffer"):
        shift_slots(keys, values, 9, every)


@pytest.mark.gpu
def test_compiled_at_real_size() -> None:
    keys, values = buffers(64, 8, 265, 128, torch.bfloat16, "cuda")
    expected = [store.cpu() for store in (keys, values)]
    mask = torch.rand(64, generator=torch.Generator().manual_seed(0)) < 0.5
    shift_slots(keys, values, 128, mask.cuda())
    shift_slots(*expected, 128, mask)
    assert torch.equal(keys.cpu(), expected[0]) and torch.equal(values.cpu(), expected[1])
