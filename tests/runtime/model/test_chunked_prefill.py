"""Prompts that go through in chunks, with layers that evict after each: against whole matrices, and in generation."""

from itertools import pairwise

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
from grids import pairs

from ridgeplan import runtime
from ridgeplan.planner.lowering import strategy_of
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.memory import chunk_buffers
from ridgeplan.roofline.plan.plan import PlanError
from ridgeplan.roofline.plan.policy import EVICTIONS
from ridgeplan.runtime.buffers import Arena
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.prefill import chunk_bounds, prefill_all
from ridgeplan.runtime.policies.base import TokenSelector

POLICIES = tuple(name for name, policy in EVICTIONS.items() if policy.chunked)
SETTINGS = {
    "dapq": {"prefix": 3, "suffix": 19, "pooling": 3},
    "snapkv": {"window": 6},
    "pyramidkv": {"window": 6},
    "expected-attention": {"future": 16, "sinks": 3},
}
BUDGET, NEW = 30, 40
LAYERS, KV_HEADS, RATIO, DIM = 3, 2, 2, 32


class Observer(TokenSelector):
    """Sees the last queries of a prompt, and what layers keep of it."""

    window = 7

    def __init__(self):
        self.seen = []

    def after_prefill(self, layer, row, queries, keys, positions):
        self.seen.append((queries.clone(), keys.clone(), positions))


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(num_hidden_layers=LAYERS)


@pytest.fixture
def opened(model, make_plan):
    def make(policy, **changes):
        plan = make_plan(evict=policy, budget=BUDGET, settings=SETTINGS.get(policy, {}), **changes)
        return runtime.load(plan, model.folder)

    return make


@pytest.mark.parametrize("length", [31, 59, 60, 61, 100, 128])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_against_whole_matrices(policy, length, model, opened, prompts):
    """Logits, positions and keys of a simulation that compacts nothing: a mask hides what each layer and head lost."""
    engine, prompt, observer = opened(policy, chunk=29), torch.tensor(prompts(length)[0]), Observer()
    to = engine._destination(engine._speculator(engine.cache, runtime.SamplingParams()), 0)
    to = type(to)(engine.cache, 0, engine.scorer, [observer])
    logits = prefill_all(engine.decoder, engine.weights, [to], prompt, evict_every=29)
    simulated = Simulation(model.reference, prompt, chunk_bounds(length, 29), policy, engine.cache.config.kept)
    torch.testing.assert_close(logits, simulated.logits(), rtol=1e-4, atol=1e-4)
    for layer, (_, keys, positions) in enumerate(observer.seen):
        kept = simulated.alive[layer]
        positions = positions.expand(len(keys), -1)
        assert positions.shape[1] == engine.cache.config.kept(length)[layer]
        for head in range(KV_HEADS):
            at = positions[head] + length
            assert at.tolist() == kept[head].nonzero()[:, 0].tolist()
            torch.testing.assert_close(keys[head], simulated.keys[layer][head, at], rtol=1e-4, atol=1e-4)
        stored = engine.cache.full(layer)[0][0, :, : keys.shape[1]]
        assert torch.equal(stored, keys)


def test_h2o_by_chunks_of_one_token_evicts_at_every_step(model, opened, prompts):
    """Zhang et al. 2023, Algorithm 1: one token comes, its attention is added, one token goes."""
    engine, prompt = opened("h2o", chunk=1), torch.tensor(prompts(40)[0])
    observer = Observer()
    to = engine._destination(engine._speculator(engine.cache, runtime.SamplingParams()), 0)
    prefill_all(engine.decoder, engine.weights, [type(to)(engine.cache, 0, engine.scorer, [observer])], prompt,
                evict_every=1)  # fmt: skip
    simulated = Simulation(model.reference, prompt, list(range(41)), "h2o", engine.cache.config.kept)
    for alive, (_, _, positions) in zip(simulated.alive, observer.seen, strict=True):
        for head, at in enumerate(positions.expand(KV_HEADS, -1)):
            assert (at + 40).tolist() == alive[head].nonzero()[:, 0].tolist()


class Simulation:
    """A prompt's pass through transformers' modules, with the pseudo tokens of every chunk as rows behind it.

    alive: of each layer bool [kv_heads, tokens], what is left. keys: of each layer [kv_heads, rows, head_dim].
    """

    def __init__(self, reference, prompt, bounds, policy, kept):
        self.model, self.policy, self.tokens, self.bounds = reference, policy, len(prompt), bounds
        settings = EVICTIONS[policy](**SETTINGS.get(policy, {}))
        self.settings, self.kept = settings, kept
        pseudo = torch.cat([prompt[: settings.prefix], prompt[-settings.suffix :]]) if policy == "dapq" else prompt[:0]
        chunks = len(bounds) - 1
        self.pseudo, ids = len(pseudo), torch.cat([prompt, *[pseudo] * chunks])
        after = [torch.arange(stop, stop + self.pseudo) for stop in bounds[1:]]
        self.positions = torch.cat([torch.arange(self.tokens), *after])
        self.alive, self.keys = [], []
        with torch.inference_mode():
            hidden = reference.model.embed_tokens(ids)[None]
            tables = reference.model.rotary_emb(hidden, self.positions[None])
            for index, layer in enumerate(reference.model.layers):
                mask = self._mask(index, layer, hidden, tables)
                bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf).repeat_interleave(RATIO, dim=0)[None]
                layer_output = layer(
                    hidden, attention_mask=bias, position_ids=self.positions[None], position_embeddings=tables
                )
                hidden = layer_output[0] if isinstance(layer_output, tuple) else layer_output
            self._hidden = hidden

    def logits(self):
        with torch.inference_mode():
            return self.model.lm_head(self.model.model.norm(self._hidden))[0, self.tokens - 1]

    def _mask(self, index, layer, hidden, tables):
        """What every row sees, bool [kv_heads, rows, rows]; and what is left after the last chunk."""
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        q, k, v = (
            project(normed)[0].unflatten(1, (-1, DIM)).transpose(0, 1)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        rotated, keys = (rotated[0] for rotated in llama.apply_rotary_pos_emb(q[None], k[None], *tables))
        self.keys.append(keys)
        rows = hidden.shape[1]
        mask = torch.eye(rows, dtype=torch.bool).repeat(KV_HEADS, 1, 1)
        alive = torch.zeros(KV_HEADS, self.tokens, dtype=torch.bool)
        self._sums = torch.zeros(KV_HEADS, self.tokens)
        for chunk, (start, stop) in enumerate(pairwise(self.bounds)):
            first = self.tokens + chunk * self.pseudo
            behind = slice(first, first + self.pseudo)
            causal = torch.ones(stop - start, stop - start).tril().bool()
            mask[:, start:stop, : self.tokens] = alive[:, None]
            mask[:, start:stop, start:stop] = causal
            alive[:, start:stop] = True
            mask[:, behind, : self.tokens] = alive[:, None]
            mask[:, behind, behind] = torch.ones(self.pseudo, self.pseudo).tril().bool()
            seen = (rotated.unflatten(0, (KV_HEADS, RATIO)) @ keys[:, None].mT / DIM**0.5).masked_fill(
                ~mask[:, None], -torch.inf
            )
            self._sums = self._sums + seen[:, :, start:stop, : self.tokens].softmax(-1).sum(2).mean(1)
            budget = self.kept(stop)[index]
            for head in range(KV_HEADS):
                places = alive[head].nonzero()[:, 0]
                if budget < len(places):
                    group = slice(head * RATIO, (head + 1) * RATIO)
                    scores = self._scores(
                        index, budget, places, start, stop, behind,
                        seen[head].softmax(-1), q[group], keys[head], v[head], self._sums[head],
                    )  # fmt: skip
                    best = sorted(range(len(places)), key=lambda at: (scores[at], at), reverse=True)[:budget]
                    alive[head] = False
                    alive[head, places[best]] = True
        self.alive.append(alive)
        return mask

    def _scores(self, index, budget, places, start, stop, behind, probabilities, q, keys, values, sums):
        """A score for each of the places that a KV head still has."""
        count, settings = len(places), self.settings
        scores = torch.arange(count).double()
        if self.policy == "streamingllm":
            scores[: settings.sinks] = torch.inf
        elif self.policy in ("snapkv", "pyramidkv"):
            window = min(settings.window, budget, stop - start)
            attended = probabilities[:, stop - window : stop, places].sum(1).mean(0)[:-window]
            scores[:-window] = widest(attended, settings.pooling).double()
            scores[-window:] = torch.inf
        elif self.policy == "dapq":
            scores = widest(probabilities[:, behind, places].sum(1).mean(0), settings.pooling)
        elif self.policy == "h2o":  # what all tokens so far have paid to those that are left
            scores = sums[places].double()
            scores[count - round(settings.recent_share * budget) :] = torch.inf
        elif self.policy == "lacache":
            scores = self._ladder(index, budget, count)
        else:
            scores = self._expected(places, start, stop, q, keys, values)
        return scores.tolist()

    def _ladder(self, index, budget, count):
        settings = self.settings
        recent = round(settings.recent_share * budget)
        middle = count - settings.sinks - recent
        rung = (budget - settings.sinks - recent) / middle
        at = torch.arange(count).double() + 0.5 - settings.sinks
        phase = at * settings.ladders / middle % 1
        scores = -(phase - (rung / 2 + index / (LAYERS - 1) * (1 - rung))).abs().float()
        scores[: settings.sinks] = torch.inf
        scores[count - recent :] = torch.inf
        return scores

    def _expected(self, places, start, stop, q, keys, values):
        """From queries of the chunk before rotation, but the text's first `sinks`."""
        sinks, config = self.settings.sinks, self.model.config
        observed = q[:, max(start, sinks) : stop]
        turns = [
            self.model.model.rotary_emb(observed, torch.arange(stop, stop + self.settings.future)[None])[part][0].mean(
                0
            )
            for part in (0, 1)
        ]
        half = DIM // 2
        swap = torch.zeros(DIM, DIM)
        swap[range(half), range(half, DIM)] = -1
        swap[range(half, DIM), range(half)] = 1
        turn = torch.diag(turns[0]) + torch.diag(turns[1]) @ swap
        assert config.head_dim == DIM
        results = []
        for queries in observed:
            mean, spread = turn @ queries.mean(0), turn @ queries.T.cov(correction=0) @ turn.T
            logits = keys[places] @ mean / DIM**0.5 + ((keys[places] @ spread) * keys[places]).sum(1) / (2 * DIM)
            logits[places < sinks] = -torch.inf
            results.append(logits.softmax(-1))
        scores = torch.stack(results).mean(0) * values[places].norm(dim=-1)
        scores[places < sinks] = torch.inf
        return scores


def widest(scores, width):
    """The largest score among the `width` around each."""
    before = width // 2
    return torch.stack([scores[max(0, at - before) : at - before + width].amax() for at in range(len(scores))])


@pytest.mark.parametrize("tokens, chunk, bounds", [(10, 3, [0, 2, 5, 7, 10]), (8, 4, [0, 4, 8]), (9, 8, [0, 4, 9])])
def test_chunks_are_as_equal_as_can_be(tokens, chunk, bounds):
    assert chunk_bounds(tokens, chunk) == bounds


@pytest.mark.parametrize("policy, kv", pairs(POLICIES, ["bf16", "bf16+int4", "int8", "int4x2"]))
def test_prompts_of_one_chunk_and_budgets_of_the_whole_context_change_no_bit(policy, kv, opened, prompts, make_plan):
    """The same tokens and the same cache as without chunks."""
    ids = prompts(64, 50, 31)
    for chunk, budget in ((64, BUDGET), (16, 128)):
        same = [opened(policy, kv=kv, batch=3, chunk=each) for each in (0, chunk)]
        if budget == 128:
            plan = make_plan(kv, batch=3, evict=policy, budget=budget, settings=SETTINGS.get(policy, {}), chunk=chunk)
            same = [runtime.load(make_plan(kv, batch=3), same[0].source), runtime.load(plan, same[0].source)]
        tokens = [engine.generate(ids, 12).tokens for engine in same]
        assert tokens[0] == tokens[1]
        full, chunked = (engine.cache for engine in same)
        for layer in range(LAYERS):
            end = AttentionMetadataBuilder(full).target_metadata(1).layer_metadata(layer).end
            for ours, theirs in zip(full.full(layer), chunked.full(layer), strict=True):
                for row in range(3):
                    count = min(ours.shape[2], theirs.shape[2], int(end[row]))
                    assert torch.equal(ours[row, :, :count], theirs[row, :, :count])


@pytest.mark.parametrize("policy, kv, gamma", pairs(POLICIES, [("int4x2", 4), ("bf16+int4", 3), ("bf16", 2)], always=0))
def test_drafts_change_nothing(policy, kv, gamma, tiny_model, make_plan, prompts):
    """Greedy output of ragged batches, of which one prompt is shorter than a chunk, is that of its own target."""
    folder, ids = tiny_model(agreeable=True, num_hidden_layers=LAYERS).folder, prompts(128, 70, 25)
    plain, drafted = (
        runtime.load(
            make_plan(kv, each, batch=3, evict=policy, budget=45, settings=SETTINGS.get(policy, {}), chunk=32), folder
        ).generate(ids, 62)
        for each in (0, gamma)
    )
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.accepted > 0


def test_a_row_generates_what_it_would_alone(opened, prompts):
    ids = prompts(128, 70, 25)
    for kv in ("bf16", "int4x2"):
        engine = opened("snapkv", kv=kv, batch=3, chunk=32)
        together = engine.generate(ids, NEW).tokens
        assert together == [opened("snapkv", kv=kv, chunk=32).generate([prompt], NEW).tokens[0] for prompt in ids]


def test_codes_are_of_what_full_precision_keeps(opened, prompts):
    """Between chunks nothing is quantized: codes are made once, of the same keys and values."""
    ids = torch.tensor(prompts(128)[0])
    seen = []
    for kv in ("bf16", "int8", "int4x2"):
        engine, observer = opened("dapq", kv=kv, chunk=32), Observer()
        to = engine._destination(engine._speculator(engine.cache, runtime.SamplingParams()), 0)
        observed = type(to)(engine.cache, 0, engine.scorer, [observer])
        prefill_all(engine.decoder, engine.weights, [observed], ids, evict_every=32)
        seen.append(observer.seen)
    for call in seen[1:]:
        for ours, theirs in zip(seen[0], call, strict=True):
            assert all(torch.equal(*both) for both in zip(ours, theirs, strict=True))


def test_the_last_queries_are_the_last_chunks(opened, prompts):
    """An observer that asks for more queries than the last chunk has gets that chunk's."""
    engine, observer = opened("streamingllm", chunk=10), Observer()
    observer.window = 64
    ids = torch.tensor(prompts(95)[0])
    to = engine._destination(engine._speculator(engine.cache, runtime.SamplingParams()), 0)
    observed = type(to)(engine.cache, 0, engine.scorer, [observer])
    prefill_all(engine.decoder, engine.weights, [observed], ids, evict_every=10)
    assert {len(queries) for queries, _, _ in observer.seen} == {10}
    kept = [*range(-95, -91), *range(4 - BUDGET, 0)]
    assert [positions.tolist() for _, _, positions in observer.seen] == [[kept]] * LAYERS  # the same for all KV heads


@pytest.mark.parametrize("policy, kv", [("dapq", "int4x2"), ("snapkv", "bf16"), ("pyramidkv", "int8")])
def test_the_workspace_does_not_grow_with_the_prompt(policy, kv, opened, prompts):
    """As many bytes of an arena for 1000 tokens as for 120 of these chunks; a whole prompt's grow."""
    engine = opened(policy, kv=kv, chunk=40, context=1000, new_tokens=24)
    reached = []
    for length in (120, 240, 1000):
        arena = Arena(torch.empty(1 << 24, dtype=torch.uint8))
        to = engine._destination(engine._speculator(engine.cache, runtime.SamplingParams()), 0)
        prefill_all(engine.decoder, engine.weights, [to], torch.tensor(prompts(length)[0]), arena=arena, evict_every=40)
        reached.append(arena.reached)
    assert reached[0] == reached[1] == reached[2]


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_the_workspace_is_what_is_predicted(kv, opened, prompts):
    engine = opened("dapq", kv=kv, chunk=50, context=300)
    device = Device(memory_bytes=10**12, element_bytes=4, num_sms=1)
    strategy = strategy_of(engine.plan, engine.config.shape, device, 1.0)
    arena = Arena(torch.empty(1 << 24, dtype=torch.uint8))
    to = engine._destination(engine._speculator(engine.cache, runtime.SamplingParams()), 0)
    prefill_all(engine.decoder, engine.weights, [to], torch.tensor(prompts(300)[0]), arena=arena, evict_every=50)
    assert arena.reached == sum(chunk_buffers(engine.config.shape, strategy, 4))


@pytest.mark.parametrize("policy", [name for name in EVICTIONS if name not in POLICIES])
def test_policies_that_score_a_whole_prompt_are_refused(policy, make_plan, model):
    with pytest.raises(
        PlanError, match=f"^eviction chunk is 32; allowed: 0, as {policy} scores a whole prompt at once$"
    ):
        runtime.load(make_plan(evict=policy, budget=BUDGET, chunk=32), model.folder)


def test_windows_that_would_hide_tokens_are_refused(tiny_model, make_plan):
    folder = tiny_model("mistral", sliding_window=64).folder
    with pytest.raises(runtime.UnsupportedPlan, match=r"sliding window is 64 tokens .* no eviction"):
        runtime.load(make_plan(evict="snapkv", budget=BUDGET, chunk=32), folder)


def test_engines_do_not_share_prompts_in_chunks(opened, model, make_plan, prompts):
    first = opened("snapkv", chunk=32)
    other = runtime.load(make_plan(evict="snapkv", budget=BUDGET), model.folder, weights=first.weights)
    for engine, two in ((first, other), (other, first)):
        with pytest.raises(runtime.WorkloadError, match="an engine evicts after each chunk of a prompt"):
            engine.prefill_with([two], prompts(90), NEW)
