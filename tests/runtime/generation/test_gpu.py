"""The runtime on a CUDA device: the Triton path generates what the references generate."""

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.kernels.linear.quantized.int4_weight import Int4Weight
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
        patch.setattr("ridgeplan.runtime.engine.prefill", exhausted)
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
