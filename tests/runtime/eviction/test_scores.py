"""Every policy against the whole matrix of attention probabilities, which the policies never form."""

from dataclasses import replace

import pytest
import torch

from ridgeplan.roofline.plan.policies.evictions import (
    DapQEviction,
    ExpectedAttentionEviction,
    H2OEviction,
    LaCacheEviction,
    OracleEviction,
    RandomEviction,
    SnapKVEviction,
    StreamingLLMEviction,
)
from ridgeplan.roofline.plan.policy import EVICTIONS
from ridgeplan.runtime.policies import SCORERS
from ridgeplan.runtime.policies import eviction_scorer as base
from ridgeplan.runtime.policies.eviction_scorer import PromptLayer, largest
from ridgeplan.runtime.policies.evictions import (
    DapQScorer,
    H2OScorer,
    LaCacheScorer,
    OracleScorer,
    RandomScorer,
    SnapKVScorer,
    StreamingLLMScorer,
)
from ridgeplan.runtime.policies.expected_attention import ExpectedAttentionScorer

TOKENS, APPENDED, BUDGET = 61, 8, 20
KV_HEADS, RATIO, DIM = 2, 3, 16
FREQUENCIES = 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))


def prompt_layer(index=0, layers=4, budget=BUDGET):
    generator = torch.Generator().manual_seed(7)

    def normal(*sizes):
        return torch.randn(sizes, generator=generator)

    total = TOKENS + APPENDED
    return PromptLayer(
        index=index,
        layers=layers,
        tokens=TOKENS,
        budget=budget,
        queries=2 * normal(total, KV_HEADS * RATIO, DIM) + normal(KV_HEADS * RATIO, DIM),
        keys=normal(KV_HEADS, total, DIM),
        values=normal(KV_HEADS, total, DIM),
        frequencies=FREQUENCIES,
    )


def probabilities(layer):
    """Causal attention of all tokens, float64 [kv_heads, ratio, queries, keys]."""
    queries = layer.queries.double().transpose(0, 1).unflatten(0, (KV_HEADS, RATIO))
    logits = queries @ layer.keys.double()[:, None].mT / DIM**0.5
    return logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)


def mass(layer, queries):
    """Probabilities of the prompt's keys, summed over a slice of queries, averaged over a group's heads."""
    return probabilities(layer)[:, :, queries, : layer.tokens].sum(2).mean(1)


def widest(scores, width):
    """The largest score among the `width` around each."""
    before, count = width // 2, scores.shape[1]
    windows = (slice(max(0, at - before), at - before + width) for at in range(count))
    return torch.stack([scores[:, window].amax(1) for window in windows], dim=1)


@pytest.fixture(params=[1, 1 << 24], ids=["a query at a time", "one block"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(base, "EVICTION_SCORE_ELEMENTS", request.param)


@pytest.mark.parametrize("pooling", [1, 2, 7])
def test_snapkv(pooling, blocks):
    layer = prompt_layer()
    scores = SnapKVScorer(SnapKVEviction(window=9, pooling=pooling)).scores(layer)
    before = mass(layer, slice(TOKENS - 9, TOKENS))[:, : TOKENS - 9]
    torch.testing.assert_close(scores[:, : TOKENS - 9].double(), widest(before, pooling), rtol=1e-5, atol=1e-7)
    assert scores[:, TOKENS - 9 :].isinf().all()


def test_snapkvs_window_is_at_most_the_budget():
    scores = SnapKVScorer(SnapKVEviction(window=32)).scores(prompt_layer(budget=5))
    assert scores.isinf().sum(1).tolist() == [5, 5]


@pytest.mark.parametrize("pooling", [1, 5])
def test_dapq(pooling, blocks):
    layer = prompt_layer()
    scores = DapQScorer(DapQEviction(pooling=pooling, recent=3)).scores(layer)
    attended = mass(layer, slice(TOKENS, None))
    expected = widest(attended, pooling)
    torch.testing.assert_close(scores[:, :-3].double(), expected[:, :-3], rtol=1e-5, atol=1e-7)
    assert scores[:, -3:].isinf().all()
    # Probabilities are over pseudo tokens too, so the prompt's do not add up to one per query.
    assert (attended.sum(1) < APPENDED).all()


def test_dapqs_pseudo_tokens_are_the_prompts_first_and_last():
    policy = DapQScorer(DapQEviction(prefix=2, suffix=3))
    assert policy.appended(torch.arange(10), 99).tolist() == [0, 1, 7, 8, 9]
    assert policy.appended(torch.tensor([5]), 99).tolist() == [5, 5]


@pytest.mark.parametrize("insert", [0.3, 1.0])
def test_dapqs_heads_are_joined_by_their_maximum_over_the_tokens_that_pseudo_queries_see(insert, blocks):
    layer, seen = prompt_layer(), round(insert * TOKENS)
    keys = torch.cat([layer.keys[:, :seen], layer.keys[:, TOKENS:]], dim=1)
    visible = replace(layer, tokens=seen, queries=torch.cat([layer.queries[:seen], layer.queries[TOKENS:]]), keys=keys)
    expected = probabilities(visible)[:, :, seen:, :seen].sum(2).amax(1)
    scores = DapQScorer(DapQEviction(heads="maximum", insert=insert)).scores(layer)
    torch.testing.assert_close(scores[:, :seen].double(), expected, rtol=1e-5, atol=1e-7)
    assert not scores[:, seen:].any()


def test_pseudo_tokens_are_drawn_as_their_content_says():
    prompt = torch.arange(100, 200)

    def drawn(content, seed=0, tokens=prompt):
        return DapQScorer(DapQEviction(content=content, seed=seed)).appended(tokens, 50).tolist()

    assert len(drawn("sampled")) == 32 and set(drawn("sampled")) <= set(range(100, 200))
    assert drawn("sampled") != sorted(drawn("sampled"))
    first = drawn("span")[0]
    assert drawn("span") == list(range(first, first + 32))
    assert drawn("span", tokens=prompt[:9]) == list(range(100, 109))
    assert set(drawn("vocabulary")) <= set(range(50)) and len(set(drawn("vocabulary"))) > 10
    assert drawn("fixed") == (drawn("vocabulary")[:7] * 5)[:32]
    for content in ("sampled", "span", "vocabulary", "fixed"):
        assert drawn(content) == drawn(content) != drawn(content, seed=1)


def test_the_oracle_scores_with_what_comes(blocks):
    layer, prompt, coming = prompt_layer(), torch.arange(TOKENS), torch.arange(100, 100 + APPENDED)
    oracle = OracleScorer(OracleEviction(coming=APPENDED))
    oracle.tell(range(TOKENS), range(100, 100 + 2 * APPENDED))
    oracle.tell(range(5), range(7))
    assert torch.equal(oracle.appended(prompt, 99), coming)
    torch.testing.assert_close(oracle.scores(layer).double(), mass(layer, slice(TOKENS, None)), rtol=1e-5, atol=1e-7)


def test_h2o(blocks):
    layer = prompt_layer()
    scores = H2OScorer(H2OEviction(recent_share=0.25)).scores(layer)
    recent = BUDGET // 4
    expected = mass(layer, slice(TOKENS))
    torch.testing.assert_close(scores[:, :-recent].double(), expected[:, :-recent], rtol=1e-5, atol=1e-6)
    assert scores[:, -recent:].isinf().all()


def test_expected_attention_is_the_mean_over_draws_of_coming_queries():
    """Monte Carlo: Gaussian queries, rotated by the mean of the coming rotations."""
    layer = prompt_layer()
    settings = ExpectedAttentionEviction(future=4, sinks=2)
    scores = ExpectedAttentionScorer(settings).scores(layer)
    angles = torch.arange(TOKENS)[:, None] * FREQUENCIES
    back = torch.polar(torch.ones_like(angles), -angles)
    pairs = torch.complex(*layer.queries[:TOKENS].chunk(2, dim=-1)) * back[:, None]
    plain = torch.cat([pairs.real, pairs.imag], dim=-1)[2:]  # [tokens, heads, channels], before rotation
    coming = torch.arange(TOKENS, TOKENS + 4)[:, None] * FREQUENCIES
    turn = torch.polar(torch.ones_like(coming), coming).mean(0)
    expected_scores = torch.empty(KV_HEADS, TOKENS)
    for head in range(KV_HEADS):
        logits = []
        for query_head in range(head * RATIO, (head + 1) * RATIO):
            queries_of_head = plain[:, query_head]
            torch.manual_seed(query_head)
            gaussian = torch.distributions.MultivariateNormal(
                queries_of_head.mean(0), queries_of_head.T.cov(correction=0)
            )
            drawn = torch.complex(*gaussian.sample((200_000,)).chunk(2, dim=-1)) * turn
            drawn = torch.cat([drawn.real, drawn.imag], dim=-1)
            keys = layer.keys[head, 2:TOKENS]
            logits.append((drawn @ keys.T / DIM**0.5).logsumexp(0).softmax(-1))
        expected_scores[head, 2:] = torch.stack(logits).mean(0) * layer.values[head, 2:TOKENS].norm(dim=-1)
    torch.testing.assert_close(scores[:, 2:], expected_scores[:, 2:], rtol=0.2, atol=0.02)
    assert scores[:, :2].isinf().all()


def test_yarns_factor_on_the_queries_counts_once():
    """Layers hold queries with the factor, and so do the coming ones: it cancels."""
    scores, scaled = (
        ExpectedAttentionScorer(ExpectedAttentionEviction(future=4)).scores(replace(prompt_layer(), rotary_scale=scale))
        for scale in (1.0, 1.4)
    )
    torch.testing.assert_close(scaled, scores)


@pytest.mark.parametrize(("budget", "sinks"), [(BUDGET, 4), (5, 4), (4, 3), (2, 1)])
def test_streamingllm_keeps_sinks_and_at_least_the_latest(budget, sinks):
    layer = prompt_layer(budget=budget)
    places = largest(StreamingLLMScorer(StreamingLLMEviction(sinks=4)).scores(layer), budget)
    assert places.tolist() == [[*range(sinks), *range(TOKENS - budget + sinks, TOKENS)]]


def test_lacaches_layers_keep_different_rungs_that_cover_the_ladder():
    """41 tokens lie between 4 sinks and 16 recent ones, of which each of 5 layers keeps 10 of one ladder."""
    policy, covered = LaCacheScorer(LaCacheEviction(sinks=4, recent_share=16 / 30, ladders=1)), set()
    starts = []
    for index in range(5):
        places = largest(policy.scores(prompt_layer(index, 5, budget=30)), 30)[0].tolist()
        assert places[:4] == [0, 1, 2, 3]
        assert places[-16:] == list(range(TOKENS - 16, TOKENS))
        rung = places[4:-16]
        assert rung == list(range(rung[0], rung[0] + 10))
        starts.append(rung[0])
        covered.update(rung)
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (4, TOKENS - 16 - 10)
    assert covered == set(range(4, TOKENS - 16))


def test_lacaches_ladder_repeats():
    policy = LaCacheScorer(LaCacheEviction(sinks=0, recent_share=0, ladders=3))
    places = torch.tensor(largest(policy.scores(prompt_layer(0, 4, budget=12)), 12)[0].tolist())
    assert (places.diff() > 1).sum() == 2  # three runs


def test_random_choices_differ_by_head_and_layer_but_not_by_run():
    def kept(seed, index):
        return largest(RandomScorer(RandomEviction(seed=seed)).scores(prompt_layer(index)), BUDGET)

    assert torch.equal(kept(3, 0), kept(3, 0))
    assert not torch.equal(kept(3, 0), kept(3, 1))
    assert not torch.equal(kept(3, 0), kept(4, 0))
    assert not torch.equal(kept(3, 0)[0], kept(3, 0)[1])


def test_of_equal_scores_the_latest_stay():
    scores = torch.tensor([[1.0, 5.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert largest(scores, 3).tolist() == [[1, 2, 3], [2, 3, 4]]


def test_the_runtime_has_the_policies_that_the_planner_says():
    assert {name for name, policy in EVICTIONS.items() if policy.executable} == set(SCORERS)


def test_random_choices_of_neighboring_seeds_and_layers_are_not_the_same():
    """Seed 0 must not choose in layer 1 what seed 1 chooses in layer 0."""
    scorers = [RandomScorer(RandomEviction(seed=seed)) for seed in range(4)]
    drawn = [scorer.scores(prompt_layer(index)) for scorer in scorers for index in range(4)]
    assert len({tuple(scores.flatten().tolist()) for scores in drawn}) == 16
