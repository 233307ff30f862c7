"""QuantSpec's Table 1, derived from the exact costs."""

import numpy as np
import pytest
import sympy

from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.passes import PassTerms, decode_pass
from ridgeplan.roofline.symbolic import symbol
from ridgeplan.validate.papers.quantspec_ridge_plane import decode_plane, prefill_plane
from ridgeplan.validate.papers.quantspec_table1 import categories, leading_terms, table_1

B, S, d, k = (symbol(name) for name in ("batch", "context", "hidden", "new_tokens"))

TABLE_1 = {
    ("prefill", "linear"): (B * S * d**2, B * S * d + d**2, B * S * d / (B * S + d)),
    ("prefill", "attention"): (B * S**2 * d, B * S * d, S),
    ("prefill", "aggregate"): (B * S * d**2 + B * S**2 * d, B * S * d + d**2, B * S * (S + d) / (B * S + d)),
    ("decode", "linear"): (k * B * d**2, k * (B * d + d**2), B * d / (B + d)),
    ("decode", "attention"): (k * B * S * d, k * B * S * d, 1),
    ("decode", "aggregate"): (k * (B * d**2 + B * S * d), k * (B * S * d + d**2), B * (S + d) / (B * S + d)),
}


@pytest.mark.parametrize("column", TABLE_1, ids=" ".join)
def test_every_column_of_table_1(column):
    column_values = table_1()[column]
    for derived, expected in zip(
        (column_values.flops, column_values.bytes, column_values.intensity), TABLE_1[column], strict=True
    ):
        assert sympy.simplify(derived - expected) == 0


def test_decode_intensity_does_not_grow_with_context_and_prefill_does():
    decode, prefill = (table_1()[phase, "aggregate"].intensity for phase in ("decode", "prefill"))
    assert sympy.limit(decode, S, sympy.oo) == 1
    assert sympy.limit(prefill, S, sympy.oo) == sympy.oo
    assert sympy.limit(decode.subs(S, 1), d, sympy.oo) == B  # short contexts: the batch


def test_categories_leave_out_the_head():
    """Llama-3.1-8B: 2 FLOPs for each of 6,979,321,856 parameters of 32 layers, and attention over 100 tokens."""
    terms = PassTerms(
        batch=1, queries=1, quantized_tokens=0, full_tokens=100, bits=0, group=128, splits=1,
        weight_bytes=2, head_bytes=2, element_bytes=2,
    )  # fmt: skip
    shape = categories(decode_pass(load_shape("Llama-3.1-8B"), terms))
    assert shape["linear"].flops == 2 * 6_979_321_856
    assert shape["attention"].flops == 32 * (4 * 4096 * 100 + 2 * 4096)
    assert shape["aggregate"] == shape["linear"] + shape["attention"]


def test_dominated_monomials_and_coefficients_go():
    assert leading_terms(7 * B * S * d + 3 * S * d + 2 * d**2 + 5) == B * S * d + d**2


# QuantSpec's ridge planes for Llama-2-7B on an A6000 (Fig 2 and 5).

CONTEXTS, BATCHES = (1024, 4096, 16384, 65536, 262144), (1, 2, 4, 8, 16, 32, 64)


@pytest.fixture(scope="module")
def decode():
    return decode_plane(load_shape("Llama-2-7B"), load_hardware("a6000"), CONTEXTS, BATCHES)


def test_prefill_is_compute_bound_everywhere():
    plane = prefill_plane(load_shape("Llama-2-7B"), load_hardware("a6000"), CONTEXTS, BATCHES)
    assert not (plane.aggregate < plane.ridge_point).any()


def test_decoding_is_memory_bound_everywhere(decode):
    assert (decode.aggregate < decode.ridge_point).all()


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
    assert (plane.aggregate < plane.ridge_point).all()
