"""The gated activation, against its formula in float64."""

import pytest
import torch

from ridgeplan.kernels.layer import swiglu

pytestmark = pytest.mark.usefixtures("poisoned_empty")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def reference(gate_up: torch.Tensor) -> torch.Tensor:
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
    torch.testing.assert_close(out.double(), reference(gate_up), atol=tolerance, rtol=tolerance)


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
def test_compiled_at_real_sizes(rows: int, width: int) -> None:
    gate_up = 3 * torch.randn(rows, 2 * width, device="cuda").bfloat16()
    torch.testing.assert_close(swiglu(gate_up).double(), reference(gate_up), atol=1e-6, rtol=2**-7)
