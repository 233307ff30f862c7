"""The runtime on a CUDA device: the Triton path generates what the references generate."""

import statistics
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from peak_memory import MemoryCase, measure_peak

from ridgeplan import runtime
from ridgeplan.kernels.linear.weights import Int4Weight
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import HostPart
from ridgeplan.roofline.plan.policy import EVICTIONS
from ridgeplan.runtime.buffers import HostMemory
from ridgeplan.runtime.model.linear import Int4, LibraryInt4Weight
from ridgeplan.runtime.model.prefill_layer import Softmax, attend_in_place, causal_attention
from ridgeplan.runtime.quantization.gptq import quantize_weight


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
@pytest.mark.parametrize("kv, gamma", [("int4x2", 0), ("int4x2", 4), ("bf16+int4", 3), ("bf16", 0)])
def test_tiny_models_generate_the_same_tokens(family, kv, gamma, tiny_model, make_plan, prompts):
    folder = tiny_model(family, agreeable=True).folder
    ids = prompts(100, 37, 65)
    plan = make_plan(kv, gamma, batch=3)
    results = [
        runtime.load(plan, folder, device=device, dtype=torch.float32).generate(ids, 100) for device in ("cpu", "cuda")
    ]
    assert results[0].tokens == results[1].tokens
    assert results[1].statistics.peak_memory_bytes > 0
    assert results[1].statistics.decode_s > 0


@pytest.mark.gpu
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
        assert 0 < sparse.statistics.accepted < sparse.statistics.num_draft_tokens_verified


@pytest.mark.gpu
@pytest.mark.parametrize("gamma", [0, 4])
def test_rounds_read_late_end_where_they_should(gamma, tiny_model, make_plan, prompts):
    """Stop tokens, limits and abandoned streams, while the device is a round ahead of the host."""
    folder, ids = tiny_model(agreeable=True).folder, prompts(100, 37, 65)
    engine = runtime.load(make_plan("int4x2", gamma, batch=3), folder, device="cuda", dtype=torch.float32)
    generation = engine.generate(ids, 100).tokens
    stop = generation[0][40]
    stopped = engine.generate(ids, 100, runtime.SamplingParams(stop_token_ids=[stop])).tokens
    assert stopped == [row[: row.index(stop) + 1] if stop in row else row for row in generation]
    assert engine.generate(ids, 7).tokens == [row[:7] for row in generation]
    generated = engine.generate(ids[:1], 100).tokens[0]
    stream = engine.stream(ids[0], 100)
    assert [next(stream) for _ in range(10)] == generated[:10]
    stream.close()
    assert list(engine.stream(ids[0], 100)) == generated
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


@pytest.mark.gpu
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
            generation = engine.generate(ids, 100)
        assert generation.tokens == plain.tokens
        assert {gamma for gamma, rounds in enumerate(generation.statistics.rounds_at) if rounds} == set(gammas)
    assert engine.generate(ids, 100).tokens == plain.tokens
    sampling = runtime.SamplingParams(temperature=1.0, seed=3)
    first, second = (engine.generate(ids, 100, sampling) for _ in range(2))
    assert first.tokens == second.tokens
    assert first.statistics.rounds_at == second.statistics.rounds_at


@pytest.mark.gpu
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
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


@pytest.mark.gpu
def test_plans_that_do_not_fit_are_refused_before_anything_is_allocated(tiny_model, make_plan):
    folder = tiny_model().folder
    plan = make_plan(context=2**24 - 128, batch=4096)
    held = torch.cuda.memory_allocated()
    with pytest.raises(runtime.WorkloadError, match=r"the plan needs .* GB may be used; allowed: context up to \d+"):
        runtime.load(plan, folder, device="cuda")
    assert torch.cuda.memory_allocated() == held


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.parametrize("gamma", [0, 4])
def test_smollm2_generates_the_same_tokens(gamma, smollm2, make_plan, long_text):
    plan = make_plan("int4x2", gamma, context=600, group=128)
    engines = [runtime.load(plan, str(smollm2), device=d, dtype=torch.float32) for d in ("cpu", "cuda")]
    prompt = engines[0].tokenizer(long_text[30_000:40_000])["input_ids"][:600]
    expected, actual = (engine.generate(prompt, 80).tokens for engine in engines)
    assert actual == expected


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_tokens", [64, 256])
def test_bfloat16_prefill_chunks_agree(chunk_tokens, tiny_model, make_plan, prompts):
    from ridgeplan.runtime.model.prefill import prefill

    engine = runtime.load(make_plan(context=256), tiny_model().folder, device="cuda", dtype=torch.bfloat16)
    prompt = torch.tensor(prompts(200)[0], device="cuda")
    with torch.inference_mode():
        engine.cache.reset(1)
        full = prefill(engine.decoder, engine.weights, engine.cache, 0, prompt)
        chunked = prefill(engine.decoder, engine.weights, engine.cache, 0, prompt, chunk_tokens)
    assert (full - chunked).abs().max() < 0.05 * full.std()


@pytest.mark.gpu
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


# Prompts in chunks on a CUDA device: what the CPU generates, FlashAttention without a mask, and bounded memory.

POLICIES = [name for name, policy in EVICTIONS.items() if policy.chunked]


@pytest.mark.gpu
@pytest.mark.parametrize("kv, gamma", [("bf16", 0), ("bf16+int4", 3), ("int4x2", 4)])
@pytest.mark.parametrize("policy", POLICIES)
def test_chunked_prompts_generate_the_same_tokens(policy, kv, gamma, tiny_model, make_plan, prompts):
    folder, ids = tiny_model(agreeable=True).folder, prompts(128, 37, 65)
    plan = make_plan(kv, gamma, batch=3, evict=policy, budget=30, chunk=29)
    results = [
        runtime.load(plan, folder, device=device, dtype=torch.float32).generate(ids, 60) for device in ("cpu", "cuda")
    ]
    assert results[0].tokens == results[1].tokens


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, seen", [(4096, 5120), (4096, 36864), (1000, 1003), (8192, 12288)])
def test_a_chunks_attention_is_flash_attention_of_the_last_tokens(tokens, seen):
    """No mask of tokens x seen is formed; values are those of float32."""
    generator = torch.Generator("cuda").manual_seed(1)
    q, keys, values = (
        torch.randn(heads, count, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads, count in ((8, tokens), (2, seen), (2, seen))
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = causal_attention(q, keys, values, None)
    if tokens * seen > 1 << 26:  # bytes of a mask
        assert torch.cuda.max_memory_allocated() - before < 2 * output.nbytes + (8 << 20)
    last = q[:, -64:].float()
    logits = last @ keys.float().repeat_interleave(4, 0).mT / 128**0.5
    hidden = torch.ones(64, seen, device="cuda").triu(seen - 63).bool()
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values.float().repeat_interleave(4, 0)
    torch.testing.assert_close(output[:, -64:].float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 128])
@pytest.mark.parametrize("tokens, seen", [(1, 300), (1000, 1000), (3072, 4096), (4096, 4096)])
def test_sinks_take_flash_attention_in_16_bits(tokens, seen, window):
    """Heads of gpt-oss in two groups, from sinks that hardly matter to those that outweigh all tokens.

    Values are those of float32 in plain products on a CPU, whose scores would take more memory.
    """
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (
        torch.randn(size, generator=generator).bfloat16() for size in ((tokens, 16, 64), (2, seen, 64), (2, seen, 64))
    )
    softmax = Softmax(sinks=torch.linspace(-4, 10, 16))
    expected, actual = queries.float(), queries.cuda()
    attend_in_place(expected, keys.float(), values.float(), window, tokens, softmax)
    on_device = keys.cuda(), values.cuda(), window, tokens, Softmax(sinks=softmax.sinks.cuda())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend_in_place(actual, *on_device)
    assert torch.cuda.max_memory_allocated() - before < 3 * actual.nbytes + (8 << 20)
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=0.02, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_windows_take_flash_attention_in_16_bits(head_dim):
    """Gemma's have heads of 256 channels; values are those of float32 on a CPU."""
    q, keys, values = (torch.randn(heads, 1000, head_dim).bfloat16() for heads in (8, 2, 2))
    expected = causal_attention(q.float(), keys.float(), values.float(), 128)
    actual = causal_attention(q.cuda(), keys.cuda(), values.cuda(), 128)
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=0.02, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1000, 20000])
def test_prompts_of_wide_heads_attend_in_no_more_memory_than_their_output(tokens):
    """Heads of 512 channels, 8 of them to a key: no scores of tokens x tokens are formed."""
    generator = torch.Generator("cuda").manual_seed(1)
    q, keys, values = (
        torch.randn(heads, tokens, 512, device="cuda", dtype=torch.bfloat16, generator=generator) for heads in (8, 1, 1)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = causal_attention(q, keys, values, None)
    assert torch.cuda.max_memory_allocated() - before < 3 * output.nbytes + (8 << 20)
    expected = q[:, -64:].float() @ keys.float().mT / 512**0.5
    hidden = torch.ones(64, tokens, device="cuda").triu(tokens - 63).bool()
    expected = expected.masked_fill(hidden, -torch.inf).softmax(-1) @ values.float()
    torch.testing.assert_close(output[:, -64:].float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("policy, share", [("snapkv", 0.0), ("dapq-quantspec", 0.02)])
def test_the_peak_is_predicted_within_3_percent_and_does_not_grow(policy, share):
    shape = load_shape("Qwen2.5-0.5B")
    peaks = []
    for context in (1 << 16, 1 << 18):
        kept = share * (1 << 16) / context
        case = MemoryCase("Qwen2.5-0.5B", policy, context, 1, share=kept, chunk=4096)
        row = measure_peak(case, shape, torch.device("cuda"))
        assert row.predicted.peak == pytest.approx(row.measured.allocated, rel=0.03)
        peaks.append(row.measured.allocated)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


# Targets that read a selection of layers on the host of a CUDA device: graphs that load it, and without a limit.

LAYERS, BUDGET = 6, 64
CASES = [("bf16", "retrieval-head"), ("bf16", "quest"), ("bf16", "streamingllm"), ("bf16+int4", "progressive")]


def options_of(selection):
    """Settings with which a target reads no more than its budget."""
    return {"sinks": 2} | ({"keep_generated": False} if selection == "quest" else {})


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(agreeable=True, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def shape(model, shape_of):
    return shape_of(model.folder)


@pytest.mark.gpu
@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("kv, name", CASES)
def test_elastic_targets_generate_the_same_tokens(
    kv, name, gamma, elastic, model, shape, make_plan, limited, head_file, prompts
):
    target = {"target": name, "target_budget": BUDGET, "target_options": options_of(name)}
    drafts = {"codes": "full", "selection": name, "ratio": 0.2, "floor": 48, **options_of(name)} if gamma else {}
    plan = make_plan(kv, gamma, context=512, batch=3, **target, **drafts)
    placed, host_layers = limited(plan, shape, 1, HostPart.ALL, budget=BUDGET, cuda=True, prefetch=3, elastic=elastic)
    head = head_file(model) if name == "retrieval-head" else None

    def load(one):
        return runtime.load(one, model.folder, device="cuda", dtype=torch.float32, retrieval_head=head)

    plain, offloaded = load(replace(placed, placement=replace(placed.placement, memory_bytes=0))), load(placed)
    assert plain.cache.config.host_layers == 0
    assert offloaded.cache.config.host_layers == host_layers > 0
    for ids in (prompts(128, 70, 37), prompts(30, 99, 64)):  # the second replays the graph of the first
        generation = offloaded.generate(ids, 90)
        assert generation.tokens == plain.generate(ids, 90).tokens
        assert 0 < generation.statistics.loads <= generation.statistics.wanted_loads
    steps = offloaded.stream_batch(prompts(128, 70, 37), 90)
    for _ in range(10):
        next(steps)
    steps.close()
    assert offloaded.generate(ids, 90).tokens == generation.tokens


@pytest.mark.gpu
@pytest.mark.parametrize(("kv", "name"), [("bf16", None), ("int8", None), *CASES, ("bf16", "clusterkv")])
def test_forced_logits_of_a_graph_are_those_of_the_references(kv, name, model, make_plan, head_file, prompts):
    """Through flushes, twice, and with a generation between."""
    target = {"target": name, "target_budget": BUDGET, "target_options": {"sinks": 2}} if name else {}
    plan = make_plan(kv, context=512, batch=3, **target)
    head = head_file(model) if name == "retrieval-head" else None
    ids = prompts(128, 70, 37)
    after = [[(7 * row + 3 * step) % 60 for step in range(80)] for row in range(3)]
    reference, graphed = (
        runtime.load(plan, model.folder, device=device, dtype=torch.float32, retrieval_head=head)
        for device in ("cpu", "cuda")
    )
    expected = reference.teacher_forced_logits(ids, after)
    for _ in range(2):
        assert torch.allclose(graphed.teacher_forced_logits(ids, after).cpu(), expected, rtol=1e-3, atol=2e-3)
        assert graphed.generate(ids, 40).tokens == reference.generate(ids, 40).tokens


# Layers on the host of a CUDA device: graphs that copy them generate what graphs without a limit do.

OFFLOAD_LAYERS = 6


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model(agreeable=True, num_hidden_layers=OFFLOAD_LAYERS).folder


@pytest.fixture(scope="module")
def offload_shape(folder, shape_of):
    return shape_of(folder)


def load(plan, folder):
    return runtime.load(plan, folder, device="cuda", dtype=torch.float32)


@pytest.mark.gpu
def test_pinned_pages_are_read_and_written_by_address():
    memory = HostMemory.allocate(1 << 20, torch.device("cuda"))
    (view,) = memory.split([(torch.Size((1 << 18,)), torch.int32)])
    assert view.is_cuda
    view.copy_(torch.arange(1 << 18, device="cuda"))
    assert int(view.sum()) == sum(range(1 << 18))
    before = torch.cuda.memory_allocated()
    del memory, view
    assert torch.cuda.memory_allocated() == before  # it is the host's


@pytest.mark.gpu
@pytest.mark.parametrize("kv, gamma", [("int4x2", 4), ("int4x2", 0), ("bf16", 0), ("bf16", 2)])
@pytest.mark.parametrize("part", list(HostPart))
def test_offloaded_layers_generate_the_same_tokens(part, kv, gamma, folder, offload_shape, limited, make_plan, prompts):
    if part is HostPart.LOWER and kv == "bf16":
        kv, gamma = "int4x2", 1
    sparse = {"selection": "streamingllm", "ratio": 0.3, "floor": 40, "sinks": 2} if kv == "bf16" and gamma else {}
    plan = make_plan(kv, gamma, batch=3, **sparse)
    placed, host_layers = limited(plan, offload_shape, 1, part, 128, cuda=True)
    plain, offloaded = load(plan, folder), load(placed, folder)
    assert offloaded.cache.config.host_layers == host_layers > 0
    for ids in (prompts(128, 70, 37), prompts(30, 99, 64)):  # the second replays the graph of the first
        assert offloaded.generate(ids, 90).tokens == plain.generate(ids, 90).tokens


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["streamingllm", "quest"])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_layers_leave_while_a_target_reads_a_selection(kv, name, folder, offload_shape, limited, make_plan, prompts):
    plan = make_plan(
        kv, batch=2, context=64, new_tokens=400, target=name, target_budget=96, target_options=options_of(name)
    )
    placed, _ = limited(plan, offload_shape, 4, HostPart.ALL, 96, cuda=True, adaptive=True)
    roomy = replace(placed, placement=replace(placed.placement, memory_bytes=0))
    engine, ids = load(placed, folder), prompts(60, 37)
    expected = load(roomy, folder).generate(ids, 400).tokens
    for _ in range(2):
        assert engine.generate(ids, 400).tokens == expected
        assert engine.statistics.moved_layers > 1
        assert 0 < engine.statistics.loads < engine.statistics.wanted_loads


@pytest.mark.gpu
@pytest.mark.parametrize("gamma", [0, 3])
def test_layers_leave_while_tokens_are_generated(gamma, folder, offload_shape, limited, make_plan, prompts):
    plan, ids = make_plan("int4x2", gamma, batch=2, context=64, new_tokens=400), prompts(60, 37)
    placed, _ = limited(plan, offload_shape, 4, HostPart.ALL, cuda=True, adaptive=True)
    engine = load(placed, folder)
    expected = load(plan, folder).generate(ids, 400).tokens
    assert engine.generate(ids, 400).tokens == expected
    assert engine.statistics.moved_layers > 1
    steps = engine.stream_batch(ids, 400)
    for _ in range(40):
        next(steps)
    steps.close()
    assert engine.generate(ids, 400).tokens == expected


# Many rounds over mixed prompts on a CUDA device: memory does not grow and rounds do not slow down.

ROUNDS = 20_000


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "drafts", [{}, {"selection": "specattn", "floor": 64}, {"selection": "progressive", "floor": 64}]
)
def test_twenty_thousand_rounds_neither_grow_nor_drift(drafts, tiny_model, make_plan, prompts):
    plan = make_plan("int4x2", 3, context=512, new_tokens=1024, batch=4, **drafts)
    engine = runtime.load(plan, tiny_model(agreeable=True).folder, device="cuda", dtype=torch.bfloat16)
    mixes = [prompts(*lengths, seed=seed) for seed, lengths in enumerate([(500, 20, 130, 64), (7, 300, 41, 512)])]
    for mix in mixes:
        engine.generate(mix, 64)
    torch.cuda.synchronize()
    held, rounds, round_s = torch.cuda.memory_allocated(), 0, []
    while rounds < ROUNDS:
        figures = engine.generate(mixes[len(round_s) % 2], 1024).statistics
        # By the device's clock, which does not depend on what else the host does.
        round_s.append(figures.gamma * figures.draft_s + figures.verify_s + figures.flush_s / figures.rounds)
        rounds += figures.rounds
        assert torch.cuda.memory_allocated() == held
    third = len(round_s) // 3
    assert statistics.median(round_s[-third:]) < 1.05 * statistics.median(round_s[:third])
