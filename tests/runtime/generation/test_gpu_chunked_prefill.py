"""Prompts in chunks on a CUDA device: what the CPU generates, FlashAttention without a mask, and bounded memory."""

import pytest
import torch
from peak_memory import MemoryCase, measure_peak

from ridgeplan import runtime
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.policies import EVICTIONS
from ridgeplan.runtime.model.prefill import causal_attention

pytestmark = pytest.mark.gpu

POLICIES = [name for name, policy in EVICTIONS.items() if policy.chunked]


@pytest.mark.parametrize("kv, gamma", [("bf16", 0), ("bf16+int4", 3), ("int4x2", 4)])
@pytest.mark.parametrize("policy", POLICIES)
def test_tiny_models_generate_the_same_tokens(policy, kv, gamma, tiny_model, make_plan, prompts):
    folder, ids = tiny_model(agreeable=True).folder, prompts(128, 37, 65)
    plan = make_plan(kv, gamma, batch=3, evict=policy, budget=30, chunk=29)
    results = [
        runtime.load(plan, folder, device=device, dtype=torch.float32).generate(ids, 60) for device in ("cpu", "cuda")
    ]
    assert results[0].tokens == results[1].tokens


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
    found = causal_attention(q, keys, values, None)
    if tokens * seen > 1 << 26:  # bytes of a mask
        assert torch.cuda.max_memory_allocated() - before < 2 * found.nbytes + (8 << 20)
    last = q[:, -64:].float()
    logits = last @ keys.float().repeat_interleave(4, 0).mT / 128**0.5
    hidden = torch.ones(64, seen, device="cuda").triu(seen - 63).bool()
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values.float().repeat_interleave(4, 0)
    torch.testing.assert_close(found[:, -64:].float(), expected, rtol=0.02, atol=0.02)


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
