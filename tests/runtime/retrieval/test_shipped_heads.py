"""The retrieval heads that ship: small, of the model that they name, and used where no other is given."""

import pytest

from ridgeplan import runtime
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.plan.support import SHIPPED_HEADS
from ridgeplan.runtime.retrieval.head import load_head, shipped_heads

MAX_BYTES = 2 * 10**6


def test_shipped_heads_are_small_and_choose_once_for_all_layers_as_published():
    assert [path.stem for path in shipped_heads()] == ["smollm2-135m-instruct"]
    for path in shipped_heads():
        assert path.stat().st_size <= MAX_BYTES
        assert load_head(path).config.layers == 1
    assert tuple(load_shape(path.stem).name for path in shipped_heads()) == SHIPPED_HEADS


@pytest.mark.model
def test_specontext_runs_at_once_on_the_embedded_model(smollm2, long_text):
    """The head is recognized by the model's embedding."""
    workload = Workload("SmolLM2-135M-Instruct", "cpu", 600, 8)
    plan = preset("specontext-resident", workload)
    engine = runtime.load(plan, str(smollm2), device="cpu")
    tokens = engine.tokenizer(long_text[:10_000])["input_ids"][:600]
    assert len(engine.generate([tokens], 8).tokens[0]) == 8


def test_models_of_other_sizes_or_weights_have_none(tiny_model, make_plan):
    plan = make_plan(target="retrieval-head", target_budget=48)
    with pytest.raises(runtime.WorkloadError, match="none was given"):
        runtime.load(plan, tiny_model().folder, device="cpu")
    like = tiny_model(
        hidden_size=576, intermediate_size=96, num_hidden_layers=1, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    with pytest.raises(runtime.WorkloadError, match="none was given"):
        runtime.load(plan, like.folder, device="cpu")
