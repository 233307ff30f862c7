"""QuantSpec's Table 1, derived from the exact costs."""

import pytest
import sympy

from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.passes import PassTerms, decode_pass
from ridgeplan.roofline.symbolic import symbol
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
    found = table_1()[column]
    for derived, expected in zip((found.flops, found.bytes, found.intensity), TABLE_1[column], strict=True):
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
    found = categories(decode_pass(load_shape("Llama-3.1-8B"), terms))
    assert found["linear"].flops == 2 * 6_979_321_856
    assert found["attention"].flops == 32 * (4 * 4096 * 100 + 2 * 4096)
    assert found["aggregate"] == found["linear"] + found["attention"]


def test_dominated_monomials_and_coefficients_go():
    assert leading_terms(7 * B * S * d + 3 * S * d + 2 * d**2 + 5) == B * S * d + d**2
