"""Rotary tables, and rotation with the cache append, against formulas in float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.layer import rope_append, rotary_tables

pytestmark = pytest.mark.usefixtures("poisoned_empty")
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS = 1e-6
ROTATIONS = [  # (q_heads, kv_heads, head_dim), dtype, with qk_norm
    ((9, 3, 64), torch.float32, False),
    ((9, 3, 64), torch.bfloat16, True),
    ((14, 2, 64), torch.float16, True),
    ((4, 4, 96), torch.float32, True),
    ((4, 4, 96), torch.bfloat16, False),
    ((8, 1, 128), torch.float16, False),
    ((8, 1, 128), torch.bfloat16, True),
    ((2, 1, 256), torch.float32, False),
    ((2, 1, 256), torch.float16, True),
    ((3, 3, 10), torch.float32, True),
    ((3, 3, 10), torch.bfloat16, False),
]
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


def frequencies(head_dim: int, device: str) -> Tensor:
    return 1e-4 ** (torch.arange(0, head_dim, 2, device=device) / head_dim)


@dataclass(frozen=True, eq=False)
class Case:
    """Two sequences of three tokens in the second layer of a cache, at scattered slots of its first two rows."""

    heads: tuple[int, int, int]
    dtype: torch.dtype
    device: str

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(sum(self.heads))

    @property
    def qkv(self) -> Tensor:
        q_heads, kv_heads, head_dim = self.heads
        width = (q_heads + 2 * kv_heads) * head_dim
        return torch.randn(2, 3, width, generator=self.generator).to(self.device, self.dtype)

    @property
    def slots(self) -> Tensor:
        return torch.tensor([[4, 0, 6], [1, 2, 3]], device=self.device)

    @property
    def qk_norm(self) -> Tensor:
        q_heads, kv_heads, head_dim = self.heads
        weight = 0.5 + torch.rand(q_heads + kv_heads, head_dim, generator=self.generator)
        return weight.to(self.device, self.dtype)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        return rotary_tables(100 * self.slots, frequencies(self.heads[2], self.device), 1.1, backend="reference")

    def cache(self) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, batch, kv_heads, slots, head_dim], poisoned."""
        _, kv_heads, head_dim = self.heads
        shape = (2, 3, kv_heads, 7, head_dim)
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device), torch.full(
            shape, torch.nan, dtype=self.dtype, device=self.device
        )

    def expected(self, normed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [2, 3, heads, head_dim] in float64: complex numbers times e^(i angle)."""
        q_heads, kv_heads, head_dim = self.heads
        heads = self.qkv.double().unflatten(-1, (-1, head_dim))
        turned, values = heads[:, :, : q_heads + kv_heads], heads[:, :, q_heads + kv_heads :]
        if normed:
            turned = turned / (turned.square().mean(-1, keepdim=True) + EPS).sqrt() * self.qk_norm.double()
        cos, sin = (table.double()[:, :, None] for table in self.tables)
        product = torch.complex(*turned.chunk(2, dim=-1)) * torch.complex(cos, sin)
        turned = torch.cat([product.real, product.imag], dim=-1)
        return turned[:, :, :q_heads], turned[:, :, q_heads:], values


@pytest.mark.parametrize(("heads", "dtype", "normed"), ROTATIONS, ids=str)
@BACKENDS
def test_rotates_and_appends(
    heads: tuple[int, int, int], dtype: torch.dtype, normed: bool, backend: str, device: str
) -> None:
    case = Case(heads, dtype, device)
    keys, values = case.cache()
    queries = rope_append(
        case.qkv,
        case.tables,
        keys[1],
        values[1],
        case.slots,
        heads[0],
        qk_norm=case.qk_norm if normed else None,
        eps=EPS,
        backend=backend,
    )
    expected_queries, expected_keys, expected_values = case.expected(normed)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    assert queries.dtype == dtype
    torch.testing.assert_close(queries.double(), expected_queries, **tolerance)
    for row, slots in enumerate(case.slots):
        torch.testing.assert_close(keys[1, row, :, slots].double(), expected_keys[row].transpose(0, 1), **tolerance)
        assert torch.equal(values[1, row, :, slots].double(), expected_values[row].transpose(0, 1))
        keys[1, row, :, slots] = values[1, row, :, slots] = torch.nan
    assert keys.isnan().all() and values.isnan().all()  # nothing else was written


@BACKENDS
def test_eps_counts_where_heads_are_small(backend: str, device: str) -> None:
    """Heads of 3e-3 with eps 1.6e-5: the root of 9e-6 + 1.6e-5 is 5e-3. At position 0 nothing rotates."""
    qkv = torch.full((1, 1, 3 * 16), 3e-3, device=device)
    keys, values = (torch.zeros(1, 1, 4, 16, device=device) for _ in "kv")
    slots = torch.zeros(1, 1, dtype=torch.int64, device=device)
    tables = rotary_tables(slots, frequencies(16, device), 1.0, backend="reference")
    weight = torch.tensor([[2.0], [4.0]], device=device).expand(2, 16)
    queries = rope_append(qkv, tables, keys, values, slots, 1, qk_norm=weight, eps=1.6e-5, backend=backend)
    torch.testing.assert_close(queries, torch.full_like(queries, 2 * 0.6), atol=0, rtol=1e-5)
    torch.testing.assert_close(keys[:, :, 0], torch.full_like(keys[:, :, 0], 4 * 0.6), atol=0, rtol=1e-5)
    assert (values[:, :, 0] == 3e-3).all()


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 96)], ids=str)
def test_large_programs(heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Those that long prompts run in, here with heads of several tokens."""
    monkeypatch.setattr("ridgeplan.kernels.layer.triton.FEW_ELEMENTS", 0)
    case = Case(heads, torch.float32, device)
    results = []
    for backend in ("reference", "triton"):
        keys, values = (store.nan_to_num() for store in case.cache())
        queries = rope_append(
            case.qkv,
            case.tables,
            keys[0],
            values[0],
            case.slots,
            heads[0],
            qk_norm=case.qk_norm,
            eps=EPS,
            backend=backend,
        )
        results.append((queries, keys, values))
    for reference, triton in zip(*results, strict=True):
        torch.testing.assert_close(triton, reference, atol=4e-6, rtol=4e-6)


@BACKENDS
def test_a_view_of_tokens_first_storage(backend: str, device: str) -> None:
    """[slots, kv_heads, head_dim] storage as prefill may keep it, and strided tables of one sequence."""
    case = Case((6, 2, 32), torch.float32, device)
    keys, values = (torch.full((1, 9, 2, 32), torch.nan, device=device).transpose(1, 2) for _ in "kv")
    cos, sin = (torch.stack([table, table], dim=-1)[..., 0] for table in case.tables)
    queries = rope_append(case.qkv[:1], (cos[:1], sin[:1]), keys, values, case.slots[:1], 6, backend=backend)
    expected_queries, expected_keys, _ = case.expected(normed=False)
    torch.testing.assert_close(queries.double(), expected_queries[:1], atol=4e-6, rtol=4e-6)
    torch.testing.assert_close(keys[0, :, case.slots[0]].double(), expected_keys[0].transpose(0, 1), atol=4e-6, rtol=0)


def test_the_kernel_ignores_slots_past_the_end(device: str) -> None:
    case = Case((2, 2, 16), torch.float32, device)
    keys, values = (torch.full((2, 2, 4, 16), torch.nan, device=device) for _ in "kv")
    rope_append(case.qkv, case.tables, keys, values, case.slots, 2, backend="triton")
    written = ~keys[:, :, :, 0].isnan()
    assert torch.equal(written, ~values[:, :, :, 0].isnan())
    assert written[:, 0].tolist() == [[True, False, False, False], [False, True, True, True]]


@pytest.mark.parametrize("scale", [1.0, 1.25])
@pytest.mark.parametrize("head_dim", [64, 96])
@BACKENDS
def test_tables_up_to_a_million_tokens(backend: str, head_dim: int, scale: float, device: str) -> None:
    """Cosines and sines of the float32 angle, to float32's accuracy, wherever the position is."""
    positions = torch.tensor([[0, 1, 4095], [131071, 999_983, 2**20 - 1]], device=device)
    turns = frequencies(head_dim, device)
    cos, sin = rotary_tables(positions, turns, scale, backend=backend)
    angles = (positions[..., None] * turns).double()
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (2, 3, head_dim // 2)
    torch.testing.assert_close(cos.double(), scale * angles.cos(), atol=2e-7, rtol=0)
    torch.testing.assert_close(sin.double(), scale * angles.sin(), atol=2e-7, rtol=0)


def test_errors_name_the_shapes() -> None:
    case = Case((4, 2, 16), torch.float32, "cpu")
    keys, values = (part[0] for part in case.cache())

    def append(slots: Tensor = case.slots, keys: Tensor = keys, q_heads: int = 4, **options: Tensor) -> None:
        rope_append(case.qkv, case.tables, keys, values, slots, q_heads, **options)

    with pytest.raises(ValueError, match="qkv is 128 wide; allowed: 144, of 5 query heads and twice 2 KV heads of 16"):
        append(q_heads=5)
    with pytest.raises(ValueError, match=r"keys \[1, 2, 7, 16\] and values \[3, 2, 7, 16\] must have one shape with 2"):
        append(keys=keys[:1])
    with pytest.raises(ValueError, match=r"slots \[2, 2\] and tables \[2, 3, 8\] do not fit \[2, 3\] tokens"):
        append(slots=case.slots[:, :2])
    with pytest.raises(ValueError, match=r"qk_norm is \[5, 16\]; allowed: \[6, 16\]"):
        append(qk_norm=case.qk_norm[:5])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (32, 32, 96), (8, 2, 256)], ids=str)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (33, 9), (1, 2048)], ids=str)
def test_compiled_equals_the_reference_at_real_sizes(batch: int, tokens: int, heads: tuple[int, int, int]) -> None:
    q_heads, kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(batch)
    qkv = torch.randn(batch, tokens, (q_heads + 2 * kv_heads) * head_dim, generator=generator).bfloat16().cuda()
    weight = torch.rand(q_heads + kv_heads, head_dim, device="cuda").bfloat16()
    slots = torch.arange(tokens, device="cuda") + torch.arange(batch, device="cuda")[:, None]
    tables = rotary_tables(slots + 10**6, frequencies(head_dim, "cuda"), 1.0)
    results = []
    for backend in ("reference", "triton"):
        keys, values = (torch.zeros(batch, kv_heads, tokens + batch, head_dim, device="cuda").bfloat16() for _ in "kv")
        queries = rope_append(
            qkv,
            tables,
            keys,
            values,
            slots,
            q_heads,
            qk_norm=weight,
            eps=EPS,
            backend=backend,  # type: ignore[arg-type]
        )
        results.append((queries, keys, values))
    for reference, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, reference, atol=2**-7, rtol=2**-7)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """A cache of more than 2 ** 31 elements, written at its far end."""
    keys, values = (torch.zeros(17, 8, 131072, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    qkv = torch.randn(17, 1, 24 * 128, device="cuda").bfloat16()
    slots = torch.full((17, 1), 131071, device="cuda")
    tables = rotary_tables(slots, frequencies(128, "cuda"), 1.0)
    rope_append(qkv, tables, keys, values, slots, 8)
    assert torch.equal(values[16, :, 131071], qkv[16, 0].view(24, 128)[16:])
    assert not values[:, :, :131071].any() and keys[16, :, 131071].any()
