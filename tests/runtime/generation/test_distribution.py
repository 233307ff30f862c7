"""Sampled speculative output follows the target's own distribution, across a flush of the quantized cache."""

import functools
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from ridgeplan import runtime
from ridgeplan.roofline.plan.plan import Drafter
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.sampling import SamplingParams

VOCAB = 16
ROWS, FEWER_ROWS = 1000, 450  # the fewer are of each selection; the counts of all selections are added
SELECTIONS = (
    "streamingllm", "snapkv", "quest", "specextend", "specattn", "progressive", "oracle", "clusterkv", "shadowkv",
)  # fmt: skip
PROMPT = 94  # the cache flushes at 96, so the tokens compared come from before and after it
SPARSE = {"ratio": 0.1, "floor": 0, "sinks": 2, "recent": 8}
SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@torch.inference_mode()
def exact_joint(engine, prompt, sampling):
    """The target's own probability of each triple of tokens after the prompt, [vocab, vocab, vocab]."""
    cache = engine.cache
    cache.reset(VOCAB)  # a row for each first token
    logits = [prefill(engine.decoder, engine.weights, cache, row, prompt) for row in range(VOCAB)]

    def after(tokens):
        logits = engine.decoder.step(
            engine.weights, cache, tokens[:, None], AttentionMetadataBuilder(cache).target_metadata(1)
        )
        return sampling.choice(logits[:, 0]).probabilities()

    first = sampling.choice(logits[0]).probabilities()
    second = after(torch.arange(VOCAB))
    cache.advance(torch.ones(VOCAB, dtype=torch.int32))
    third = [after(torch.full((VOCAB,), token)) for token in range(VOCAB)]  # each takes the place of the one before
    return (first[:, None, None] * second[:, :, None] * torch.stack(third, dim=1)).double()


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
        pytest.param("int4x2", 3, {"draft_bits": 4}, {"temperature": 1.0}, None, marks=pytest.mark.slow),
        pytest.param("int4x2", 2, {}, {"temperature": 1.3, "top_k": 9}, None, marks=pytest.mark.slow),
        ("bf16+int4", 3, {"draft_bits": 4}, {"temperature": 0.7, "top_p": 0.9}, None),
        pytest.param(
            "bf16", 2, {"selection": "specattn", "draft_bits": 4} | SPARSE, {"temperature": 0.7, "top_p": 0.9}, None,
            marks=pytest.mark.slow,
        ),
        # Matches of one token, so that almost every row has proposals; to the target, and to two passes of drafts.
        pytest.param(
            "int4x2", 3, {"drafter": Drafter("suffix", 3, min_match=1)}, {"temperature": 0.7, "top_p": 0.9}, None,
            marks=pytest.mark.slow,
        ),
        ("int4x2", 4, {"drafter": Drafter("suffix", 2, 2, 1), "draft_bits": 4}, {"temperature": 1.3, "top_k": 9}, None),
        # A head, to the target and to two passes of drafts.
        pytest.param(
            "bf16", 3, {"drafter": Drafter("head", 3)}, {"temperature": 0.7, "top_p": 0.9}, None,
            marks=pytest.mark.slow,
        ),
        ("int4x2", 4, {"drafter": Drafter("head", 2, 2, window=16)}, {"temperature": 1.3, "top_k": 9}, None),
        # Gamma changes from round to round.
        pytest.param("int4x2", 3, {"draft_bits": 4}, {"temperature": 1.0}, (1, 2, 0), marks=pytest.mark.slow),
        ("int4x2", 3, {"selection": "specattn", "draft_bits": 4} | SPARSE, {"temperature": 1.0}, (1, 3, 0)),
    ],
)  # fmt: skip
def test_sampled_triples_follow_the_target(
    kv, gamma, drafts, options, gammas, tiny_model, draft_head, make_plan, prompts, monkeypatch
):
    model = tiny_model(**SMALL)
    folder = model.folder
    if "drafter" in drafts and drafts["drafter"].trained:
        drafts = drafts | {"drafter_head": draft_head(model)}
    [prompt] = prompts(PROMPT, vocab=VOCAB)
    joint = target_joint(make_plan(kv, batch=VOCAB * VOCAB), folder, prompt, options)
    rows = ROWS // 2 if "drafter" in drafts else ROWS
    engine = runtime.load(make_plan(kv, gamma, batch=rows, **drafts), folder)
    if gammas:
        order = cycle(gammas)
        schedule = SimpleNamespace(next=lambda: next(order), add=lambda gamma, rows: None)
        monkeypatch.setattr(engine, "_schedule", lambda request: schedule)
    require_agreement(triples(engine, prompt, rows, {"seed": 5} | options), joint)


@pytest.mark.slow
def test_sampled_triples_follow_the_target_whatever_drafts_read(tiny_model, make_plan, prompts):
    """Selections differ in their drafts alone: each has counts of its own, and all must come from one distribution."""
    folder = tiny_model(**SMALL).folder
    [prompt] = prompts(PROMPT, vocab=VOCAB)
    joint = target_joint(make_plan("int4x2", batch=VOCAB * VOCAB), folder, prompt, {"temperature": 1.0})
    together = torch.zeros(VOCAB, VOCAB, VOCAB)
    for seed, name in enumerate(SELECTIONS):
        engine = runtime.load(make_plan("int4x2", 2, batch=FEWER_ROWS, selection=name, **SPARSE), folder)
        counts = triples(engine, prompt, FEWER_ROWS, {"temperature": 1.0, "seed": seed})
        for axes in [(1, 2), (0, 2), (0, 1)]:
            assert pooled_chi_square(counts.sum(axes), joint.sum(axes)) > 1e-3, name
        together += counts
    require_agreement(together, joint)


def test_sampled_triples_follow_the_target_where_drafts_read_nothing(nonsense, tiny_model, make_plan, prompts):
    folder, options = tiny_model(**SMALL).folder, {"temperature": 1.0}
    [prompt] = prompts(PROMPT, vocab=VOCAB)
    joint = target_joint(make_plan("int4x2", batch=VOCAB * VOCAB), folder, prompt, options)
    engine = runtime.load(make_plan("int4x2", 2, batch=ROWS, selection=nonsense), folder)
    require_agreement(triples(engine, prompt, ROWS, options | {"seed": 3}), joint)


def target_joint(plan, folder, prompt, options):
    return _target_joint(plan, folder, tuple(prompt), tuple(options.items()))


@functools.cache
def _target_joint(plan, folder, prompt, options):
    joint = exact_joint(runtime.load(plan, folder), torch.tensor(prompt), SamplingParams(**dict(options)))
    assert joint.sum() == pytest.approx(1)
    return joint


def triples(engine, prompt, rows, options):
    """How often each triple of tokens was sampled after the prompt, [vocab, vocab, vocab]."""
    result = engine.generate([prompt] * rows, 3, SamplingParams(**options))
    figures, proposes = result.statistics, engine.plan.speculation.drafter.active
    assert (0.02 if proposes else 0.2) < figures.acceptance < 1  # drafts differ, so acceptance is really at work
    assert (0 < figures.proposal_acceptance < 1 and figures.hit_rate > 0.3) == proposes
    assert not engine.plan.speculation.drafter.cascades or 1.02 < figures.drafts_per_pass < 3
    tokens = torch.tensor(result.tokens)
    return torch.zeros(VOCAB, VOCAB, VOCAB).index_put(tuple(tokens.T), torch.ones(rows), accumulate=True)


def require_agreement(counts, joint):
    """Each token alone, the last two, and all three."""
    for axes in [(1, 2), (0, 2), (0, 1), (0,), ()]:
        summed = (counts.sum(axes), joint.sum(axes)) if axes else (counts, joint)
        assert pooled_chi_square(*summed) > 1e-3


def test_the_chi_square_notices_a_small_bias():
    probabilities = torch.full((VOCAB,), 1 / VOCAB)
    counts = torch.full((VOCAB,), 100.0)
    counts[0] += 80
    assert pooled_chi_square(counts, probabilities) < 1e-3
