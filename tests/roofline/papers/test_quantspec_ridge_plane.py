"""QuantSpec's ridge planes for Llama-2-7B on an A6000 (Fig 2 and 5)."""

import numpy as np
import pytest

from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.validate.papers.quantspec_ridge_plane import decode_plane, prefill_plane

CONTEXTS, BATCHES = (1024, 4096, 16384, 65536, 262144), (1, 2, 4, 8, 16, 32, 64)


@pytest.fixture(scope="module")
def decode():
    return decode_plane(load_shape("Llama-2-7B"), load_hardware("a6000"), CONTEXTS, BATCHES)


def test_prefill_is_compute_bound_everywhere():
    plane = prefill_plane(load_shape("Llama-2-7B"), load_hardware("a6000"), CONTEXTS, BATCHES)
    assert not plane.memory_bound.any()


def test_decoding_is_memory_bound_everywhere(decode):
    assert decode.memory_bound.all()


def test_attention_intensity_ignores_the_batch_and_linear_intensity_follows_it(decode):
    assert np.ptp(decode.attention, axis=1) == pytest.approx(0, abs=1e-9)
    assert decode.linear[0, -1] > 50 * decode.linear[0, 0]


def test_attention_takes_over_with_context_and_with_batch(decode):
    share = decode.attention_share
    assert (np.diff(share, axis=0) > 0).all()
    assert (np.diff(share, axis=1) > 0).all()
    assert share[0, 0] < 0.1  # small batch, short context: the weights dominate
    assert share[-1, 0] > 0.85  # small batch, long context
    assert share[0, -1] > 0.5  # large batch, short context
    assert share[-1, -1] > 0.99


def test_attention_intensity_by_hand():
    """From 1 token to 1001: 501 on average, 32 heads of 128 in bf16, and the merge of a single split."""
    plane = decode_plane(load_shape("Llama-2-7B"), load_hardware("a6000"), (1,), (1,), new_tokens=1000)
    flops = 4 * 4096 * 501 + 2 * 4096
    partials = 32 * 129 * 4  # fp32, with a log-sum-exp; written and read
    moved_bytes = 2 * 4096 * 2 * 501 + 2 * 4096 * 2 + 2 * partials  # keys and values; query and output
    assert plane.attention[0, 0] == pytest.approx(flops / moved_bytes)


def test_a_pass_is_memory_bound_where_the_aggregate_is_though_its_linear_layers_are_not():
    plane = decode_plane(load_shape("Llama-2-7B"), load_hardware("a6000"), (262144,), (2048,))
    assert plane.linear[0, 0] > plane.ridge_point > plane.aggregate[0, 0]
    assert plane.memory_bound.all()
