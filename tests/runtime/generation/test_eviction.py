"""Generation after an eviction: what stays in the cache, and that speculation on top of it changes nothing."""

import pytest
import torch
from grids import pairs

from ridgeplan import runtime
from ridgeplan.kernels.layer import rotate
from ridgeplan.roofline.plan.policies.evictions import DapQEviction, OracleEviction
from ridgeplan.runtime.buffers import Arena
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.runtime.model.prefill_layer import causal_attention, plan_attention
from ridgeplan.runtime.policies import SCORERS
from ridgeplan.runtime.policies.base import TokenSelector
from ridgeplan.runtime.policies.eviction_scorer import largest
from ridgeplan.runtime.policies.evictions import DapQScorer, OracleScorer

LENGTHS, BUDGET, NEW = [128, 70, 37], 45, 62
POLICIES = tuple(name for name in SCORERS if name != "oracle")  # which knows no text here
FORMATS = ["bf16", "bf16+int4", "int8", "int4x2"]
PSEUDO = {"prefix": 3, "suffix": 19}  # two calls of decode attention


@pytest.mark.parametrize("policy, kv, gamma", pairs(POLICIES, [("int4x2", 4), ("bf16+int4", 3), ("bf16", 2)], 0))
def test_drafts_change_nothing(policy, kv, gamma, tiny_model, make_plan, prompts):
    """Evict, quantize, speculate: greedy output of ragged batches equals that of their own evicted target."""
    folder = tiny_model(agreeable=True, num_hidden_layers=3).folder
    ids = prompts(*LENGTHS)
    settings = {"window": 4} if policy == "pyramidkv" else {}  # layers of 84, 45 and 6 tokens, or near it with codes
    plain, drafted = (
        runtime.load(make_plan(kv, each, batch=3, evict=policy, budget=BUDGET, settings=settings), folder).generate(
            ids, NEW
        )
        for each in (0, gamma)
    )
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.accepted > 0
    if kv != "bf16":
        # 45, 45 and 37 stored tokens become 106, 106 and 98: from no group of 32 to two.
        assert drafted.statistics.flushes == plain.statistics.flushes
        assert policy == "pyramidkv" or drafted.statistics.flushes == 6


@pytest.mark.parametrize("policy, kv", pairs(POLICIES, FORMATS[::-1], 0))
def test_a_budget_of_the_whole_prompt_changes_no_bit(policy, kv, tiny_model, make_plan, prompts):
    folder, ids = tiny_model().folder, prompts(*LENGTHS)
    engines = [
        runtime.load(make_plan(kv, batch=3, evict=name, budget=budget), folder)
        for name, budget in (("none", 0), (policy, 300))
    ]
    generation, same = (engine.generate(ids, 20).tokens for engine in engines)
    assert generation == same
    for layer in range(2):
        for ours, theirs in zip(*(engine.cache.full(layer) for engine in engines), strict=True):
            for row in range(3):
                count = min(ours.shape[2], int(AttentionMetadataBuilder(engines[0].cache).target_metadata(1).end[row]))
                assert torch.equal(ours[row, :, :count], theirs[row, :, :count])


@pytest.mark.parametrize("length", [33, 101, 120, 128])
def test_pseudo_tokens_leave_no_trace(length, tiny_model, make_plan, prompts, padded_prompts):
    """The prompt's logits, keys and values are bit for bit those of a prefill without pseudo tokens.

    Also where those stand in the padding of the prompt, or reach beyond it.
    """
    folder, prompt = tiny_model().folder, torch.tensor(prompts(length)[0])
    plain = runtime.load(make_plan(), folder)
    evicting = runtime.load(make_plan(evict="dapq", budget=20, settings=PSEUDO), folder)
    places = []

    class Watched(type(evicting.scorer)):
        def scores(self, layer):
            scores = super().scores(layer)
            places.append(largest(scores, layer.budget))
            return scores

    logits = [
        prefill(engine.decoder, engine.weights, engine.cache, 0, prompt, scorer=policy)
        for engine, policy in ((plain, None), (evicting, Watched(evicting.scorer.settings)))
    ]
    assert torch.equal(*logits)
    for layer, kept in enumerate(places):
        for full, part in zip(plain.cache.full(layer), evicting.cache.full(layer), strict=True):
            for head in range(2):
                assert torch.equal(part[0, head, :20], full[0, head, kept[head]])
    metadata = AttentionMetadataBuilder(evicting.cache).target_metadata(2)
    assert metadata.positions.tolist() == [[length, length + 1]]
    assert metadata.slots.tolist() == [[20, 21]]


@pytest.mark.parametrize("policy, settings", [("none", {}), ("dapq", PSEUDO)])
def test_what_is_planned_is_what_prompts_attend(
    policy, settings, tiny_model, make_plan, prompts, padded_prompts, monkeypatch
):
    """A prompt of the workload's length has the sizes and strides that an engine has cuDNN plan for."""
    plan = make_plan(evict=policy, budget=20 * (policy != "none"), settings=settings, context=120)
    engine, seen = runtime.load(plan, tiny_model().folder), []

    def attended(*tensors):
        seen.append([(tensor.shape, tensor.stride()) for tensor in tensors[:3]])
        return causal_attention(*tensors)

    monkeypatch.setattr("ridgeplan.runtime.model.prefill_layer.causal_attention", attended)
    appended = engine.scorer.settings.appended_tokens if engine.scorer else 0
    plan_attention(engine.decoder, engine.weights, Arena.without_memory(engine.device), 120, appended)
    engine.generate(prompts(120)[0], 1)
    assert len(seen) == 1 + 2
    assert seen[0] == seen[1] == seen[2]


def test_draft_policies_learn_from_the_prompts_own_queries_and_what_stays_of_it(tiny_model, make_plan, prompts):
    folder, prompt = tiny_model().folder, torch.tensor(prompts(100)[0])
    engines = [
        runtime.load(make_plan(evict=name, budget=budget, settings=settings), folder)
        for name, budget, settings in (("none", 0, {}), ("dapq", 20, PSEUDO))
    ]

    class Observer(TokenSelector):
        window = 7

        def __init__(self):
            self.seen = []

        def after_prefill(self, layer, row, queries, keys, positions):
            self.seen.append((queries.clone(), keys.clone(), positions))

    full, part = Observer(), Observer()
    for engine, observer in zip(engines, (full, part), strict=True):
        prefill(engine.decoder, engine.weights, engine.cache, 0, prompt, scorer=engine.scorer, observers=[observer])
    for layer, (queries, keys, positions) in enumerate(part.seen):
        own_queries, all_keys, all_positions = full.seen[layer]
        assert all_positions.tolist() == [list(range(-100, 0))]
        assert torch.equal(queries, own_queries)
        assert positions.shape == (2, 20)
        assert torch.equal(keys, torch.stack([all_keys[head, 100 + at] for head, at in enumerate(positions)]))


def oracle_of(oracle, prompt, coming):
    """An oracle that knows what follows a prompt."""
    policy = oracle(OracleEviction())
    policy.tell(prompt.tolist(), coming.tolist())
    return policy


def test_an_oracle_refuses_a_text_that_it_does_not_know(tiny_model, make_plan, prompts):
    engine = runtime.load(make_plan(evict="oracle", budget=20), tiny_model().folder)
    with pytest.raises(
        runtime.WorkloadError, match="does not know what follows a prompt of 100 tokens; allowed: texts"
    ):
        engine.generate(prompts(100)[0], 5)


def test_pseudo_queries_are_those_of_a_longer_prompt(tiny_model, make_plan, prompts):
    """The oracle appends the true next tokens; its scores come from the queries that the longer prompt has there."""
    folder, text = tiny_model().folder, torch.tensor(prompts(120)[0])
    engine = runtime.load(make_plan(evict="dapq", budget=20), folder)
    seen = []

    class Watched(OracleScorer):
        def scores(self, layer):
            seen.append(layer.queries.clone())
            return super().scores(layer)

    prefill(
        engine.decoder, engine.weights, engine.cache, 0, text[:100], scorer=oracle_of(Watched, text[:100], text[100:])
    )
    short = seen[:]
    prefill(engine.decoder, engine.weights, engine.cache, 0, text, scorer=oracle_of(Watched, text, text[:0]))
    for ours, theirs in zip(short, seen[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def appended_queries(engine, prompt, **settings):
    """Queries of DapQ's pseudo tokens from the vocabulary after a prefill: [layers, tokens, q_heads, head_dim]."""
    seen = []

    class Watched(DapQScorer):
        def scores(self, layer):
            seen.append(layer.queries[layer.query_tokens :].clone())
            return super().scores(layer)

    scorer = Watched(DapQEviction(content="vocabulary", **settings))
    prefill(engine.decoder, engine.weights, engine.cache, 0, prompt, scorer=scorer)
    return torch.stack(seen)


def test_inserted_pseudo_tokens_see_the_tokens_before_them_alone(tiny_model, make_plan, prompts):
    """Their queries are those of a prompt that ends where they stand."""
    engine = runtime.load(make_plan(evict="dapq", budget=20), tiny_model().folder)
    text = torch.tensor(prompts(120)[0])
    inserted, shorter = appended_queries(engine, text, insert=0.4), appended_queries(engine, text[:48])
    torch.testing.assert_close(inserted, shorter, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(inserted, appended_queries(engine, text), rtol=1e-2, atol=1e-2)


def test_an_offset_moves_pseudo_tokens_back_and_leaves_what_they_see(tiny_model, make_plan, prompts):
    engine = runtime.load(make_plan(evict="dapq", budget=20), tiny_model().folder)
    text = torch.tensor(prompts(120)[0])
    moved, there = appended_queries(engine, text, offset=50), appended_queries(engine, text)

    def before_rope(queries, start):
        cos, sin = engine.decoder.layer_rotary(0, torch.arange(start, start + queries.shape[1]))
        return rotate(queries, cos, -sin)

    first = before_rope(moved[:1], 170)  # the first layer's depend on the token alone
    torch.testing.assert_close(first, before_rope(there[:1], 120), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(moved[1], there[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "policy, settings, sizes",
    [
        ("dapq", {}, [30, 30, 30]),
        ("pyramidkv", {"window": 8}, [51, 30, 9]),  # 8 + 22 on average, from 8 + 42.9 down to 8 + 22 / 20
        ("streamingllm", {}, [30, 30, 30]),
    ],
)
def test_decoding_attends_to_what_is_kept_at_its_own_positions(policy, settings, sizes, tiny_model, make_plan, prompts):
    """Against transformers, with a mask per layer and KV head that hides the evicted tokens."""
    model = tiny_model(num_hidden_layers=3)
    (prompt,) = prompts(100)
    engine = runtime.load(make_plan(evict=policy, budget=30, settings=settings), model.folder)
    kept = []

    class Watched(type(engine.scorer)):
        def scores(self, layer):
            scores = super().scores(layer)
            kept.append(largest(scores, layer.budget))
            return scores

    engine.scorer = Watched(engine.scorer.settings)
    tokens = engine.generate(prompt, 12).tokens[0]
    assert [places.shape[1] for places in kept] == sizes
    assert tokens == reference_tokens(model.reference, prompt, kept, 12)


def reference_tokens(model, prompt, kept, count):
    """Greedy tokens of transformers' modules, with all of the prompt cached but only `kept` visible to new tokens."""
    import transformers.models.llama.modeling_llama as llama

    hidden_places = []
    for places in kept:
        hidden = torch.ones(2, len(prompt), dtype=torch.bool)
        hidden.scatter_(1, places.expand(2, -1), False)
        hidden_places.append(hidden.repeat_interleave(2, dim=0))  # two query heads a KV head
    tokens = []
    with torch.inference_mode():
        first = model(torch.tensor([prompt])).logits[0, -1].argmax()
        tokens.append(int(first))
        while len(tokens) < count:
            tokens.append(masked_next(model, llama, prompt + tokens, hidden_places, len(prompt)))
    return tokens


def masked_next(model, llama, ids, hidden_places, prompt_tokens):
    """The token after `ids`, of which those past the prompt do not see the hidden places."""
    hidden = model.model.embed_tokens(torch.tensor([ids]))
    positions = torch.arange(len(ids))[None]
    tables = model.model.rotary_emb(hidden, positions)
    causal = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
    for layer, places in zip(model.model.layers, hidden_places, strict=True):
        mask = causal.repeat(4, 1, 1)
        mask[:, prompt_tokens:, :prompt_tokens].masked_fill_(places[:, None], -torch.inf)
        hidden = layer(hidden, attention_mask=mask[None], position_ids=positions, position_embeddings=tables)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return int(model.lm_head(model.model.norm(hidden))[0, -1].argmax())


def test_a_row_generates_what_it_would_alone(tiny_model, make_plan, prompts):
    folder, ids = tiny_model(agreeable=True).folder, prompts(*LENGTHS)
    plan = make_plan("int4x2", 4, batch=3, evict="snapkv", budget=BUDGET)
    together = runtime.load(plan, folder).generate(ids, NEW).tokens
    assert together == [runtime.load(plan, folder).generate([prompt], NEW).tokens[0] for prompt in ids]


@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv"])
def test_the_cache_has_room_for_what_stays_only(policy, tiny_model, make_plan):
    """256 tokens of context and 64 new ones: a quarter of the context and the new tokens are half of all."""
    shape = runtime.load(make_plan(), tiny_model().folder).config.shape
    sizes = [
        Cache(
            shape,
            KVCacheConfig.of(make_plan(context=256, new_tokens=64, evict=name, budget=budget, settings=settings), 2),
            torch.device("cpu"),
            torch.float32,
        ).bytes
        for name, budget, settings in (("none", 0, {}), (policy, 64, {"window": 32}))
    ]
    token_bytes = 2 * 2 * 2 * 32 * 4  # keys and values of two layers with two heads of 32 floats
    assert sizes == [(256 + 64 + 1) * token_bytes, (64 + 64 + 1) * token_bytes]
