"""Draft policies: a registry of what can run, and when the speculator asks them."""

from types import SimpleNamespace

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.plan.plan import DraftCodes, KVCache, KVFormat, Plan, Speculation, Workload
from ridgeplan.roofline.plan.policy import SELECTIONS, make_selection
from ridgeplan.roofline.plan.support import missing_execution
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.policies import SELECTORS, token_selector
from ridgeplan.runtime.policies.base import AllTokensSelector, SparseSelector, TokenSelector
from ridgeplan.runtime.policies.clusterkv import k_means
from ridgeplan.runtime.policies.ranked import VerificationSelector, prompt_scores


def test_the_registry_holds_what_the_planner_takes_for_executable():
    def executable(kind):
        plan = Plan(Workload("m", "h", 64), kv=KVCache("int4x2"), speculation=Speculation(2, "full", kind()))
        return not missing_execution(plan)

    assert set(SELECTORS) == {name for name, kind in SELECTIONS.items() if executable(kind)}


def test_a_policy_chooses_for_every_draft_of_a_round(tiny_model, make_plan, prompts, monkeypatch):
    calls = []

    class Watched(AllTokensSelector):
        def draft_metadata(self, ahead, queries=1):
            metadata = super().draft_metadata(ahead, queries)
            calls.append((ahead, metadata.positions.tolist()))
            return metadata

    monkeypatch.setitem(SELECTORS, "all", Watched)
    engine = runtime.load(make_plan("int4x2", 3), tiny_model().folder, device="cpu")
    rounds = engine.generate(prompts(50), 6).statistics.rounds
    assert len(calls) == 3 * rounds
    assert calls[:3] == [(0, [[50]]), (1, [[51]]), (2, [[52]])]
    assert torch.tensor([ahead for ahead, _ in calls]).view(rounds, 3).eq(torch.arange(3)).all()


# What plans are told can be executed, and what the runtime has.


def test_drafts_are_executed_by_the_policies_that_say_so() -> None:
    assert {name for name, policy in SELECTIONS.items() if policy.executable} == set(SELECTORS)


def test_every_policy_of_the_runtime_has_the_plans_name() -> None:
    for name, make in SELECTORS.items():
        assert isinstance(make, type), name
        assert issubclass(make, TokenSelector), name
        assert make.__name__ == f"{SELECTIONS[name].__name__}Selector"


# What sparse policies select, on values counted by hand: budgets, sinks, recent tokens, scores, and what grows old.

SHAPE = ModelShape(
    name="m", architecture="llama", layers=2, hidden=32, q_heads=4, kv_heads=2, head_dim=8, intermediate=32, vocab=16,
    max_context=512,
)  # fmt: skip


def made(name, lengths, kv="bf16", codes="full", **options):
    """A policy and its cache of 200 tokens, in groups of 32, with random keys and rows of these lengths."""
    config = KVCacheConfig(
        len(lengths),
        200,
        KVFormat(kv),
        32,
        3,
        DraftCodes(codes),
        draft_planes=codes == "upper" or name == "progressive",
    )
    cache = Cache(SHAPE, config, torch.device("cpu"), torch.float32)
    cache.reset(len(lengths))
    cache.lengths.copy_(torch.tensor(lengths))
    cache.keys.copy_(torch.randn(cache.keys.shape, generator=torch.Generator().manual_seed(0)))
    selection = make_selection(name, **({"floor": 0, "sinks": 2, "recent": 10} | options)).among_all
    policy = token_selector(selection, AttentionMetadataBuilder(cache))
    policy.start()
    if isinstance(policy, VerificationSelector):
        policy.scored.copy_(cache.lengths)
    return policy, cache


def chosen(index, row=0, head=0):
    return index.index[row, head, : index.count[row, head]].tolist()


@pytest.mark.parametrize(
    "length, options, old, budget",
    [
        (100, {"ratio": 0.25}, 90, 15),  # 25 of 100 tokens, of which 10 are recent
        (100, {"ratio": 0.251}, 90, 16),  # rounded up
        (100, {"ratio": 0.05}, 90, 2),  # less than the recent ones: the sinks remain
        (100, {"ratio": 0.05, "floor": 40}, 90, 30),
        (100, {"ratio": 0.05, "floor": 400}, 90, 90),  # more than there are
        (8, {"ratio": 0.5}, 0, 0),  # all are recent
    ],
)
def test_budgets_hold_the_recent_tokens_and_the_sinks(length, options, old, budget):
    policy, _ = made("specattn-weights", [length], **options)
    assert (policy.old_tokens().tolist(), policy.budget().tolist()) == ([old], [budget])


def test_tokens_in_codes_are_old_and_the_rest_is_recent():
    """100 tokens hold 2 groups of 32 as codes and 36 in full precision, which leave 4 of 40."""
    for kv, codes in (("int4x2", "upper"), ("bf16+int4", "upper"), ("int8", "full")):
        policy, _ = made("specattn-weights", [100], kv, codes, ratio=0.4)
        assert (policy.old_tokens().tolist(), policy.budget().tolist()) == ([64], [4])
        metadata = policy.draft_metadata(1)
        assert (metadata.end - metadata.begin).tolist() == [36 + 2]  # with the first draft's token and its own
        assert metadata.groups.tolist() == [2]
    policy, _ = made("specattn-weights", [100], ratio=0.4)
    metadata = policy.draft_metadata(1)
    assert (metadata.begin.tolist(), metadata.end.tolist(), metadata.groups) == ([90], [102], None)


def test_sets_of_a_round_are_the_best_by_the_sum_over_heads_with_the_sinks():
    policy, _ = made("specattn-weights", [60, 30], ratio=0.25)  # 5 of 50, and 2 of 20
    policy.scores.fill_(0.0)
    policy.scores[1, 0, 0, [20, 31]] = torch.tensor([3.0, 9.0])
    policy.scores[1, 0, 1, [20, 40, 55]] = torch.tensor([3.0, 4.0, 99.0])  # 55 is recent
    policy.before_drafts()
    query = torch.zeros(2, 1, 4, 8)
    assert chosen(policy.select(1, query)) == [0, 1, 20, 31, 40]
    assert chosen(policy.select(1, query), row=1) == [0, 1]
    assert policy.select(1, query).index.shape[1] == 1


def test_a_set_for_each_head_follows_its_own_scores():
    policy, _ = made("specattn-weights", [60], ratio=0.22, per_kv_head=True)  # 4 of 50
    policy.scores.fill_(0.0)
    policy.scores[0, 0, 0, [20, 31]] = 1.0
    policy.scores[0, 0, 1, [7, 8]] = 1.0
    policy.before_drafts()
    index = policy.select(0, torch.zeros(1, 1, 4, 8))
    assert (chosen(index), chosen(index, head=1)) == ([0, 1, 20, 31], [0, 1, 7, 8])


def test_old_tokens_without_a_score_are_read_beside_the_budget():
    policy, _ = made("specattn-weights", [60], ratio=0.25, per_kv_head=True)  # 5 of 50
    policy.scores[:, :, :, :40] = torch.arange(40.0)
    policy.scored.fill_(40)
    policy.before_drafts()
    query = torch.zeros(1, 1, 4, 8)
    assert chosen(policy.select(0, query)) == [0, 1, 37, 38, 39]
    assert policy.draft_metadata(0).begin.tolist() == [40]
    policy.target_metadata(4)  # scores all 60
    policy.scores[:, :, :, :60] = torch.arange(60.0)
    policy.before_drafts()
    assert chosen(policy.select(0, query)) == [0, 1, 47, 48, 49]


def test_specattn_as_published_reads_the_prefix_tokens_of_eq_3_and_what_came_since():
    """7 of 60 prefix tokens by the mean logit of the verification's first and last query over all query heads."""
    selection = {"ratio": 7 / 64, "sinks": 0, "recent": 0}
    policy, cache = made("specattn", [60], **selection)
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(1, 5, 4, 8, generator=generator)
    keys = cache.keys[1, 0, :, :60]
    request = policy.target_metadata(5).scores(1)
    assert (request.rows, request.what) == ("ends", "logits")
    logits = torch.einsum("qhd,hnd->qhn", queries[0], keys.repeat_interleave(2, 0))
    request.out[0, :, :60] = logits[[0, -1]].unflatten(1, (2, 2)).sum((0, 2))
    request.out[0, :, 60:65] = -1e3  # verifications leave scores of their own tokens, too
    cache.lengths.fill_(64)  # four of the five are accepted
    policy.before_drafts()
    eq_3 = logits[[0, -1]].mean((0, 1)).topk(7).indices.sort().values.tolist()
    assert chosen(policy.select(1, queries[:, :1])) == eq_3
    metadata = policy.draft_metadata(0)
    assert (metadata.begin.tolist(), metadata.end.tolist()) == ([60], [65])  # of the accepted four and the next draft


@pytest.mark.parametrize(
    "name, options, sets",
    [
        ("specextend", {"page": 1}, ([0, 1, 22], [0, 1, 23])),
        ("specextend", {"page": 1, "rows": "last"}, ([0, 1, 23], [0, 1, 23])),
        ("specattn", {"rows": "accepted", "sinks": 0}, ([20, 21, 22], [21, 22, 23])),
    ],
)
def test_rejected_tokens_do_not_score(name, options, sets):
    """Two of three drafts were accepted in the first row, and all in the second: queries 2 and 3 are the last ones."""
    policy, _ = made(name, [60, 60], ratio=13 / 60, **options)  # ten of 13 tokens are recent
    policy.scores.zero_()
    for query in range(4):
        by_query = policy.scores if policy.rows == "each" else policy.scores[:, :, :, None]
        if policy.rows == "each" or query == 3:
            by_query[:, :, :, query if policy.rows == "each" else 0, 20 + query] = 1.0 + query
    policy.after_verification(torch.tensor([2, 3]))
    policy.before_drafts()
    index = policy.select(1, torch.zeros(2, 1, 4, 8))
    assert (chosen(index), chosen(index, row=1)) == sets


def test_pages_are_ranked_by_their_mean():
    policy, _ = made(
        "specextend", [84], ratio=0.5, page=16, rows="last"
    )  # 64 old tokens in 4 pages, of which 22 tokens: 2 pages
    policy.scores.fill_(0.0)
    policy.scores[0, 0, 0, 16:32] = 1.0
    policy.scores[0, 0, 0, 33] = 15.0
    policy.before_drafts()
    index = policy.select(0, torch.zeros(1, 1, 4, 8))
    assert (chosen(index), index.page) == ([0, 1], 16)
    assert policy.old_tokens().tolist() == [64]
    assert policy.draft_metadata(0).begin.tolist() == [64]


def test_verification_is_asked_for_the_rows_and_scores_of_the_plan():
    for options, rows, what in (
        ({}, "ends", "probabilities"),
        ({"rows": "all", "score": "logits"}, "all", "logits"),
    ):
        policy, _ = made("specattn-weights", [60], **options)
        request = policy.target_metadata(4).scores(1)
        assert (request.rows, request.what) == (rows, what)
        assert request.out.data_ptr() == policy.scores[1].data_ptr()
    policy, _ = made("specextend", [60], rows="last")
    assert (policy.target_metadata(4).scores(0).rows, policy.scores.shape) == ("last", (2, 1, 2, policy.candidates))
    for name in ("specextend", "specattn"):
        policy, _ = made(name, [60], rows="accepted")
        request = policy.target_metadata(4).scores(1)
        assert (request.rows, request.out.data_ptr()) == ("each", policy.scores[1].data_ptr())
        assert policy.scores.shape == (2, 1, 2, 4, policy.candidates)
    for name in ("streamingllm", "quest", "snapkv", "oracle"):
        assert made(name, [60])[0].target_metadata(4).scores is None


def test_a_window_is_one_run_in_full_precision_and_an_index_of_codes():
    policy, _ = made("streamingllm", [100], ratio=0.3)
    policy.before_round()
    assert policy.draft_metadata(0).begin.tolist() == [72]  # 28 latest tokens beside 2 sinks
    assert chosen(policy.select(0, None)) == [0, 1]
    policy, _ = made("streamingllm", [100], "int4x2", "upper", ratio=0.42)  # 42 tokens, 36 of them in the buffer
    policy.before_round()
    assert chosen(policy.select(0, None)) == [0, 1, 60, 61, 62, 63]


def test_prompt_scores_are_the_attention_of_its_last_queries():
    generator = torch.Generator().manual_seed(1)
    queries, keys = (torch.randn(sizes, generator=generator) for sizes in ((3, 4, 8), (2, 20, 8)))
    expected = torch.zeros(2, 20)
    for place, query in enumerate(queries):  # the tokens 17, 18 and 19
        for head in range(4):
            seen = keys[head // 2, : 18 + place]
            expected[head // 2, : 18 + place] += torch.softmax(seen @ query[head] / 8**0.5, 0)
    positions = torch.arange(-20, 0)[None]
    torch.testing.assert_close(prompt_scores(queries, keys, positions, "probabilities"), expected)
    logits = torch.einsum("whd,hnd->hn", queries.unflatten(1, (2, 2)).sum(2), keys) / 8**0.5
    torch.testing.assert_close(prompt_scores(queries, keys, positions, "logits"), logits)


def test_verification_continues_from_the_log_sum_exps_of_the_prompts_last_token():
    policy, _ = made("specattn-weights", [60, 60])
    generator = torch.Generator().manual_seed(1)
    queries, keys = (torch.randn(sizes, generator=generator) for sizes in ((1, 4, 8), (2, 20, 8)))
    policy.after_prefill(1, 1, queries, keys, torch.arange(-20, 0)[None])
    expected = torch.zeros(2, 4)
    for head in range(4):
        expected[1, head] = (keys[head // 2] @ queries[0, head] / 8**0.5).exp().sum().log()
    torch.testing.assert_close(policy.target_metadata(4).scores(1).lse, expected)
    assert (policy.target_metadata(4).scores(0).lse == 0).all()


def test_an_oracles_scores_are_exact_probabilities():
    """Of each of the two query heads of a KV head, those of all tokens it sees add up to one."""
    policy, cache = made("oracle", [40])
    query = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(3))
    seen = int(AttentionMetadataBuilder(cache).draft_metadata(0).end[0])
    scores = policy.query_scores(0, query)[..., :seen]
    torch.testing.assert_close(scores.sum(2), torch.full((1, 2), 2.0))


def test_queries_score_what_an_eviction_left_before_them():
    """Of 20 tokens, one head keeps 3, 17 and 19, the other 18 and 19; the queries are of tokens 17, 18 and 19."""
    kept = [[3, 17, 19], [18, 19, 19]]
    generator = torch.Generator().manual_seed(1)
    queries, keys = (torch.randn(sizes, generator=generator) for sizes in ((3, 2, 8), (2, 3, 8)))
    scores = prompt_scores(queries, keys, torch.tensor(kept) - 20, "probabilities")
    expected = torch.zeros(2, 3)
    for head, places in enumerate(kept):
        for token, query in zip((17, 18, 19), queries[:, head], strict=True):
            seen = [index for index, place in enumerate(places) if place <= token]
            if seen:
                expected[head, seen] += torch.softmax(keys[head, seen] @ query / 8**0.5, 0)
    torch.testing.assert_close(scores, expected)


def test_a_prompts_set_stays_and_what_grows_old_joins_it():
    policy, cache = made("snapkv", [60], ratio=0.25, window=1, pooling=3)
    keys = torch.zeros(2, 60, 8)
    keys[:, :3] = -1.0  # the sinks stay, though they are attended least
    keys[:, 30] = 10.0  # pooled over its neighbours
    policy.after_prefill(0, 0, torch.ones(1, 4, 8), keys, torch.arange(-60, 0)[None])
    for length, joined in ((60, []), (63, [50, 51, 52])):
        cache.lengths.fill_(length)
        policy.before_round()
        assert chosen(policy.select(0, None)) == [0, 1, 29, 30, 31, *joined]


@pytest.mark.parametrize("kv, codes", [("bf16", "full"), ("bf16+int4", "upper"), ("int4x2", "upper")])
def test_bounds_of_a_page_are_those_of_its_keys_when_it_grows_old(kv, codes):
    """At 95 tokens one group is old; the next token makes it two, and the bounds are already there."""
    policy, cache = made("quest", [95], kv, codes, ratio=0.5, page=16)
    policy.before_round()
    first = 0 if kv == "int4x2" else 32
    keys = cache.keys[:, :, :, first : first + 32].clone()
    cache.advance(torch.ones(1, dtype=torch.int32))
    assert policy.old_tokens().tolist() == [64]
    for half in range(2):
        page = keys[:, :, :, 16 * half : 16 * half + 16]
        torch.testing.assert_close(policy.bounds[:, :, :, 2 + half, 0], page.amin(3))
        torch.testing.assert_close(policy.bounds[:, :, :, 2 + half, 1], page.amax(3))


def test_every_query_and_head_chooses_for_itself():
    """A key that one head's query points at is chosen by it alone, and is found by its 2-bit key too."""
    for name, kv, codes in (("oracle", "bf16", "full"), ("oracle", "int8", "full"), ("progressive", "int8", "full")):
        policy, cache = made(name, [40], kv, codes, ratio=0.6)  # 42 of 70 tokens, of which 38 are recent
        prompt = 0.1 * torch.randn(2, 70, 8, generator=torch.Generator().manual_seed(2))
        prompt[0, 20], prompt[1, 9] = 3.0, 3.0
        for layer in range(2):
            cache.store_prompt(layer, 0, prompt, prompt)
        cache.finish_prompt(0, 70)
        policy.before_round()
        policy.draft_metadata(0)
        index = policy.select(1, torch.ones(1, 1, 4, 8))
        for head, expected in ((0, 20), (1, 9)):
            chosen_tokens = chosen(index, head=head)
            assert len(chosen_tokens) == 4, name
            assert {0, 1, expected} <= set(chosen_tokens), name


def test_k_means_finds_directions_and_their_means():
    """Three directions of different lengths in turn: a cluster each, whose centroid is the mean of its keys."""
    directions = torch.eye(8)[:3]
    lengths = 1 + torch.arange(30) / 10
    keys = (directions.repeat(10, 1) * lengths[:, None])[None]
    centroids, labels = k_means(keys, 3)
    assert [len(set(labels[0, cluster::3].tolist())) for cluster in range(3)] == [1, 1, 1]
    assert len(set(labels[0, :3].tolist())) == 3
    for cluster in range(3):
        torch.testing.assert_close(centroids[0, labels[0, cluster]], directions[cluster] * lengths[cluster::3].mean())


def test_tokens_score_as_their_clusters():
    """40 tokens point at the query, and the others do not; what grows old joins the cluster that is most like it."""
    policy, cache = made("clusterkv", [64], ratio=0.9, cluster=32)
    keys = torch.zeros(2, 160, 8)
    keys[..., 1] = 1.0
    keys[:, 20:60, 0], keys[:, 20:60, 1] = 1.0, 0.0
    policy.after_prefill(0, 0, torch.ones(1, 4, 8), keys[:, :64], torch.arange(-64, 0)[None])
    query = torch.zeros(1, 1, 4, 8)
    query[..., 0] = 1.0
    scores = policy.query_scores(0, query)[0, 0]
    assert (scores[20:60] == 1).all() and (scores[:20] == 0).all()
    cache.keys[0, 0, :, 64:96] = query[0, 0, 0]  # the group that grows old after 127 tokens
    cache.lengths.fill_(120)
    policy.before_round()
    assert (policy.query_scores(0, query)[0, 0, 64:96] == 1).all()
    cache.keys[0, 0, :, 64:96, :2] = torch.tensor([-1.0, -2.0])  # nearer to the query's cluster, though unlike both
    policy.before_round()
    assert policy.centroids.shape[3] > policy.clusters[0] == 2
    assert (policy.query_scores(0, query)[0, 0, 64:96] == 1).all()


@pytest.mark.parametrize("outliers", [0, 1, 3])
def test_outliers_are_read_beside_the_budget(outliers):
    """24 tokens of 128 leave 3 chunks when 32 recent ones are read, whatever the number of outliers."""
    policy, _ = made("shadowkv", [128], floor=56, ratio=0.01, outliers=outliers)
    policy.after_prefill(0, 0, torch.ones(1, 4, 8), torch.randn(2, 128, 8), torch.arange(-128, 0)[None])
    policy.draft_metadata(0)
    scores = policy.query_scores(0, torch.randn(1, 1, 4, 8))
    assert scores[0, :, :12].isinf().sum(1).tolist() == [outliers, outliers]
    selected = policy.select(0, torch.randn(1, 1, 4, 8))
    assert selected.count.tolist() == [[3 + outliers] * 2]
    flagged = policy.outlier[0, 0].nonzero()
    assert {tuple(pair) for pair in flagged.tolist()} <= {
        (head, page) for head in range(2) for page in selected.index[0, head, : 3 + outliers].tolist()
    }


def test_landmarks_are_means_and_outliers_come_first():
    """Chunk 2 holds one key that its mean describes badly; chunk 5 has the largest mean along the query."""
    policy, _ = made("shadowkv", [64], ratio=0.5, outliers=1)
    keys = torch.zeros(2, 64, 8)
    keys[..., 1] = 1.0
    keys[:, 16] = torch.tensor([0, -1.0, 0, 0, 0, 0, 0, 0])
    keys[:, 40:48, 0] = torch.arange(8.0)
    policy.after_prefill(0, 0, torch.ones(1, 4, 8), keys, torch.arange(-64, 0)[None])
    query = torch.zeros(1, 1, 4, 8)
    query[..., 0] = 1.0
    policy.draft_metadata(0)
    scores = policy.query_scores(0, query)[0, 0, :8]
    assert scores.tolist() == [0, 0, torch.inf, 0, 0, 3.5, 0, 0]


@pytest.mark.parametrize(("sinks", "chosen"), [(0, [3, 5]), (1, [0, 5]), (17, [0, 1])])
def test_pages_of_sinks_are_chosen_before_better_ones(sinks: int, chosen: list[int]) -> None:
    selector = SimpleNamespace(selection=SimpleNamespace(sinks=sinks), max_budget=32)
    scores = torch.tensor([[[0.0, 1.0, 2.0, 8.0, 3.0, 9.0]]])
    lengths, k = torch.tensor([6], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    index, count = SparseSelector.top_pages(selector, scores, 16, (lengths, k))
    assert sorted(index[0, 0].tolist()) == chosen
    assert count.tolist() == [[2]]
