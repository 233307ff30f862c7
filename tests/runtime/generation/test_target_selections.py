"""Targets that read only what a policy selects: one model whatever rounds are, and the dense one with room enough."""

import functools
from dataclasses import replace

import pytest
import torch
from grids import pairs

from ridgeplan import runtime
from ridgeplan.roofline.plan.policy import make_selection
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.policies.base import SparseSelector
from ridgeplan.runtime.policies.retrieval_head import RetrievalHeadSelector
from ridgeplan.runtime.retrieval.head import load_head
from ridgeplan.runtime.speculation.sparse_target import SparseTargetAttention

LENGTHS, NEW = [120, 45, 85], 24  # with groups of 32: a flush of every row
SELECTIONS = {
    "streamingllm": {"recent": 6},
    "quest": {},
    "oracle": {},
    "retrieval-head": {"recent": 6},
    "clusterkv": {"cluster": 8},
    "shadowkv": {"outliers": 1},
    "progressive": {},
}
CACHES = ("int8", "bf16", "bf16+int4")
# 2-bit keys are those of codes, which a bf16 cache has none of.
CASES = [case for case in pairs([*SELECTIONS], CACHES, always=0) if case.values[:2] != ("progressive", "bf16")]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(agreeable=True)


@pytest.fixture(scope="module")
def engine_of(model, make_plan, head_file):
    """Engines of plans whose target reads `budget` tokens, with two sinks."""
    path = head_file(model)

    def make(kv, name="all", budget=0, gamma=0, **options):
        options_of_target = {} if name == "all" else SELECTIONS[name] | {"sinks": 2}
        plan = make_plan(
            kv, gamma, batch=3, target=name, target_budget=budget, target_options=options_of_target, **options
        )
        needs = "retrieval-head" in (name, options.get("selection"))
        return runtime.load(plan, model.folder, device="cpu", retrieval_head=path if needs else None)

    return make


@pytest.fixture(scope="module")
def generated(engine_of, prompts):
    """Tokens of a plan, generated once."""

    @functools.cache
    def run(*question, **options):
        return engine_of(*question, **options).generate(prompts(*LENGTHS), NEW)

    return run


@pytest.mark.parametrize("name, kv", CASES)
def test_rounds_change_nothing(kv, name, generated):
    """Each query of a verification chooses as if its token were decoded alone."""
    plain, drafted = generated(kv, name, 48), generated(kv, name, 48, 3)
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.accepted > 0
    assert drafted.tokens != generated(kv).tokens  # the budget does leave something out


@pytest.mark.parametrize("name, kv", CASES)
def test_a_budget_of_every_token_is_the_dense_target(kv, name, generated, engine_of, prompts):
    """Bit for bit where it covers all that a sequence may have; in a long cache by the same tokens."""
    (prompt,), after = prompts(70), list(range(40))
    dense, chosen = (engine_of(kv, *reads).teacher_forced_logits([prompt], [after])[0] for reads in ((), (name, 256)))
    assert torch.equal(dense, chosen)
    assert generated(kv, name, 255).tokens == generated(kv).tokens


@pytest.mark.parametrize("name", ["streamingllm", "retrieval-head", "quest"])
def test_sparse_drafts_of_a_target_that_selects(name, generated):
    options = {"selection": name, "ratio": 0.2, "floor": 8, "sinks": 2}
    drafted = generated("int4x2", "quest", 64, 3, **options)
    assert drafted.tokens == generated("int4x2", "quest", 64).tokens
    assert drafted.statistics.accepted > 0


@pytest.mark.parametrize("kv", CACHES)
def test_a_head_chooses_for_drafts_of_a_dense_target(kv, generated):
    """Drafts never forward the last one of a round that is all accepted; the head knows its key all the same."""
    options = {"selection": "retrieval-head", "floor": 8, "sinks": 2, "recent": 6}
    few, every = (generated(kv, gamma=3, **options, ratio=ratio) for ratio in (0.2, 1.0))
    assert few.tokens == every.tokens == generated(kv).tokens
    assert every.statistics.accepted == generated(kv, gamma=3, codes=None).statistics.accepted


KEEPING = ("quest", "clusterkv", "shadowkv")


@pytest.mark.parametrize("kv, name", [("bf16", name) for name in KEEPING] + [("int8", "quest"), ("int8", "clusterkv")])
def test_generated_tokens_are_read_whole_beside_the_budget(kv, name, generated, engine_of, prompts, monkeypatch):
    """Of a prompt as many tokens as the budget has, and ShadowKV's outliers; of a short prompt all, as if dense."""
    engine, budget, calls = engine_of(kv, name, 48), 48, []
    inner = SparseSelector.read

    def checked(self, layer, query, metadata, chosen):
        for row in range(len(query)):
            prompt, length = LENGTHS[row], int(self.cache.lengths[row]) + 1
            coded = 0 if metadata.groups is None else int(metadata.groups[row]) * 32
            run = set(range(coded + int(metadata.begin[row]), coded + int(metadata.end[row])))
            for head in range(2):
                pages = chosen.index[row, head, : chosen.count[row, head]].tolist()
                listed = {page * chosen.page + token for page in pages for token in range(chosen.page)}
                assert len(listed) == len(pages) * chosen.page and not listed & run
                read = listed | run
                assert max(read) < length and set(range(prompt, length)) <= read
                extra = 8 if name == "shadowkv" and prompt >= 64 else 0
                rounding = chosen.page - 1
                floor = prompt - prompt_old(prompt) + min(prompt_old(prompt), 2)  # recent tokens, and sinks
                assert max(min(prompt, budget), floor) <= len(read & set(range(prompt))) - extra
                assert len(read & set(range(prompt))) - extra <= max(min(prompt, budget), floor) + rounding
                calls.append(len(read))
        return inner(self, layer, query, metadata, chosen)

    monkeypatch.setattr(SparseSelector, "read", checked)
    tokens = engine.generate(prompts(*LENGTHS), NEW).tokens
    assert len(calls) > 100
    assert tokens[1] == generated(kv).tokens[1]  # 45 tokens of prompt are within the budget (SpeContext, 7.2.2)


def prompt_old(tokens, group=32):
    """Tokens of a prompt that are old."""
    return max(0, tokens // group - 1) * group


def test_generated_tokens_may_compete_for_the_budget(model, make_plan, prompts):
    """With `keep_generated` off a long output is read in part, whatever the prompt's length."""
    tokens = []
    for keep in (True, False):
        options = {"sinks": 2, "keep_generated": keep}
        plan = make_plan("bf16", target="quest", target_budget=48, target_options=options)
        engine = runtime.load(plan, model.folder, device="cpu")
        tokens.append(engine.generate(prompts(37), 110).tokens)
    assert tokens[0] == runtime.load(make_plan(), model.folder, device="cpu").generate(prompts(37), 110).tokens
    assert tokens[1] != tokens[0]


def seen_by(name, query, keys, length, budget, group=32, sinks=2):
    """bool [kv_heads, length]: what a query reads of `length` tokens, from the whole matrix of scores."""
    kv_heads = len(keys)
    seen = torch.zeros(kv_heads, length, dtype=torch.bool)
    cached = length - 1  # the query's own token is read beside the budget
    if name == "streamingllm":
        seen[:, :sinks] = seen[:, max(0, cached - (budget - sinks)) :] = True
        return seen
    old = max(0, cached // group - 1) * group
    num_selected = min(max(budget - (cached - old), sinks), old)
    logits = torch.einsum("hgd,hnd->hgn", query.unflatten(0, (kv_heads, -1)), keys) * keys.shape[-1] ** -0.5
    scores = logits.softmax(-1).sum(1)[:, :old]
    scores[:, :sinks] = torch.inf
    seen[:, old:] = True
    return seen.scatter(1, scores.topk(num_selected, dim=1).indices, True)


@pytest.mark.parametrize("name", ["streamingllm", "oracle"])
def test_attention_is_that_of_the_full_matrix_where_others_are_masked(name, engine_of, prompts, monkeypatch):
    engine, compared = engine_of("bf16", name, 48, 2), []
    inner = SparseTargetAttention._attend

    def checked(self, layer, query, metadata):
        out, cache = inner(self, layer, query, metadata), engine.cache
        keys, values = cache.full(layer)
        for row, length in enumerate(cache.lengths.tolist()):
            for at in range(query.shape[1]):
                k, v, q = keys[row, :, : length + at + 1], values[row, :, : length + at + 1], query[row, at]
                seen = seen_by(name, q, k, length + at + 1, 48)
                logits = torch.einsum("hgd,hnd->hgn", q.unflatten(0, (2, -1)), k) * k.shape[-1] ** -0.5
                weights = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
                torch.testing.assert_close(out[row, at], (weights @ v).flatten(0, 1), rtol=2e-4, atol=2e-5)
                compared.append(int((~seen).sum()))
        return out

    monkeypatch.setattr(SparseTargetAttention, "_attend", checked)
    engine.generate(prompts(*LENGTHS), 12)
    assert sum(compared) > 1000


def test_a_head_is_asked_for_and_checked(model, tiny_model, make_plan, head_file):
    options = {"target": "retrieval-head", "target_budget": 48}
    with pytest.raises(runtime.WorkloadError, match=r"none was given; `ridgeplan distill` trains one$"):
        runtime.load(make_plan(**options), model.folder, device="cpu")
    other = tiny_model(vocab_size=120)
    for path in (head_file(other), head_file(tiny_model("qwen2"))):
        with pytest.raises(runtime.ModelError, match=r"^the retrieval head is of 'tiny', another model; allowed: "):
            runtime.load(make_plan(**options), model.folder, device="cpu", retrieval_head=path)
    with pytest.warns(UserWarning, match="the retrieval head changes nothing"):
        runtime.load(make_plan(), model.folder, device="cpu", retrieval_head=head_file(model))


def test_a_head_that_chooses_by_layer_has_a_query_for_each_layer_and_kv_head(model, make_plan, head_file, prompts):
    """What it chooses for a layer is what a head of that layer's queries alone chooses for all."""
    engine = runtime.load(make_plan(), model.folder, device="cpu")
    head = load_head(head_file(model, layers=2)).for_model(engine.config.shape, engine.weights.embedding)
    (prompt,) = prompts(100)
    engine.cache.reset(1)
    engine.cache.lengths.fill_(len(prompt))

    def chosen(one, layer):
        selection = make_selection("retrieval-head", ratio=0.3, floor=40, recent=6, sinks=2)
        policy = RetrievalHeadSelector(selection, AttentionMetadataBuilder(engine.cache), one)
        policy.before_prefill(0, torch.tensor(prompt))
        policy.before_pass(torch.tensor([[5]]), 0)
        policy.draft_metadata(0)
        chosen_set = policy.select(layer, torch.empty(0))
        return chosen_set.index[0, :, : int(chosen_set.count[0, 0])]

    sets = [chosen(head, layer) for layer in range(2)]
    assert not torch.equal(*sets)
    for layer, chosen_set in enumerate(sets):
        queries = head.weights.q.view(2, 2, 16, -1)[:, layer].flatten(0, 1)  # by KV head first
        config, weights = replace(head.config, layers=1, q_heads=2), replace(head.weights, q=queries)
        assert torch.equal(chosen_set, chosen(replace(head, config=config, weights=weights), 0))


@pytest.mark.parametrize("level", ["head", "batch"])
def test_rounds_change_nothing_of_what_is_chosen_by_layer(level, model, make_plan, head_file, generated, prompts):
    path, options = head_file(model, layers=2), {"recent": 6, "sinks": 2, "level": level}
    plans = (make_plan(gamma=gamma, batch=3, target="retrieval-head", target_budget=48, target_options=options)
             for gamma in (0, 3))  # fmt: skip
    plain, drafted = (
        runtime.load(plan, model.folder, device="cpu", retrieval_head=path).generate(prompts(*LENGTHS), NEW).tokens
        for plan in plans
    )
    assert drafted == plain != generated("bf16").tokens


def test_one_set_for_all_heads_reads_what_each_head_would_with_room_for_all(generated, model, make_plan, head_file,
                                                                           prompts):  # fmt: skip
    plan = make_plan(batch=3, target="retrieval-head", target_budget=48, target_options={"level": "batch"})
    chosen_set = runtime.load(plan, model.folder, device="cpu", retrieval_head=head_file(model))
    tokens = chosen_set.generate(prompts(*LENGTHS), NEW).tokens
    assert tokens != generated("bf16", "retrieval-head", 48).tokens
