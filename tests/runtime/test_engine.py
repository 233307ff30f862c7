"""The engine's surface: stop tokens, seeds, streaming, statistics, and errors of one line."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from ridgeplan import planner, runtime
from ridgeplan.roofline.plan.plan import Speculation
from ridgeplan.runtime import engine as engine_module
from ridgeplan.runtime.errors import ModelError, WorkloadError
from ridgeplan.runtime.memory import PeakMemory
from ridgeplan.runtime.sampling import SamplingParams
from ridgeplan.runtime.statistics import Stopwatch


@pytest.fixture(scope="module")
def engine(tiny_model, make_plan):
    return runtime.load(make_plan("int4x2", 3, batch=3), tiny_model(agreeable=True).folder)


def test_stop_tokens_end_a_sequence_and_are_kept(engine, prompts):
    ids = prompts(50, 70)
    generation = engine.generate(ids, 40).tokens
    stop = generation[0][11]
    stopped = engine.generate(ids, 40, SamplingParams(stop_token_ids=[stop])).tokens
    for tokens, full in zip(stopped, generation, strict=True):
        end = full.index(stop) + 1 if stop in full else len(full)
        assert tokens == full[:end]
    assert len(stopped[0]) <= 12


def test_a_stopped_row_rests_in_the_cache(engine, prompts):
    ids = prompts(50, 70)
    stopping, generation = engine.generate(ids, 60).tokens
    stop = next(token for token in stopping if token not in generation)
    place = stopping.index(stop)
    engine.generate(ids, 60, SamplingParams(stop_token_ids=[stop]))
    # At most the round in which it stopped was kept whole; the other row's last token never enters the cache.
    assert 50 + place <= engine.cache.lengths[0] <= 50 + place + engine.plan.speculation.gamma
    assert engine.cache.lengths[1] == 70 + 59


@pytest.mark.parametrize("late", [False, True], ids=["at once", "a round late"])
def test_stops_and_limits_hold_also_where_the_host_reads_a_round_late(engine, prompts, monkeypatch, late):
    """As with CUDA graphs, where the next round runs before the host has seen a stop token in the last one."""
    ids = prompts(50, 70, 33)
    generation = engine.generate(ids, 60)
    stop = generation.tokens[0][20]
    expected = engine.generate(ids, 60, SamplingParams(stop_token_ids=[stop]))
    monkeypatch.setattr(engine_module.EagerRounds, "depth", 2 if late else 1)
    assert counts(engine.generate(ids, 60)) == counts(generation)
    generated = engine.generate(ids, 60, SamplingParams(stop_token_ids=[stop]))
    assert counts(generated) == counts(expected)
    assert generated.tokens == [row[: row.index(stop) + 1] if stop in row else row for row in generation.tokens]
    assert engine.generate(ids, 7).tokens == [row[:7] for row in generation.tokens]


def counts(generation):
    """All of a generation but its times."""
    figures = generation.statistics
    return generation.tokens, figures.rounds, figures.sequence_rounds, figures.decoded, figures.flushes


def test_no_more_rounds_are_launched_than_may_be_needed(engine, prompts, monkeypatch):
    launched = []

    class Counted(engine_module.EagerRounds):
        depth = 2

        def launch(self, gamma):
            launched.append(self.in_flight)
            super().launch(gamma)

    monkeypatch.setattr(engine_module, "EagerRounds", Counted)
    engine.generate(prompts(50, 70), 2)  # of which prefill gives the first, and a round at least one more
    assert launched == [0]


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4, 5, 17])
def test_exactly_the_asked_tokens_are_delivered(engine, prompts, new_tokens):
    ids = prompts(50, 70, 33)
    result = engine.generate(ids, new_tokens)
    assert [len(tokens) for tokens in result.tokens] == [new_tokens] * 3
    assert result.tokens == [tokens[:new_tokens] for tokens in engine.generate(ids, 20).tokens]
    assert result.statistics.generated == 3 * new_tokens


def test_the_graphs_of_the_latest_kinds_are_kept(monkeypatch):
    captured = []

    def capture(speculator, gammas):
        captured.append((speculator.cache.rows, speculator.sampling.temperature))
        return object()

    monkeypatch.setattr(engine_module, "GraphRounds", capture)
    monkeypatch.setattr(engine_module, "KEPT_GRAPHS", 3)
    device = SimpleNamespace(type="cuda")
    plan = SimpleNamespace(speculation=Speculation(4))
    engine = SimpleNamespace(device=device, plan=plan, _graphs={}, _mover=None)
    stopwatch = Stopwatch(torch.device("cpu"))

    def prepared(temperature, seed=0, rows=1, near=2):
        sampling = SamplingParams(temperature, seed=seed, stop_token_ids=(seed,))
        speculator = SimpleNamespace(cache=SimpleNamespace(rows=rows, first_on_host=near), sampling=sampling)
        return engine_module.Engine._rounds(engine, speculator, stopwatch)

    first = prepared(1)
    for temperature in (2, 3, 1, 4):  # 1 is used again, so 2 goes
        prepared(temperature, seed=temperature)  # a graph serves all seeds and stop tokens
    assert len(engine._graphs) == 3
    assert prepared(1) is first
    prepared(2)
    prepared(2, rows=2)
    prepared(2, rows=2, near=1)  # with one more layer on the host
    assert captured == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 2), (2, 2), (2, 2)]


def test_seeds_reproduce_and_differ(engine, prompts):
    ids = prompts(50, 70)
    first, again, other = (
        engine.generate(ids, 30, SamplingParams(temperature=1.0, seed=seed)).tokens for seed in (1, 1, 2)
    )
    assert again == first
    assert other != first


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 20, "seed": 3}], ids=["greedy", "sampled"])
def test_streaming_equals_generating(engine, prompts, options):
    [ids], sampling = prompts(50), SamplingParams(**options)
    assert list(engine.stream(ids, 30, sampling)) == engine.generate(ids, 30, sampling).tokens[0]


def test_progress_counts_delivered_tokens(engine, prompts):
    seen = []
    engine.generate(prompts(50, 70), 20, on_progress=seen.append)
    assert seen[0] == 2
    assert seen == sorted(seen)
    assert seen[-1] == 40
    assert len(seen) == engine.statistics.rounds + 1


def test_statistics_follow_their_definitions(engine, prompts):
    statistics = engine.generate(prompts(50, 70), 60).statistics
    assert statistics is engine.statistics
    assert statistics.gamma == 3
    assert statistics.rounds <= statistics.sequence_rounds <= 2 * statistics.rounds
    assert statistics.drafted == 3 * statistics.sequence_rounds
    assert statistics.decoded == statistics.generated - 2  # prefill gives each sequence its first token
    assert statistics.tokens_per_round == statistics.decoded / statistics.sequence_rounds
    assert statistics.acceptance == statistics.accepted / statistics.num_draft_tokens_verified
    assert statistics.accepted_share == statistics.accepted / statistics.drafted
    assert statistics.acceptance >= statistics.accepted_share
    # A later draft is verified only where the one before it was accepted.
    assert all(j <= a for j, a in zip(statistics.verified_at[1:], statistics.accepted_at, strict=False))
    assert statistics.acceptance_at[0] == statistics.accepted_at[0] / statistics.verified_at[0]
    assert statistics.ttft_ms == pytest.approx(1e3 * statistics.prefill_s)
    round_ms = 1e3 * statistics.decode_s / statistics.rounds
    assert statistics.tpot_ms == pytest.approx(round_ms / statistics.tokens_per_round)
    # Groups of 32 tokens: 50 tokens become 109 and 70 become 129 in the cache, with 0 to 2 and 1 to 3 groups of codes.
    assert statistics.flushes == 4
    assert statistics.decode_s >= statistics.rounds * statistics.verify_s * 0.5
    assert 0 < statistics.draft_s < statistics.decode_s
    assert statistics.flush_s < statistics.decode_s


@pytest.mark.parametrize(
    "name",
    ["autoregressive", "quantspec-int8", "suffix", "cascade", "magicdec-snapkv", "specextend", "clusterkv", "snapkv",
     "dapq", "streamingllm-target"],
)  # fmt: skip
def test_the_first_use_of_kernels_is_no_prefill_and_changes_nothing(tiny_model, prompts, name):
    plan, (ids, other) = planner.preset(name, planner.Workload("any", "here", 192, 24)), prompts(150, 180)
    engine, used = (runtime.load(plan, tiny_model().folder) for _ in range(2))
    engine._first_use_tokens = 16  # a CPU compiles nothing
    sampling = SamplingParams(temperature=1.0, seed=3)
    first = engine.generate([ids], 24, sampling)
    assert first.tokens == used.generate([ids], 24, sampling).tokens
    assert first.statistics.first_use_s > 0
    assert first.statistics.rounds == used.statistics.rounds
    later = engine.generate([other], 24, sampling)
    assert (later.tokens, later.statistics.first_use_s) == (used.generate([other], 24, sampling).tokens, 0)
    assert used.statistics.first_use_s == 0


def test_a_prompt_that_nothing_learns_from_is_stored_at_once(tiny_model, make_plan, prompts, monkeypatch):
    """Else every layer of it launches kernels for an observer, which take a short prompt's time."""
    observers, fill = [], engine_module.prefill_all

    def filled(decoder, weights, destinations, *others, **named):
        observers.extend(each.observers for each in destinations)
        return fill(decoder, weights, destinations, *others, **named)

    monkeypatch.setattr(engine_module, "prefill_all", filled)
    for name in ("autoregressive", "quantspec", "magicdec-snapkv"):
        plan = planner.preset(name, planner.Workload("any", "here", 192, 24))
        runtime.load(plan, tiny_model().folder).generate(prompts(150), 2)
    assert [len(each) for each in observers] == [0, 0, 1]


def test_a_perfect_draft_accepts_everything(tiny_model, make_plan, prompts):
    plan = make_plan("bf16", 3, codes="full")
    statistics = runtime.load(plan, tiny_model().folder).generate(prompts(50), 41).statistics
    assert (statistics.rounds, statistics.tokens_per_round) == (10, 4.0)
    assert statistics.acceptance_at == (1.0, 1.0, 1.0)
    assert (statistics.num_draft_tokens_verified, statistics.accepted_share, statistics.flushes) == (30, 1.0, 0)


def test_plain_decoding_has_no_acceptance(tiny_model, make_plan, prompts):
    statistics = runtime.load(make_plan("int8"), tiny_model().folder).generate(prompts(50), 41).statistics
    assert (statistics.rounds, statistics.tokens_per_round) == (40, 1.0)
    assert (statistics.acceptance, statistics.accepted_share, statistics.acceptance_at) == (0.0, 0.0, ())
    assert statistics.draft_s == 0.0
    assert statistics.flushes == 1  # 50 to 90 tokens cross 64 only


def test_an_abandoned_stream_frees_the_engine(engine, prompts):
    [ids] = prompts(50)
    stream = engine.stream(ids, 30)
    first = next(stream)
    with pytest.raises(WorkloadError, match="a generation is still running"):
        engine.generate(ids, 5)
    stream.close()
    assert engine.generate(ids, 5).tokens[0][0] == first


def test_engines_share_weights(engine, tiny_model, make_plan, prompts):
    folder = tiny_model(agreeable=True).folder
    other = runtime.load(make_plan("int4x2", batch=3), folder, weights=engine.weights)
    assert other.weights is engine.weights
    ids = prompts(50, 70)
    assert other.generate(ids, 20).tokens == engine.generate(ids, 20).tokens


def test_draft_weights_take_a_quarter_of_the_bits(tiny_model, make_plan):
    engine = runtime.load(make_plan("int4x2", 3, draft_bits=4, weight_group=64), tiny_model().folder)
    linear_bytes = engine.weights.bytes - engine.weights.embedding.nbytes
    assert engine.draft_weights.bytes - engine.weights.embedding.nbytes < linear_bytes / 4
    assert engine.draft_weights.embedding is engine.weights.embedding


@pytest.mark.slow  # test_host_memory.py compares the peak of a GGUF file's model with the prediction
def test_peak_memory_covers_weights_and_cache(make_plan, tiny_model):
    """In a process of its own: on a CPU the peak is what a process grows by, and reused memory is no growth."""
    model = tiny_model(vocab_size=50_000, hidden_size=512, tie_word_embeddings=True)
    code = (
        "import sys; from ridgeplan import runtime; from ridgeplan.roofline.plan.plan import Plan\n"
        "engine = runtime.load(Plan.from_json(sys.argv[1]), sys.argv[2])\n"
        "print(engine.generate([list(range(60))], 5).statistics.peak_memory_bytes)"
    )
    command = [sys.executable, "-c", code, make_plan("int4x2", 2).to_json(), model.folder]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    assert printed == "None" or 100e6 < int(printed) < 1e9  # its weights are 103 MB


def test_the_peak_is_each_generations_own(engine, prompts, monkeypatch):
    calls = []
    meter = SimpleNamespace(restart=lambda: calls.append("restart"), peak=lambda: PeakMemory(len(calls)))
    monkeypatch.setattr(engine, "_meter", meter)
    peaks = [engine.generate(prompts(50), 5).statistics.peak_memory_bytes for _ in "ab"]
    assert (calls, peaks) == (["restart", "restart"], [1, 2])


def test_a_closed_engine_says_so(tiny_model, make_plan, prompts):
    engine = runtime.load(make_plan(), tiny_model().folder)
    with pytest.raises(WorkloadError, match="no statistics yet"):
        _ = engine.statistics
    engine.close()
    with pytest.raises(WorkloadError, match="the engine is closed"):
        engine.generate(prompts(5), 5)


@pytest.mark.parametrize(
    "ids, new_tokens, message",
    [
        ([], 5, "no prompt was given"),
        ([[]], 5, "prompt 1 is empty"),
        ([[1], []], 5, "prompt 2 is empty"),
        ([1] * 129, 5, "the length of prompt 1 is 129; allowed by the plan: up to 128"),
        ([[1]] * 4, 5, "the batch is 4; allowed by the plan: up to 3"),
        ([1, 128], 5, "a token of prompt 1 is 128; allowed: a whole number from 0 to 127"),
        ([1, -1], 5, "a token of prompt 1 is -1"),
        ([1, 2.5], 5, "a token of prompt 1 is 2.5"),
        ([1], 129, "max_new_tokens is 129; allowed by the plan: up to 128"),
        ([1], 0, "max_new_tokens is 0; allowed: a whole number 1 or more"),
        ([1], True, "max_new_tokens is True"),
        ("text", 5, "prompts are of type str; allowed: token ids, not text"),
        (torch.ones(3), 5, "prompts are torch.float32 of 1 dimensions"),
        (b"text", 5, "prompts are of type bytes; allowed: token ids, not text"),
        ([b"text"], 5, "prompt 1 is of type bytes; allowed: token ids, not text"),
        ([[1], 2], 5, "prompt 2 is of type int; allowed: token ids"),
        ([torch.tensor(1)], 5, "prompt 1 is of type int; allowed: token ids"),
        ([1], 10**400, "max_new_tokens is a huge number; allowed by the plan: up to 128"),
    ],
)
def test_bad_requests_are_named_in_one_line(engine, ids, new_tokens, message):
    with pytest.raises(WorkloadError, match=message) as caught:
        engine.generate(ids, new_tokens)
    assert "\n" not in str(caught.value)


def test_a_stream_takes_one_prompt(engine):
    with pytest.raises(WorkloadError, match="stream got 2 prompts; allowed: 1"):
        next(engine.stream([[1], [2]], 5))


@pytest.mark.parametrize("kv, gamma", [("bf16", 0), ("bf16", 3), ("bf16+int4", 3), ("int8", 0), ("int4x2", 3)])
def test_prompts_may_fill_the_plan_exactly_in_any_row(kv, gamma, tiny_model, make_plan, prompts):
    folder, ids = tiny_model(agreeable=True).folder, prompts(128, 3, 128)
    tight = runtime.load(make_plan(kv, gamma, context=128, new_tokens=40, batch=3), folder)
    roomy = runtime.load(make_plan(kv, gamma, context=256, new_tokens=99, batch=4), folder)
    assert tight.generate(ids, 40).tokens == roomy.generate(ids, 40).tokens
    # Fewer rows than the plan's after more of them: what those left behind has no effect.
    assert tight.generate(ids[:1], 40).tokens == roomy.generate(ids, 40).tokens[:1]


def test_a_tokenizer_that_is_not_there_is_a_model_error(engine):
    with pytest.raises(ModelError, match="cannot load the model"):
        _ = engine.tokenizer


@pytest.mark.parametrize("late", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_the_request_in_one_line(
    tiny_model, make_plan, prompts, monkeypatch, temperature, value, late
):
    """As weights with overflowing activations give them, in the second of two sequences."""
    engine = runtime.load(make_plan("int4x2", 2, batch=2), tiny_model().folder, device="cpu")
    head = engine.weights.head

    def broken(x):
        logits = head(x)
        if (logits.dim() == 3) == late:
            logits[-1] = value
        return logits

    ids = prompts(50, 60)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "weights", dataclasses.replace(engine.weights, head=broken))
        with pytest.raises(ModelError, match=r"^the model's logits are NaN or infinite for sequence \d, ") as error:
            engine.generate(ids, 20, SamplingParams(temperature))
    assert "\n" not in str(error.value)
    assert len(engine.generate(ids, 20).tokens[0]) == 20  # the engine is whole again


def test_a_plan_for_another_model_is_executed_with_a_warning(tiny_model, make_plan):
    plan = make_plan("int4x2", 2)
    other = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, model="meta-llama/Llama-3.1-8B"))
    with pytest.warns(UserWarning, match=r"the plan is for .*Llama-3.1-8B \(8.03B parameters\), but .* runs"):
        runtime.load(other, tiny_model().folder, device="cpu")


def test_a_plan_for_the_model_that_runs_says_nothing(tiny_model, make_plan, recwarn):
    folder, plan = tiny_model().folder, make_plan("int4x2", 2)
    for name in ("a name of someone's own", folder):
        named = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, model=name))
        runtime.load(named, folder, device="cpu")
    assert not recwarn


def test_teacher_forced_logits_are_those_of_generation(tiny_model, make_plan, prompts):
    plan = make_plan("int8", context=100, new_tokens=40)
    engine = runtime.load(plan, tiny_model().folder, device="cpu")
    (prompt,) = prompts(90)
    tokens = engine.generate(prompt, 40).tokens[0]
    assert engine.statistics.flushes > 0
    logits = engine.teacher_forced_logits([prompt], [tokens[:-1]])[0]
    assert logits.argmax(-1).tolist() == tokens
    # An engine whose last generation ended early in the cache is reset to the plan's whole context.
    engine.generate(prompt[:5], 2)
    assert torch.equal(engine.teacher_forced_logits([prompt], [tokens[:-1]])[0], logits)
    # Plans that draft are forced as well: their target is the same, and drafts do not matter.
    drafting = runtime.load(make_plan("int8", 3, context=100, new_tokens=40), tiny_model().folder, device="cpu")
    assert torch.equal(drafting.teacher_forced_logits([prompt], [tokens[:-1]])[0], logits)


def test_forced_requests_are_checked_like_generations(tiny_model, make_plan):
    engine = runtime.load(make_plan(context=8, new_tokens=4), tiny_model().folder, device="cpu")
    with pytest.raises(runtime.WorkloadError, match="max_new_tokens is 5; allowed by the plan: up to 4"):
        engine.teacher_forced_logits([[1, 2, 3]], [[4] * 4])[0]
    engine.close()
    with pytest.raises(runtime.WorkloadError, match="the engine is closed"):
        engine.teacher_forced_logits([[1, 2, 3]], [[4]])[0]
