"""What a request may ask of sampling, and what it then draws from."""

import pytest
import torch

from ridgeplan.kernels.sampling.reference import Greedy
from ridgeplan.runtime.errors import ModelError, WorkloadError
from ridgeplan.runtime.sampling import SamplingParams, all_finite, require_finite

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 0.0], [3.0, -1.0, -2.0, 3.0]])


def test_temperature_zero_is_greedy_and_takes_the_first_of_equals():
    choice = SamplingParams(top_k=2, top_p=0.5).choice(LOGITS)
    assert isinstance(choice, Greedy)
    assert choice.best.tolist() == [1, 0]


def test_all_numbers_of_a_request_reach_the_distribution():
    weights = LOGITS[0].div(0.5).exp()
    expected = torch.tensor([0, weights[1], weights[2], 0]) / (weights[1] + weights[2])
    # Of the three likeliest, the two likeliest hold 98 percent.
    actual = SamplingParams(0.5, top_k=3, top_p=0.95).choice(LOGITS[0]).probabilities()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
def test_extreme_temperatures_still_are_distributions(temperature):
    probabilities = SamplingParams(temperature).choice(torch.tensor([80.0, -80.0, 79.0])).probabilities()
    expected = [1, 0, 0] if temperature < 1 else [0.33512, 0.32980, 0.33508]  # exp(l / T), normalized
    torch.testing.assert_close(probabilities, torch.tensor(expected).float(), atol=1e-5, rtol=0)
    assert probabilities.sum().item() == pytest.approx(1)


def test_a_graph_serves_what_its_constants_do_not_tell_apart():
    params = SamplingParams(0.5, top_k=3, top_p=0.95, seed=7, stop_token_ids=[1])
    assert params.graph_key == SamplingParams(0.5, top_k=3, top_p=0.95).graph_key
    others = SamplingParams(0.6, top_k=3, top_p=0.95), SamplingParams(0.5, top_k=4, top_p=0.95), SamplingParams(0.5, 3)
    assert len({params.graph_key, *(other.graph_key for other in others)}) == 4


def test_the_ends_of_the_ranges_are_allowed():
    full = SamplingParams(1.0, top_k=1, top_p=1.0, seed=2**63 - 1, stop_token_ids=[0])
    assert SamplingParams(1.0, top_p=1.0).choice(LOGITS[0]).probabilities().gt(0).all()
    assert full.choice(LOGITS[0]).probabilities().tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": 1e-310}, "temperature is 1e-310; allowed: 0, which is greedy, or 0.0001 to 10000"),
        ({"temperature": 0.99e-4}, "temperature is 9.9e-05"),
        ({"temperature": 10001}, "temperature is 10001"),
        ({"temperature": 10**400}, "temperature is a huge number"),
        ({"top_p": 10**400}, "top_p is a huge number"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": True}, "seed is True"),
        ({"stop_token_ids": 2}, "stop_token_ids is 2; allowed: several token ids"),
        ({"stop_token_ids": ["</s>"]}, "a stop token is '</s>'; allowed: a whole number 0 or more"),
    ],
)
def test_sampling_refuses_what_it_cannot_mean(values, message):
    with pytest.raises(WorkloadError, match=message) as caught:
        SamplingParams(**values)
    assert "allowed" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_finite_without_nan_and_with_a_finite_peak(dtype):
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, 2.0], [-inf, 2.0], [nan, 2.0], [1.0, nan], [1.0, inf], [-inf, -inf]]
    assert all_finite(torch.tensor(rows, dtype=dtype)).tolist() == [True, True, False, False, False, False]


def test_the_first_sequence_that_is_not_finite_is_named():
    require_finite([True, True])
    with pytest.raises(ModelError, match="NaN or infinite for sequence 1"):
        require_finite([True, False, False])
