"""Requests and the sequences that they grow."""

import pytest
import torch

from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.request import Request, SequenceState
from ridgeplan.runtime.sampling import SamplingParams


def sequence(limit=5, stops=()):
    return SequenceState(prompt_tokens=3, limit=limit, stop_token_ids=frozenset(stops))


def test_a_sequence_grows_to_its_limit():
    row = sequence(limit=5)
    assert row.extend([7, 8, 9]) == [7, 8, 9]
    assert (row.left, row.done) == (2, False)
    assert row.extend([10, 11, 12]) == [10, 11]
    assert (row.tokens, row.left, row.done) == ([7, 8, 9, 10, 11], 0, True)
    assert row.extend([13]) == []


def test_a_stop_token_is_kept_and_ends_the_sequence():
    row = sequence(stops=[9])
    assert row.extend([7, 9, 8]) == [7, 9]
    assert (row.stopped, row.left, row.done) == (True, 0, True)
    assert row.extend([8]) == []
    assert row.tokens == [7, 9]


def test_the_first_token_may_be_a_stop_token():
    row = sequence(stops=[9, 4])
    assert row.extend([4]) == [4]
    assert row.done


@pytest.mark.parametrize(
    "prompts",
    [
        [1, 2],
        [[1, 2]],
        ((1, 2),),
        torch.tensor([1, 2]),
        torch.tensor([[1, 2]]),
        [torch.tensor([1, 2])],
    ],
)
def test_one_prompt_comes_in_many_forms(prompts):
    request = Request.build(prompts, 4, None)
    assert request.prompts == ((1, 2),)
    assert request.sampling == SamplingParams()  # greedy


def test_a_request_is_as_long_as_its_longest_sequence():
    assert Request.build([[1], [1, 2, 3], [1, 2]], 4, None).longest == 7


def test_tokens_are_those_of_the_vocabulary():
    workload = Workload("m", "h200", 8, new_tokens=4)
    Request.build([0, 9], 4, None).check(workload, vocab=10)
    for token in (-1, 10):
        with pytest.raises(WorkloadError, match=f"a token of prompt 1 is {token}"):
            Request.build([0, token], 4, None).check(workload, vocab=10)
