"""Rounding with feedback, against GPTQ's equations written out and between its backends."""

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.linear.gptq_round import gptq_round, gptq_round_reference

BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


def exact(outputs: int, group: int, device: str) -> tuple[Tensor, Tensor]:
    """Steps in eighths and feedback in {0, 1/4, 1/2}: all sums are exact, so the order of operations is no matter."""
    generator = torch.Generator().manual_seed(outputs)
    steps = torch.randint(-40, 170, (outputs, group), generator=generator) / 8
    feedback = torch.randint(0, 3, (group, group), generator=generator) / 4
    sparse = torch.rand(group, group, generator=generator) < 4 / group
    return steps.to(device), (feedback * sparse).to(device)


@pytest.mark.parametrize("outputs, group", [(1, 4), (16, 32), (21, 24), (40, 64)])
@BACKENDS
def test_each_input_takes_the_errors_before_it(backend: str, outputs: int, group: int, device: str) -> None:
    steps, feedback = exact(outputs, group, device)
    codes, errors = gptq_round(steps, feedback, backend=backend)
    upper = feedback.double().triu(1)
    moved = steps.double() - errors.double() @ upper
    assert torch.equal(codes.double(), moved.round().clamp(0, 15))
    assert torch.equal(errors.double(), moved - moved.round().clamp(0, 15))


@BACKENDS
def test_halves_go_to_even_and_far_numbers_are_clamped(backend: str, device: str) -> None:
    steps = torch.tensor([[0.5, 1.5, 2.5, 14.5, 15.5, -3.0, 3e9, -3e38]], device=device)
    codes, errors = gptq_round(steps, torch.zeros(8, 8, device=device), backend=backend)
    assert codes.tolist() == [[0, 2, 2, 14, 15, 0, 15, 0]]
    assert torch.equal(errors, steps - codes)


@BACKENDS
def test_bounded_codes_are_next_to_the_weights_own_values(backend: str, device: str) -> None:
    """A whole number has no other neighbour than itself, and errors go on as they would otherwise."""
    steps, feedback = exact(21, 32, device)
    near = steps + torch.randint(-20, 20, steps.shape, generator=torch.Generator().manual_seed(1)).to(device) / 8
    codes, errors = gptq_round(steps, feedback, near, backend=backend)
    moved = steps.double() - errors.double() @ feedback.double().triu(1)
    bounded = moved.round().clamp(near.double().floor(), near.double().ceil()).clamp(0, 15)
    assert torch.equal(codes.double(), bounded)
    assert torch.equal(errors.double(), moved - bounded)


@BACKENDS
def test_codes_of_8_bits_end_at_255(backend: str, device: str) -> None:
    steps = torch.tensor([[254.4, 255.5, 300.0, -1.0, 3e9]], device=device)
    codes, _ = gptq_round(steps, torch.zeros(5, 5, device=device), top_code=255, backend=backend)
    assert codes.tolist() == [[254, 255, 255, 0, 255]]


@pytest.mark.gpu
def test_the_kernel_agrees_with_the_reference_on_the_gpu() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    steps = 8 + 4 * torch.randn(4096, 128, generator=generator, device="cuda")
    feedback = 0.05 * torch.randn(128, 128, generator=generator, device="cuda")
    codes, errors = gptq_round(steps, feedback)
    expected, missed = gptq_round_reference(steps, feedback)
    same = (codes == expected).all(1)  # a number on the edge of two codes may fall either way, and all after it move
    assert same.float().mean() > 0.98
    assert torch.allclose(errors[same], missed[same], atol=1e-4)


def test_a_feedback_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"feedback \[8, 4\] must be square, as wide as steps \[2, 8\]"):
        gptq_round(torch.zeros(2, 8), torch.zeros(8, 4))
    with pytest.raises(ValueError, match=r"near \[2, 4\] must have the shape of steps \[2, 8\]"):
        gptq_round(torch.zeros(2, 8), torch.zeros(8, 8), torch.zeros(2, 4))
