"""Recorded queries and attention against transformers, and that passes leave no trace."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.runtime import WorkloadError, load
from ridgeplan.validate.studies.recorded import RecordedPrompt, attention_weights

PROMPT, MORE = 100, 40
TEXT = torch.randint(256, (PROMPT + MORE,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def engine(tiny_folder):
    return load(Plan(Workload("tiny", "cpu", PROMPT, MORE)), str(tiny_folder), device="cpu")


@pytest.fixture(scope="module")
def recorded(engine):
    return RecordedPrompt(engine, TEXT[:PROMPT])


@pytest.fixture(scope="module")
def reference(tiny_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model, model(torch.tensor([TEXT]), output_attentions=True, output_hidden_states=True)


def grouped(attentions):
    """transformers' weights of every layer, mean over the two query heads of a KV head: [layers, tokens, 2, keys]."""
    return torch.stack([attention[0].unflatten(0, (2, 2)).mean(1).transpose(0, 1) for attention in attentions])


def test_attention_is_transformers(recorded, reference):
    expected = grouped(reference[1].attentions)
    attention = recorded.ask(TEXT[PROMPT:], PROMPT, attention=True).attention
    assert attention.shape == (2, MORE, 2, PROMPT)
    assert torch.allclose(attention, expected[:, PROMPT:, :, :PROMPT], atol=1e-4)
    last = recorded.last(20, TEXT[:PROMPT]).attention
    assert torch.allclose(last, expected[:, PROMPT - 20 : PROMPT, :, :PROMPT], atol=1e-4)


def test_queries_before_rope_are_the_projections(recorded, engine, reference):
    model, output = reference
    queries = recorded.ask(TEXT[PROMPT:], PROMPT).before_rope(engine.decoder)
    for index, layer in enumerate(model.model.layers):
        with torch.inference_mode():
            expected = layer.self_attn.q_proj(layer.input_layernorm(output.hidden_states[index]))[0, PROMPT:]
        assert torch.allclose(queries[index].flatten(1), expected, atol=1e-3)


def test_tokens_at_other_positions_are_rotated_by_those(recorded, engine):
    right, wrong = (recorded.ask(TEXT[PROMPT : PROMPT + 5], start) for start in (PROMPT, 7))
    assert wrong.positions.tolist() == [7, 8, 9, 10, 11]
    # The first layer's queries depend on the tokens alone before RoPE, and on their positions after it.
    before = [positions_of_tokens.before_rope(engine.decoder)[0] for positions_of_tokens in (right, wrong)]
    assert torch.allclose(*before, atol=1e-4)
    assert (right.queries[0] - wrong.queries[0]).abs().max() > 0.1


def test_passes_leave_no_trace(recorded, engine):
    tokens = TEXT[PROMPT : PROMPT + 20]
    first = recorded.ask(tokens, PROMPT, attention=True)
    recorded.ask(tokens[::-1], 0)
    recorded.last(30, TEXT[:PROMPT])
    again = recorded.ask(tokens, PROMPT, attention=True)
    assert torch.equal(first.queries, again.queries)
    assert torch.equal(first.attention, again.attention)
    assert int(engine.cache.lengths[0]) == PROMPT


def test_attention_weights_by_hand():
    # One channel, scale 1. Scores of the last two tokens over three keys (0, ln 2, ln 3) are these times the query.
    keys = torch.log(torch.tensor([[[1.0], [2.0], [3.0]]]))
    queries = torch.tensor([[[1.0], [0.0]], [[1.0], [1.0]]])
    weights = attention_weights(queries, keys)
    # First token sees two keys: (1/3, 2/3) and (1/2, 1/2), mean (5/12, 7/12); the second sees all: (1/6, 2/6, 3/6).
    assert torch.allclose(weights[0, 0], torch.tensor([5 / 12, 7 / 12, 0.0]))
    assert torch.allclose(weights[1, 0], torch.tensor([1 / 6, 2 / 6, 3 / 6]))


def test_closed_engines_and_sliding_windows_are_refused(tiny_folder, engine, monkeypatch):
    closed = load(Plan(Workload("tiny", "cpu", PROMPT, MORE)), str(tiny_folder), device="cpu", weights=engine.weights)
    monkeypatch.setattr(closed.decoder, "config", SimpleNamespace(windows=(None, 64)))
    with pytest.raises(WorkloadError, match="sliding windows"):
        RecordedPrompt(closed, TEXT[:PROMPT])
    closed.close()
    with pytest.raises(WorkloadError, match="the engine is closed"):
        RecordedPrompt(closed, TEXT[:PROMPT])
