"""Formulas with a model's numbers put in are the costs that predictions use."""

import pytest
import sympy

from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.passes import PassTerms, decode_pass
from ridgeplan.roofline.symbolic import LETTERS, decode_formulas, symbol

SIZES = {"batch": 3, "context": 5000, "element_bytes": 2, "target_weight_bytes": 0.5625}
QUERIES = 4


@pytest.mark.parametrize(
    "model",
    ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3",
     "mistralai/Mistral-7B-v0.1"],
)  # fmt: skip
def test_numbers_in_formulas_are_the_costs(model: str) -> None:
    shape = load_shape(model)
    known = {symbol(name): getattr(shape, name) for name in LETTERS} | {symbol(k): v for k, v in SIZES.items()}
    known[sympy.Symbol("q", positive=True)] = QUERIES
    terms = PassTerms(
        batch=3, queries=QUERIES, quantized_tokens=0, full_tokens=5000, bits=0, group=1, splits=1,
        weight_bytes=0.5625, head_bytes=2, element_bytes=2,
    )  # fmt: skip
    costs = decode_pass(shape, terms)
    formulas = decode_formulas(shape)
    assert [one.op for one in formulas] == [op.name for op in costs]
    for one, op in zip(formulas, costs, strict=True):
        found = [float(term.subs(known)) for term in (one.launches, one.flops, one.read_bytes, one.write_bytes)]
        assert found == pytest.approx([op.launches, op.cost.flops, op.cost.read_bytes, op.cost.write_bytes])


def test_a_dense_model_s_formulas_are_letters() -> None:
    """Attention reads 2 D elements of every KV head and token: 2 D H_kv S e bytes a sequence."""
    (attention,) = (one for one in decode_formulas(load_shape("meta-llama/Llama-3.1-8B")) if one.op == "attention")
    batch, context, size, heads, dim = map(symbol, ("batch", "context", "element_bytes", "kv_heads", "head_dim"))
    assert sympy.diff(attention.read_bytes, context).equals(2 * batch * dim * heads * size)
