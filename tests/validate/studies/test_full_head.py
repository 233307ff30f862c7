"""Heads of full width in the study: the target's features of the token before, and what is chosen by them."""

from dataclasses import replace

import pytest
import torch
import transformers

from ridgeplan import runtime
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.draft_selection import RetrievalHead
from ridgeplan.roofline.plan.plan import Plan, TargetAttention, Workload
from ridgeplan.runtime.errors import WorkloadError
from ridgeplan.runtime.retrieval.head import Head, HeadConfig, HeadWeights, probe_of, save_head
from ridgeplan.validate.studies.recorded import features_before, fused_layers
from ridgeplan.validate.studies.retrieval import Sizes, study


@pytest.fixture
def reference(tiny_folder):
    return transformers.AutoModelForCausalLM.from_pretrained(str(tiny_folder), dtype=torch.float32).eval()


def test_features_are_the_inputs_of_three_layers_one_token_late(tiny_folder, reference):
    engine = runtime.load(Plan(Workload("tiny", "cpu", 64, 16)), str(tiny_folder), device="cpu")
    tokens = torch.arange(5, 45)
    with torch.no_grad():
        states = reference(tokens[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[index][0] for index in fused_layers(reference.config.num_hidden_layers)], dim=-1)
    found = features_before(engine, tokens)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    torch.testing.assert_close(found[1:], expected[:-1], rtol=1e-3, atol=1e-4)


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
    for config, one in ((half, weights), (full, silent), (full, wide)):
        path = tmp_path / "head.safetensors"
        save_head(path, Head(config, one))
        asked = Sizes((600,), (300,), ("retrieval-head",), tokens=2)
        rows.append(next(study(str(tiny_folder), long_text, asked, str(path), device="cpu")))
    assert rows[0] == rows[1]
    assert rows[1].mass != rows[2].mass
    plan = Plan(Workload("tiny", "cpu", 64, 16), attention=TargetAttention(RetrievalHead(recent=8), 20))
    with pytest.raises(WorkloadError, match="needs the target's features; allowed here: one of embeddings alone"):
        runtime.load(plan, str(tiny_folder), device="cpu", retrieval_head=path).generate([1, 2, 3], 2)
