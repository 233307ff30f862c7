"""The runtime on a CUDA device: the Triton path generates what the references generate."""

from itertools import cycle

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.kernels.linear.weights import Int4Weight
from ridgeplan.runtime.model.linear import Int4, LibraryInt4Weight
from ridgeplan.runtime.quantization.gptq import quantize_weight

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv, gamma", [("int4x2", 0), ("int4x2", 4), ("bf16+int4", 3), ("bf16", 0)])
def test_tiny_models_generate_the_same_tokens(kv, gamma, tiny_model, make_plan, prompts):
    folder = tiny_model(agreeable=True).folder
    ids = prompts(100, 37, 65)
    plan = make_plan(kv, gamma, batch=3)
    results = [
        runtime.load(plan, folder, device=device, dtype=torch.float32).generate(ids, 100) for device in ("cpu", "cuda")
    ]
    assert results[0].tokens == results[1].tokens
    assert results[1].statistics.peak_memory_bytes > 0
    assert results[1].statistics.decode_s > 0


@pytest.mark.parametrize(
    "kv, codes, selection",
    [
        (*cache, name)
        for cache in (("int4x2", None), ("bf16+int4", None), ("int8", "full"), ("bf16", "full"))
        for name in ("streamingllm", "snapkv", "quest", "specextend", "specattn", "progressive", "oracle")
        if (cache[0], name) != ("bf16", "progressive")  # 2-bit keys are those of codes
    ],
)
def test_sparse_drafts_in_a_graph_change_nothing(kv, codes, selection, tiny_model, make_plan, prompts):
    """In two generations of different lengths, which share one graph."""
    folder, options = tiny_model(agreeable=True).folder, {"ratio": 0.2, "floor": 8, "sinks": 2, "recent": 6}
    plans = make_plan(kv, batch=3), make_plan(kv, 3, batch=3, codes=codes, selection=selection, **options)
    plain, sparse = (runtime.load(plan, folder, device="cuda", dtype=torch.float32) for plan in plans)
    for ids in (prompts(100, 37, 65), prompts(30, 99, 64)):
        assert sparse.generate(ids, 75).tokens == plain.generate(ids, 75).tokens
        assert 0 < sparse.statistics.accepted < sparse.statistics.judged


@pytest.mark.parametrize("gamma", [0, 4])
def test_rounds_read_late_end_where_they_should(gamma, tiny_model, make_plan, prompts):
    """Stop tokens, limits and abandoned streams, while the device is a round ahead of the host."""
    folder, ids = tiny_model(agreeable=True).folder, prompts(100, 37, 65)
    engine = runtime.load(make_plan("int4x2", gamma, batch=3), folder, device="cuda", dtype=torch.float32)
    whole = engine.generate(ids, 100).tokens
    stop = whole[0][40]
    stopped = engine.generate(ids, 100, runtime.SamplingParams(stop_token_ids=[stop])).tokens
    assert stopped == [row[: row.index(stop) + 1] if stop in row else row for row in whole]
    assert engine.generate(ids, 7).tokens == [row[:7] for row in whole]
    alone = engine.generate(ids[:1], 100).tokens[0]
    stream = engine.stream(ids[0], 100)
    assert [next(stream) for _ in range(10)] == alone[:10]
    stream.close()
    assert list(engine.stream(ids[0], 100)) == alone
    statistics = engine.statistics
    assert statistics.decoded == 99
    assert 0 < statistics.verify_s < statistics.decode_s
    assert 0 < statistics.idle_s < statistics.decode_s


class Forced:
    """Gammas in a given order, over and over."""

    def __init__(self, gammas):
        self._gammas = cycle(gammas)

    def next(self):
        return next(self._gammas)

    def add(self, gamma, rows):
        pass


@pytest.mark.parametrize("draft_bits", [16, 4])
def test_graphs_of_several_gammas_generate_what_plain_decoding_does(
    draft_bits, tiny_model, make_plan, prompts, h200_profile, monkeypatch
):
    """They share one pool of memory, so that each overwrites what the others left there."""
    folder, ids = tiny_model(agreeable=True).folder, prompts(100, 37, 65)
    options = {"device": "cuda", "dtype": torch.float32}
    plain = runtime.load(make_plan("int4x2", batch=3), folder, **options).generate(ids, 100)
    plan = make_plan("int4x2", 6, batch=3, draft_bits=draft_bits, adaptive=True)
    engine = runtime.load(plan, folder, profile=h200_profile, **options)
    for gammas in ([0, 6, 1, 4, 2], [6, 6, 0, 0, 0, 1]):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_schedule", lambda request, gammas=gammas: Forced(gammas))
            found = engine.generate(ids, 100)
        assert found.tokens == plain.tokens
        assert {gamma for gamma, rounds in enumerate(found.statistics.rounds_at) if rounds} == set(gammas)
    assert engine.generate(ids, 100).tokens == plain.tokens
    sampling = runtime.SamplingParams(temperature=1.0, seed=3)
    first, second = (engine.generate(ids, 100, sampling) for _ in range(2))
    assert first.tokens == second.tokens
    assert first.statistics.rounds_at == second.statistics.rounds_at


def test_graphs_of_several_gammas_take_the_memory_of_the_largest(tiny_model, make_plan, prompts, h200_profile):
    """Mostly logits: in pools of their own, rounds of 1, 2, 3, 5 and 7 queries would take 2.6 times as much.

    Of 24 sequences: an allocation of a megabyte may take 20 MB of torch's allocator, which must not decide.
    """
    folder, ids = tiny_model(vocab_size=262144).folder, prompts(100, 37, 65) * 8
    reserved = []
    for adaptive in (False, True):
        plan = make_plan("int4x2", 6, batch=24, adaptive=adaptive)
        engine = runtime.load(plan, folder, device="cuda", profile=h200_profile)
        before = graph_pool_bytes()
        engine.generate(ids, 20)
        reserved.append(graph_pool_bytes() - before)
        engine.close()
        del engine
    assert 0 < reserved[1] < 1.3 * reserved[0]


def graph_pool_bytes():
    """Memory of captured graphs' pools, apart from what other tests have left in the common one."""
    segments = torch.cuda.memory_snapshot()
    return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))


def test_plans_that_do_not_fit_are_refused_before_anything_is_allocated(tiny_model, make_plan):
    folder = tiny_model().folder
    plan = make_plan(context=2**24 - 128, batch=4096)
    held = torch.cuda.memory_allocated()
    with pytest.raises(runtime.WorkloadError, match=r"the plan needs .* GB may be used; allowed: context up to \d+"):
        runtime.load(plan, folder, device="cuda")
    assert torch.cuda.memory_allocated() == held


def test_an_engine_that_ran_out_of_memory_goes_on(tiny_model, make_plan, prompts, monkeypatch):
    engine = runtime.load(make_plan("int4x2", 2), tiny_model().folder, device="cuda", dtype=torch.float32)
    expected = engine.generate(prompts(60), 20).tokens

    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("ridgeplan.runtime.engine.prefill_all", exhausted)
        with pytest.raises(runtime.WorkloadError, match=r"out of memory: .* GB are free"):
            engine.generate(prompts(60), 20)
    assert engine.generate(prompts(60), 20).tokens == expected


@pytest.mark.model
@pytest.mark.parametrize("gamma", [0, 4])
def test_smollm2_generates_the_same_tokens(gamma, smollm2, make_plan, long_text):
    plan = make_plan("int4x2", gamma, context=600, group=128)
    engines = [runtime.load(plan, str(smollm2), device=d, dtype=torch.float32) for d in ("cpu", "cuda")]
    prompt = engines[0].tokenizer(long_text[30_000:40_000])["input_ids"][:600]
    expected, actual = (engine.generate(prompt, 80).tokens for engine in engines)
    assert actual == expected


@pytest.mark.parametrize("chunk_tokens", [64, 256])
def test_bfloat16_prefill_chunks_agree(chunk_tokens, tiny_model, make_plan, prompts):
    from ridgeplan.runtime.model.prefill import prefill

    engine = runtime.load(make_plan(context=256), tiny_model().folder, device="cuda", dtype=torch.bfloat16)
    prompt = torch.tensor(prompts(200)[0], device="cuda")
    with torch.inference_mode():
        engine.cache.reset(1)
        whole = prefill(engine.decoder, engine.weights, engine.cache, 0, prompt)
        chunked = prefill(engine.decoder, engine.weights, engine.cache, 0, prompt, chunk_tokens)
    assert (whole - chunked).abs().max() < 0.05 * whole.std()


@pytest.mark.parametrize("outputs, inputs, group", [(576, 576, 64), (4096, 4096, 128), (3072, 1536, 128)])
@pytest.mark.parametrize("rows", [1, 5])
def test_int4_weights_equal_the_cpu(outputs, inputs, group, rows):
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(rows, inputs, generator=generator)
    # Quantized once: where two grids are equally good, devices may choose differently.
    parts = quantize_weight(weight, group)
    expected = Int4(LibraryInt4Weight.pack(*parts))(x)
    actual = Int4(Int4Weight.pack(*(part.cuda() for part in parts)))(x.cuda()).cpu()
    assert (actual - expected).abs().max() < 0.02 * expected.std() + 0.01 * expected.abs().max()
