"""The gated delta rule by token and in chunks, and the gated norm, against transformers' module in float32."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated, torch_recurrent_gated_delta_rule

from ridgeplan.kernels import state as kernels
from ridgeplan.kernels.state import DeltaVectors, StateRows, delta_chunks, delta_step, gated_rms_norm
from ridgeplan.roofline.execution import state_ring_rows

pytestmark = pytest.mark.usefixtures("poisoned_empty")
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 1, 2, 12, 20, 4  # no powers of two
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
WIDTH = CHANNELS + 2 * VALUE_HEADS
STATE = (VALUE_HEADS, KEY_DIM, VALUE_DIM)
TEXT = 70  # more than a chunk
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def vectors(device: str, dtype: torch.dtype) -> DeltaVectors:
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(CHANNELS, TAPS, generator=generator).to(device, dtype)
    decay, bias = (torch.rand(VALUE_HEADS, generator=generator).to(device) for _ in "ab")
    return DeltaVectors(taps, decay, bias, KEY_HEADS, KEY_DIM, step_limit=2)


def texts(count: int, device: str, dtype: torch.dtype) -> Tensor:
    inputs = torch.randn(count, TEXT, WIDTH + 3, generator=torch.Generator().manual_seed(2))
    return inputs.to(device, dtype)


def expected(inputs: Tensor, given: DeltaVectors) -> tuple[Tensor, Tensor]:
    """Outputs and final states of whole texts, by transformers' convolution and recurrence."""
    mixed, step, decay = inputs[..., :WIDTH].split((CHANNELS, VALUE_HEADS, VALUE_HEADS), dim=-1)
    padded = functional.pad(mixed.transpose(1, 2), (TAPS - 1, 0)).float()
    weight = given.taps[:, None].float()
    convolved = functional.silu(functional.conv1d(padded, weight, groups=CHANNELS).to(inputs.dtype)).transpose(1, 2)
    q, k, v = convolved.split((KEY_HEADS * KEY_DIM,) * 2 + (VALUE_HEADS * VALUE_DIM,), dim=-1)
    log_decay = -given.log_decay.exp() * functional.softplus(decay.float() + given.step_bias)
    heads = (part.unflatten(-1, (-1, size)) for part, size in ((q, KEY_DIM), (k, KEY_DIM), (v, VALUE_DIM)))
    rule = torch_recurrent_gated_delta_rule
    out, state = rule(
        *heads, log_decay, given.step_limit * step.sigmoid(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert state is not None
    return out, state


def rows(inputs: Tensor, lengths: list[int], queries: int, given: DeltaVectors) -> StateRows:
    """States and rings of texts as prefill leaves them after `lengths` tokens."""
    ring = torch.full(
        (len(inputs), state_ring_rows(TAPS, queries), WIDTH), 9.0, dtype=inputs.dtype, device=inputs.device
    )
    states = torch.zeros(len(inputs), *STATE, device=inputs.device)
    for row, length in enumerate(lengths):
        delta_chunks(inputs[row, :length], inputs.new_zeros(TAPS - 1, WIDTH), states[row], given)
        for position in range(max(0, length - TAPS + 1), length):
            ring[row, position % ring.shape[1]] = inputs[row, position, :WIDTH]
    committed = torch.tensor(lengths, dtype=torch.int32, device=inputs.device)
    return StateRows(states, ring, committed, committed.clone())


@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", torch.float32), ("reference", torch.bfloat16), ("triton", torch.float32)]
)
def test_passes_over_drafts_that_are_partly_rejected(backend: str, dtype: torch.dtype, device: str) -> None:
    given, inputs, queries = vectors(device, dtype), texts(2, device, dtype), 2
    outputs, _ = expected(inputs, given)
    here = rows(inputs, lengths := [66, 2], queries, given)  # the second has fewer tokens than the convolution sees
    for kept in ([0, 2], [2, 1]):
        rejected = texts(2, device, dtype).flip(0)  # drafts' inputs, of which nothing may stay
        for offset in range(queries - 1):
            positions = here.accepted[:, None].long() + offset
            delta_step(rejected[:, offset : offset + 1], here, positions, given, backend=backend)
            here.committed.copy_(here.accepted)
        positions = here.accepted[:, None] + torch.arange(queries, device=device)
        new = torch.stack([inputs[row, at.clamp_max(TEXT - 1)] for row, at in enumerate(positions)])
        out = delta_step(new, here, positions, given, backend=backend)
        here.committed.copy_(here.accepted)
        for row, length in enumerate(lengths):
            seen = min(queries, TEXT - length)
            want = outputs[row, length : length + seen]
            torch.testing.assert_close(out[row, :seen], want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        lengths = [length + more for length, more in zip(lengths, kept, strict=True)]
        here.accepted.copy_(torch.tensor(lengths))


@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", torch.float32), ("triton", torch.float32), ("triton", torch.float16)]
)
def test_a_prompt_in_chunks_equals_the_recurrence(backend: str, dtype: torch.dtype, device: str) -> None:
    given, inputs, near = vectors(device, dtype), texts(1, device, dtype), TOLERANCE[dtype]
    outputs, final = expected(inputs, given)
    state, earlier = torch.zeros(STATE, device=device), inputs.new_zeros(TAPS - 1, WIDTH)
    parts = []
    for part in inputs[0].split([TEXT - 3, 1, 2]):
        parts.append(delta_chunks(part, earlier, state, given, backend=backend))
        earlier = torch.cat([earlier, part[:, :WIDTH]])[1 - TAPS :]
    torch.testing.assert_close(torch.cat(parts), outputs[0], atol=near, rtol=near)
    torch.testing.assert_close(state, final[0], atol=near, rtol=near)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_chunks_of_keys_that_are_alike_stay_finite(backend: str, device: str) -> None:
    """Powers of a whole chunk's triangular system grow to 1e18 here, its solution does not."""
    taps = functional.one_hot(torch.full((20 + 4 * 16,), TAPS - 1), TAPS).float().to(device)
    given = DeltaVectors(taps, *torch.full((2, 4), -9.0).to(device), key_heads=2, key_dim=5)
    inputs = torch.randn(130, given.inputs, generator=torch.Generator().manual_seed(3)).to(device)
    inputs[:, :20] = inputs[:1, :20] + 0.01 * inputs[:, :20]
    inputs[:, -8:-4] = 9  # steps of nearly 1
    state, earlier = torch.randn(4, 5, 16, device=device), inputs.new_zeros(TAPS - 1, given.inputs)
    ring = torch.full((1, state_ring_rows(TAPS, 130), given.inputs), 9.0, device=device)
    here, positions = torch.zeros(1, dtype=torch.int32, device=device), torch.arange(130, device=device)[None]
    want = delta_step(inputs[None], StateRows(state[None].clone(), ring, here, here), positions, given)[0]
    out = delta_chunks(inputs, earlier, state, given, backend=backend)
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_gated_norm_is_that_of_transformers(backend: str, device: str) -> None:
    x, packed, weight = torch.randn(2, 3, 5, 20), torch.randn(2, 3, 7 + 100), torch.randn(20)
    module = Qwen3_5RMSNormGated(20, eps=1e-6)
    module.weight.data.copy_(weight)
    want = module(x, packed[..., 7:].unflatten(-1, (5, 20))).flatten(-2)
    args = (x.to(device), packed.to(device)[..., 7:], weight.to(device), 1e-6)
    torch.testing.assert_close(gated_rms_norm(*args, backend=backend).cpu(), want, atol=1e-5, rtol=1e-5)


def test_sizes_that_do_not_fit_are_refused() -> None:
    given, inputs = vectors("cpu", torch.float32), texts(1, "cpu", torch.float32)
    here, positions = rows(inputs, [5], 2, given), torch.arange(5, 8)[None]
    with pytest.raises(ValueError, match="the ring has 7 rows; allowed: 9 or more"):
        delta_step(inputs[:, :3], here, positions, given)
    with pytest.raises(ValueError, match="positions are"):
        delta_step(inputs[:, :2], here, positions, given)
    with pytest.raises(ValueError, match=r"inputs are 60 wide and earlier ones 68; allowed: 68"):
        delta_step(inputs[:, :2, :60], here, positions[:, :2], given)
    with pytest.raises(ValueError, match="earlier inputs are of 2 tokens; allowed: 3"):
        delta_chunks(inputs[0], inputs.new_zeros(2, WIDTH), here.state[0], given)


def test_pieces_in_torch_equal_the_whole(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, inputs = vectors(device, torch.float32), texts(1, device, torch.float32)[0]
    earlier = torch.randn(TAPS - 1, WIDTH, generator=torch.Generator().manual_seed(5)).to(device)
    whole, pieces = torch.zeros(STATE, device=device), torch.zeros(STATE, device=device)
    want = delta_chunks(inputs, earlier, whole, given, backend="reference")
    monkeypatch.setattr(kernels, "TORCH_STATE_TOKENS", len(inputs) // 3)
    torch.testing.assert_close(delta_chunks(inputs, earlier, pieces, given, backend="reference"), want)
    torch.testing.assert_close(pieces, whole)
