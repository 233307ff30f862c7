"""Prefill: what the cost model assumes of it, and its attention against the definition."""

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.model.prefill_layer import attend_in_place, causal_attention

TOKENS = 50


@pytest.fixture(params=[16, 8], ids=["grouped", "wide"])
def qkv(request, monkeypatch):
    """Queries [6, tokens, 16] of two query heads a KV head; keys and values [3, tokens, 16].

    Their heads are as wide as a library takes in groups, or wider.
    """
    monkeypatch.setattr("ridgeplan.runtime.model.prefill_layer.MAX_GROUPED_HEAD_DIM", request.param)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(heads, TOKENS, 16, generator=generator) for heads in (6, 3, 3)]


def attention_of(q, keys, values, window):
    """Token by token: softmax(q k / sqrt(16)) over the token itself and those before it, `window` in all."""
    out = torch.empty_like(q)
    for head in range(6):
        for token in range(TOKENS):
            seen = slice(max(0, token + 1 - window), token + 1)
            weights = (keys[head // 2, seen] @ q[head, token] / 4).softmax(0)
            out[head, token] = weights @ values[head // 2, seen]
    return out


@pytest.mark.parametrize("window", [None, 1, 7, 25, 49, 50, 51])
def test_tokens_see_themselves_and_a_window_before_them(qkv, window):
    torch.testing.assert_close(causal_attention(*qkv, window), attention_of(*qkv, window or TOKENS))


@pytest.mark.parametrize("count", [1, 7, 49])
def test_the_last_tokens_alone_see_all_before_them(qkv, count):
    """Queries of the last tokens of a text only, also where their heads attend one after another."""
    q, keys, values = qkv
    expected = attention_of(q, keys, values, TOKENS)[:, -count:]
    torch.testing.assert_close(causal_attention(q[:, -count:], keys, values, None), expected)
    queries = q[:, -count:].transpose(0, 1).clone()
    attend_in_place(queries, keys, values, None, count)
    torch.testing.assert_close(queries.transpose(0, 1), expected)


@pytest.mark.parametrize("attended", [1, 49, 50, 100, 1000])
@pytest.mark.parametrize("window", [None, 7])
def test_heads_may_attend_one_after_another(qkv, attended, window, monkeypatch):
    """Also where the prompt alone is longer than what may attend at once."""
    monkeypatch.setattr("ridgeplan.runtime.model.prefill_layer.PREFILL_ATTENDED_TOKENS", attended)
    q, keys, values = qkv
    queries = q.transpose(0, 1).clone()
    attend_in_place(queries, keys, values, window, TOKENS)
    torch.testing.assert_close(queries.transpose(0, 1), attention_of(*qkv, window or TOKENS))


def test_what_stands_behind_the_prompt_keeps_its_queries(qkv):
    q, keys, values = qkv
    queries = q.transpose(0, 1).clone()
    attend_in_place(queries, keys, values, None, 47)
    torch.testing.assert_close(queries[:47].transpose(0, 1), attention_of(*qkv, TOKENS)[:, :47])
    assert torch.equal(queries[47:].transpose(0, 1), q[:, 47:])


@pytest.mark.parametrize("chunks", [1, 2])
def test_layers_of_a_text_of_one_chunk_share_its_positions(chunks, tiny_model, make_plan, monkeypatch):
    """Those of two rotary embeddings; of several chunks each layer makes its own, so that they take no memory."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip(kinds, (1e4, 1e6), strict=False)}
    model = tiny_model("gemma3_text", num_hidden_layers=3, layer_types=kinds, sliding_window=512, rope_parameters=rope)
    engine, rotaries = runtime.load(make_plan(), model.folder, device="cpu"), []
    layers, layer_rotary = len(engine.config.layers), Decoder.layer_rotary
    assert layers > len(engine.config.rotaries) == 2
    monkeypatch.setattr(Decoder, "layer_rotary", lambda *given: rotaries.append(given[1]) or layer_rotary(*given))
    with torch.inference_mode():
        prefill(engine.decoder, engine.weights, engine.cache, 0, torch.arange(TOKENS), TOKENS // chunks)
    assert len(rotaries) == (2 if chunks == 1 else chunks * layers)
