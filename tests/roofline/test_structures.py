"""Models whose structure changes bytes: sliding windows, mixtures of experts, latent attention; counted by hand."""

import pytest

from ridgeplan.planner import PlanError, preset, resolve, workload_for
from ridgeplan.planner.lowering import strategy_of
from ridgeplan.planner.question import ask
from ridgeplan.planner.search import search
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import code_memory, full_kv, windowed_tokens
from ridgeplan.roofline.passes import PassTerms, decode_pass
from ridgeplan.roofline.plan.policies.base import unpriced

GEMMA, MIXTRAL, LITE = (load_shape(name) for name in ("gemma-3-27b-it", "Mixtral-8x7B-v0.1", "DeepSeek-V2-Lite"))


def read_bytes(shape, category, batch=1, context=32768, weight_bytes=2.0):
    """Bytes that one decode step reads in operations of a category."""
    terms = PassTerms(
        batch=batch, queries=1, quantized_tokens=0, full_tokens=context, bits=0, group=1, splits=1,
        weight_bytes=weight_bytes, head_bytes=2, element_bytes=2,
    )  # fmt: skip
    return sum(op.total.read_bytes for op in decode_pass(shape, terms) if op.category == category)


def test_gemma_reads_all_tokens_in_10_layers_and_1024_in_52() -> None:
    row = 2 * 16 * 128 * 2
    assert read_bytes(GEMMA, "attention", 2, 32768) == pytest.approx(2 * row * (10 * 32768 + 52 * 1024), rel=2e-3)


def test_gemma_stores_windows_and_mistral_as_this_package_does() -> None:
    """At 128k tokens: 10 layers of everything and 52 of 1024 tokens; Mistral's cache keeps every token of 32."""
    row = 2 * 16 * 128 * 2
    assert full_kv(GEMMA, 1, 131072, 2) == row * (10 * 131072 + 52 * 1024)
    assert full_kv(GEMMA, 1, 512, 2) == row * 62 * 512  # shorter than the window
    mistral = load_shape("Mistral-7B-v0.1")
    assert full_kv(mistral, 1, 32768, 2) == 32 * 2 * 8 * 128 * 2 * 32768
    assert windowed_tokens(mistral, 32768) == 32 * 4096  # what an engine that frees windows would store
    # Codes: 4 bits and 4 bits of 2 x 16 x 128 numbers, 4 bytes a token and head for values, 4 x 128 / group for keys.
    per_token = 2 * 16 * 128 + 16 * (4 + 4 * 128 / 128)
    assert code_memory(GEMMA, 1, 131072, 2, 128) == per_token * (10 * 131072 + 52 * 1024)


def test_norms_after_blocks_are_priced() -> None:
    """Two more launches a layer, each of which reads and writes one row of 5376."""
    terms = PassTerms(
        batch=1, queries=1, quantized_tokens=0, full_tokens=1, bits=0, group=1, splits=1, weight_bytes=2, head_bytes=2,
        element_bytes=2,
    )  # fmt: skip
    (extra,) = (op for op in decode_pass(GEMMA, terms) if op.name == "block norms")
    assert (extra.launches, extra.cost.write_bytes) == (2 * 62, 2 * 5376)


def test_experts_that_a_batch_activates() -> None:
    """One token reads 2 of 8 experts; of two tokens the second meets each of the others with probability 1/4."""
    expert = 3 * 4096 * 14336 * 2
    attention = 2 * 4096 * (4096 + 1024) * 2
    router, head = 4096 * 8 * 2, 32000 * 4096 * 2
    for batch, activated in ((1, 2), (2, 2 + 6 / 4), (64, 8 * (1 - 0.75**64))):
        expected = 32 * (activated * expert + attention + router) + head
        assert read_bytes(MIXTRAL, "linear", batch) == pytest.approx(expected, rel=2e-3), batch


def test_latent_rows_are_read_once_for_all_heads() -> None:
    """27 layers of 512 + 64 numbers of 2 bytes a token."""
    assert read_bytes(LITE, "attention", 4, 65536) == pytest.approx(4 * 65536 * 27 * 576 * 2, rel=2e-3)


@pytest.mark.parametrize("name", ["specattn", "magicdec-quest", "snapkv", "specontext"])
def test_policies_that_choose_by_kv_head_are_refused_under_latent_attention(name: str) -> None:
    shape, profile = resolve("DeepSeek-V2-Lite", "h200")
    plan = preset(name, workload_for(shape, profile, 32768, 1024, 1, yarn=False))
    with pytest.raises(PlanError, match="one latent row for all heads; allowed: plans that read every token") as caught:
        strategy_of(plan, shape, Machine.of(profile), 1.0)
    assert "\n" not in str(caught.value)
    assert unpriced(plan, load_shape("Qwen3-8B")) is None


def test_a_search_leaves_out_what_cannot_be_priced() -> None:
    question = ask("DeepSeek-V2-Lite", "h200", 32768)
    found = search(question)
    assert {"autoregressive", "quantspec"} <= {one.name for one in found}
    assert all(unpriced(one.plan, question.shape) is None for one in found)
