"""Residual addition with RMSNorm, against its formula in float64."""

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.layer import add_rms_norm, swiglu

pytestmark = pytest.mark.usefixtures("poisoned_empty")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5


def inputs(rows: tuple[int, ...], hidden: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(hidden)
    streams = 3 * torch.randn(2, *rows, hidden, generator=generator)
    weight = torch.rand(hidden, generator=generator) + 0.5
    stream, update = streams.to(device, dtype)
    return stream, update, weight.to(device, dtype)


def reference(total: Tensor, weight: Tensor) -> Tensor:
    x = total.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize(
    ("rows", "hidden", "dtype"),
    [
        ((1, 1), 576, torch.float32), ((2, 3), 896, torch.bfloat16), ((2, 3), 896, torch.float16),
        ((5,), 1, torch.float32), ((), 64, torch.bfloat16), ((), 64, torch.float16), ((2,), 4100, torch.float32),
        ((2,), 4100, torch.bfloat16), ((33,), 70, torch.float32), ((33,), 70, torch.float16),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_sum_and_norm(backend: str, rows: tuple[int, ...], hidden: int, dtype: torch.dtype, device: str) -> None:
    stream, update, weight = inputs(rows, hidden, dtype, device)
    total, normed = add_rms_norm(stream, update, weight, EPS, backend=backend)
    assert total.dtype == normed.dtype == dtype
    # The interpreter truncates to bf16 where the GPU rounds: one unit in the last place.
    torch.testing.assert_close(total, stream + update, atol=0, rtol=torch.finfo(dtype).eps)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(normed.double(), reference(total, weight), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_without_an_update_the_stream_passes_through(backend: str, device: str) -> None:
    stream, _, weight = inputs((3,), 96, torch.float32, device)
    total, normed = add_rms_norm(stream, None, weight, EPS, backend=backend)
    assert total is stream
    torch.testing.assert_close(normed.double(), reference(stream, weight), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rows_and_weight_may_be_strided(backend: str, device: str) -> None:
    wide, update, weight = inputs((4,), 128, torch.float32, device)
    half, every_second = torch.cat([wide, wide], dim=-1)[:, :128], weight.repeat_interleave(2)[::2]
    output = add_rms_norm(half, update, every_second, EPS, backend=backend)
    for strided, plain in zip(output, add_rms_norm(wide, update, weight, EPS), strict=True):
        torch.testing.assert_close(strided, plain)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_eps_counts_where_activations_are_small(backend: str, device: str) -> None:
    """Rows of 3e-3 with eps 1.6e-5: the root of 9e-6 + 1.6e-5 is 5e-3. 96 channels are no power of two."""
    hidden, weight = torch.full((20, 96), 3e-3, device=device), torch.full((96,), 2.0, device=device)
    _, normed = add_rms_norm(hidden, None, weight, 1.6e-5, backend=backend)
    torch.testing.assert_close(normed, torch.full_like(normed, 2 * 3e-3 / 5e-3), atol=0, rtol=1e-5)


def test_errors_name_the_shapes() -> None:
    stream, update, weight = inputs((2,), 64, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"weight \[63\] does not fit hidden states \[2, 64\]"):
        add_rms_norm(stream, update, weight[1:], EPS)
    with pytest.raises(ValueError, match=r"update \[1, 64\] must have the shape of hidden, \[2, 64\]"):
        add_rms_norm(stream, update[:1], weight, EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [576, 896, 2048, 4096, 5120, 8192])
@pytest.mark.parametrize("rows", [1, 9, 301, 2048])
def test_compiled_at_real_sizes(rows: int, hidden: int) -> None:
    stream, update, weight = inputs((rows,), hidden, torch.bfloat16, "cuda")
    total, normed = add_rms_norm(stream, update, weight, EPS)
    assert torch.equal(total, stream + update)
    torch.testing.assert_close(normed.double(), reference(total, weight), atol=0, rtol=2**-8 + 1e-5)


# The gated activation, against its formula in float64.


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2 * 1536), (3, 2, 2 * 1100), (5, 2), (14,)], ids=str)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_swiglu(backend: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    gate_up = 4 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    gate_up = gate_up.to(device, dtype)
    out = swiglu(gate_up, backend=backend)
    assert out.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), swiglu_reference(gate_up), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_gate_may_be_a_gelu(backend: str, device: str) -> None:
    gate_up = 4 * torch.randn(3, 2 * 40, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(device)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2 * up
    out = swiglu(gate_up, activation="gelu_tanh", backend=backend)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's; infinity is right there
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_saturated_gates(backend: str, device: str) -> None:
    gate = torch.tensor([-200.0, -20.0, 0.0, 20.0, 200.0], device=device)
    out = swiglu(torch.cat([gate, torch.ones_like(gate)]), backend=backend)
    torch.testing.assert_close(out, torch.tensor([0.0, -4.1223e-8, 0.0, 20.0, 200.0], device=device))


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="which is 7; allowed: even widths"):
        swiglu(torch.zeros(2, 7))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1536, 4864, 14336])
@pytest.mark.parametrize("rows", [1, 9, 301, 2048])
def test_swiglu_compiled_at_real_sizes(rows: int, width: int) -> None:
    gate_up = 3 * torch.randn(rows, 2 * width, device="cuda").bfloat16()
    torch.testing.assert_close(swiglu(gate_up).double(), swiglu_reference(gate_up), atol=1e-6, rtol=2**-7)
