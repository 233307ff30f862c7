"""Sampled speculative output follows the target's own distribution, across a flush of the quantized cache."""

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from ridgeplan import runtime
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.sampling import SamplingParams

VOCAB = 16
ROWS = 1500
PROMPT = 94  # the cache flushes at 96, so the tokens compared come from before and after it
SPARSE = {"ratio": 0.1, "floor": 0, "sinks": 2, "recent": 8}
SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@torch.inference_mode()
def exact_joint(engine, prompt, sampling):
    """The target's own probability of each triple of tokens after the prompt, [vocab, vocab, vocab]."""
    first, second = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB)).T
    cache, rows = engine.cache, VOCAB * VOCAB
    cache.reset(rows)
    logits = [prefill(engine.decoder, engine.weights, cache, row, prompt) for row in range(rows)]
    joint = sampling.choice(logits[0]).probabilities()[first]

    def after(tokens):
        logits = engine.decoder.step(engine.weights, cache, tokens[:, None], cache.target_metadata(1))
        cache.advance(torch.ones(rows, dtype=torch.int32))
        return sampling.choice(logits[:, 0]).probabilities()

    joint = joint * after(first).gather(1, second[:, None])[:, 0]
    return (joint[:, None] * after(second)).view(VOCAB, VOCAB, VOCAB).double()


def pooled_chi_square(counts, probabilities):
    """p-value with all cells of fewer than 5 expected counts pooled into one."""
    expected = probabilities.flatten() / probabilities.sum() * counts.sum()
    counts = counts.flatten().double()
    small = expected < 5
    assert counts[expected == 0].sum() == 0
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    kept = expected > 0
    return stats.chisquare(observed[kept].numpy(), expected[kept].numpy()).pvalue


@pytest.mark.parametrize(
    "kv, gamma, drafts, options, gammas",
    [
        ("int4x2", 3, {"draft_bits": 4}, {"temperature": 1.0}, None),
        ("int4x2", 2, {}, {"temperature": 1.3, "top_k": 9}, None),
        ("bf16+int4", 3, {"draft_bits": 4}, {"temperature": 0.7, "top_p": 0.9}, None),
        *(("int4x2", 2, {"selection": name} | SPARSE, {"temperature": 1.0, "seed": 6}, None)
          for name in ("streamingllm", "snapkv", "quest", "specextend", "specattn", "progressive", "oracle",
                       "clusterkv", "shadowkv")),
        ("bf16", 2, {"selection": "specattn", "draft_bits": 4} | SPARSE, {"temperature": 0.7, "top_p": 0.9}, None),
        ("int4x2", 3, {"draft_bits": 4}, {"temperature": 1.0}, (1, 2, 0)),  # gamma changes from round to round
        ("int4x2", 3, {"selection": "specattn"} | SPARSE, {"temperature": 1.0}, (1, 3, 0)),
    ],
)  # fmt: skip
def test_sampled_triples_follow_the_target(
    kv, gamma, drafts, options, gammas, tiny_model, make_plan, prompts, monkeypatch
):
    folder = tiny_model(**SMALL).folder
    [prompt] = prompts(PROMPT, vocab=VOCAB)
    plain = runtime.load(make_plan(kv, batch=VOCAB * VOCAB), folder)
    joint = exact_joint(plain, torch.tensor(prompt), SamplingParams(**options))
    assert joint.sum() == pytest.approx(1)
    engine = runtime.load(make_plan(kv, gamma, batch=ROWS, **drafts), folder)
    if gammas:
        order = cycle(gammas)
        schedule = SimpleNamespace(next=lambda: next(order), add=lambda gamma, rows: None)
        monkeypatch.setattr(engine, "_schedule", lambda request: schedule)
    result = engine.generate([prompt] * ROWS, 3, SamplingParams(**{"seed": 5} | options))
    assert 0.2 < result.statistics.acceptance < 1  # drafts differ, so acceptance is really at work
    tokens = torch.tensor(result.tokens)
    counts = torch.zeros(VOCAB, VOCAB, VOCAB).index_put(tuple(tokens.T), torch.ones(ROWS), accumulate=True)
    for axes in [(1, 2), (0, 2), (0, 1)]:
        assert pooled_chi_square(counts.sum(axes), joint.sum(axes)) > 1e-3
    assert pooled_chi_square(counts.sum(0), joint.sum(0)) > 1e-3
    assert pooled_chi_square(counts, joint) > 1e-3


def test_the_chi_square_notices_a_small_bias():
    probabilities = torch.full((VOCAB,), 1 / VOCAB)
    counts = torch.full((VOCAB,), 100.0)
    counts[0] += 80
    assert pooled_chi_square(counts, probabilities) < 1e-3
