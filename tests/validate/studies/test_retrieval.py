"""The study of selections: figures counted by hand, and what a run on a tiny model must show whatever its weights."""

from dataclasses import replace

import pytest
import torch
import transformers

from ridgeplan import runtime
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Plan, PlanError, TargetAttention, Workload
from ridgeplan.roofline.plan.policies.selections import RetrievalHead
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.policies.base import TokenIndex
from ridgeplan.runtime.retrieval.head import Head, HeadConfig, HeadWeights, probe_of, save_head
from ridgeplan.validate.studies.recorded import features_before, fused_layers
from ridgeplan.validate.studies.retrieval import METHODS, MODEL, RECENT, RetrievalSizes, compared, mask_of, study

UNTRAINED = tuple(name for name in METHODS if not name.startswith("retrieval"))


def test_figures_of_one_step_by_hand():
    """Of 4 top tokens 0, 2, 4 and 399, head 0 reads three and head 1 one; 2 and 4 are neither sinks nor recent."""
    top, read = torch.zeros(2, 400, dtype=torch.bool), torch.zeros(2, 400, dtype=torch.bool)
    top[:, [0, 2, 4, 399]] = True
    read[0, [0, 2, 399, 7]] = True
    read[1, 4] = True
    weights = torch.zeros(2, 400)
    weights[:, [2, 4]] = torch.tensor([0.25, 0.75])
    (comparison,) = compared(read[None], top[None], weights, torch.tensor([1]))
    assert comparison.tolist() == [(3 / 4 + 1 / 4) / 2, (1 / 2 + 1 / 2) / 2, (0.25 + 0.75) / 2]
    top[:, [2, 4]] = False
    assert compared(read[None], top[None], weights, torch.tensor([1]))[0, 1].isnan()  # none that is distant


def test_an_index_list_as_a_mask():
    index = torch.tensor([[[1, 3, 9], [0, 7, 7]]], dtype=torch.int32)
    count = torch.tensor([[2, 1]], dtype=torch.int32)
    mask = mask_of(TokenIndex(index, count), 2, 8)
    assert [row.nonzero().flatten().tolist() for row in mask] == [[1, 3], [0]]
    pages = mask_of(TokenIndex(index[:, :1], count[:, :1], page=2), 2, 7)
    assert [row.nonzero().flatten().tolist() for row in pages] == [[2, 3, 6], [2, 3, 6]]


@pytest.fixture(scope="module")
def rows(tiny_folder, long_text):
    sizes = RetrievalSizes((600,), (256, 520), UNTRAINED, tokens=3)
    report = study(str(tiny_folder), long_text, sizes, device="cpu")
    return {(row.method, row.budget): row for row in report}


def test_what_holds_for_any_model(rows):
    assert {method for method, _ in rows} == {*UNTRAINED, MODEL}
    for (method, budget), row in rows.items():
        assert 0 < row.hit <= 1 and 0 < row.mass <= 1.0001 and 0 <= row.overlap <= 1, method
        assert row.hit <= rows[MODEL, budget].hit == 1
        if method != "shadowkv":  # which reads its outliers beside the budget
            assert row.mass <= rows[MODEL, budget].mass + 1e-4, "no set of a size has more attention than the top one"
        assert len(row.by_layer) == 2
    for method in set(UNTRAINED) - {"shadowkv"}:
        assert rows[method, 520].hit > rows[method, 256].hit, "more is found with more tokens"
    assert rows["progressive", 256].hit > rows["random", 256].hit, "2-bit keys know something of the keys"
    assert rows["streamingllm", 256].overlap == 1


def test_what_cannot_be_studied_is_named(tiny_folder, long_text):
    with pytest.raises(PlanError, match="context is 256; allowed: more than 256, the smallest budget"):
        RetrievalSizes((256, 600))
    with pytest.raises(PlanError, match="budget at a context of 600 is 255; allowed: 256 to 599"):
        RetrievalSizes((600,), (2 * RECENT - 1,))
    with pytest.raises(PlanError, match="method is 'guess'; allowed: retrieval-head, retrieval-batch"):
        RetrievalSizes(methods=("guess",))
    with pytest.raises(WorkloadError, match="methods of a retrieval head need one"):
        next(study(str(tiny_folder), long_text, RetrievalSizes((600,), (256,))))


@pytest.mark.model
def test_the_head_that_ships_is_studied_where_no_other_is_given(smollm2, long_text):
    row, _ = study(str(smollm2), long_text, RetrievalSizes((600,), (300,), ("retrieval-batch",), tokens=2))
    assert row.method == "retrieval-batch" and 0 < row.hit < 1


# Heads of full width in the study: the target's features of the token before, and what is chosen by them.


@pytest.fixture
def reference(tiny_folder):
    return transformers.AutoModelForCausalLM.from_pretrained(str(tiny_folder), dtype=torch.float32).eval()


def test_features_are_the_inputs_of_three_layers_one_token_late(tiny_folder, reference):
    engine = runtime.load(Plan(Workload("tiny", "cpu", 64, 16)), str(tiny_folder), device="cpu")
    tokens = torch.arange(5, 45)
    with torch.no_grad():
        states = reference(tokens[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[index][0] for index in fused_layers(reference.config.num_hidden_layers)], dim=-1)
    features = features_before(engine, tokens)
    assert torch.equal(features[0], torch.zeros_like(features[0]))
    torch.testing.assert_close(features[1:], expected[:-1], rtol=1e-3, atol=1e-4)


def test_the_layers_of_eagle_3():
    """Llama-3.1-8B's 32 layers, and a model too small for three of them."""
    assert fused_layers(32) == (2, 16, 29)
    assert fused_layers(2) == (1, 1, 0)


def test_a_full_head_is_studied_by_its_features(tiny_folder, reference, long_text, tmp_path):
    """Without what its features give it chooses as its embedding's half does, with it otherwise; plans refuse it."""
    shape, rows = load_shape(str(tiny_folder)), []
    hidden, generator = shape.hidden, torch.Generator().manual_seed(2)
    sizes = (shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    q, k = (torch.randn(size, 2 * hidden, generator=generator) for size in sizes)
    half = HeadConfig(
        model="tiny", hidden=hidden, vocab=shape.vocab, q_heads=shape.q_heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, context=2048,
    )  # fmt: skip
    probe = probe_of(reference.get_input_embeddings().weight.detach())
    weights = HeadWeights(torch.ones(hidden), q[:, :hidden].contiguous(), k[:, :hidden].contiguous(), probe)
    wide = replace(
        weights, q=q, k=k, feature_norm=torch.ones(hidden), fc=torch.randn(hidden, 3 * hidden, generator=generator)
    )
    silent = replace(wide, feature_norm=torch.zeros(hidden))
    full = replace(half, inputs="full")
    for config, head_weights in ((half, weights), (full, silent), (full, wide)):
        path = tmp_path / "head.safetensors"
        save_head(path, Head(config, head_weights))
        question = RetrievalSizes((600,), (300,), ("retrieval-head",), tokens=2)
        rows.append(next(study(str(tiny_folder), long_text, question, str(path), device="cpu")))
    assert rows[0] == rows[1]
    assert rows[1].mass != rows[2].mass
    plan = Plan(Workload("tiny", "cpu", 64, 16), attention=TargetAttention(RetrievalHead(recent=8), 20))
    with pytest.raises(WorkloadError, match="needs the target's features; allowed here: one of embeddings alone"):
        runtime.load(plan, str(tiny_folder), device="cpu", retrieval_head=path).generate([1, 2, 3], 2)
