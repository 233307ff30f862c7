"""What a recommendation says of itself."""

from dataclasses import replace

import pytest

from ridgeplan import planner
from ridgeplan.planner.render.text import crossover_context
from ridgeplan.roofline.catalog.models import load_shape


def explained(profile, context, **changes):
    answer = planner.recommend("meta-llama/Llama-3.1-8B", "h200", context, profile=profile, **changes)
    return answer, answer.explain()


@pytest.mark.parametrize(
    "context, batch, bottleneck",
    [
        (4096, 1, "the weights are the bottleneck"),
        (65536, 1, "the weights are the bottleneck"),
        (114688, 1, "the weights and the KV cache weigh about the same"),
        (98304, 2, "the KV cache is the bottleneck"),
        (131072, 4, "the KV cache is the bottleneck"),
    ],
    ids=["0.6 GB of KV", "8.7 GB of KV", "15.1 GB of KV", "25.9 GB of KV", "69 GB of KV"],  # 15 GB of weights
)
def test_the_bottleneck_is_what_a_plain_step_reads_most(h200_profile, context, batch, bottleneck):
    answer, text = explained(h200_profile, context, batch=batch)
    # Reading is all there is to a step at these sizes, and both classes reach 85% of the bandwidth.
    kv_bytes, weight_bytes = (context + 512) * 131_072 * batch, 2 * 7_504_658_432
    share = kv_bytes / (kv_bytes + weight_bytes)
    percent = int(text.split("plain decoding spends ")[1].split("%")[0])
    assert percent == pytest.approx(100 * share, abs=4)
    assert f"on attention: {bottleneck}\n" in text
    assert answer.name in text


@pytest.mark.parametrize(("context", "batch"), [(4096, 1), (131_072, 1), (32_768, 8)])
def test_weights_and_kv_cross_where_they_are_as_large(h200_profile, context, batch):
    """7.5 billion weights that products read, of 2 bytes, and 131,072 bytes of KV a token."""
    answer, text = explained(h200_profile, context, batch=batch)
    crossover = crossover_context(answer.baseline, answer.shape, answer.plan.workload)
    expected = 2 * 7_504_658_432 / 131_072 / batch
    assert crossover == pytest.approx(expected, rel=0.03)  # queries and partial results are read, too
    tokens = text.split("gain more than of KV up to about ")[1].split(" tokens")[0]
    assert int(tokens.replace(",", "")) == pytest.approx(crossover, rel=0.005)


@pytest.mark.parametrize("context", [2048, 16_384])
def test_kv_within_a_window_never_outweighs_the_weights(h200_profile, context):
    """At most 4096 tokens of 131,072 bytes, 0.5 GB, beside 14 GB of weights."""
    text = planner.recommend("mistralai/Mistral-7B-v0.1", "h200", context, profile=h200_profile).explain()
    assert "fewer bits of weights gain more than of KV at any context\n" in text


@pytest.mark.parametrize("context", [2048, 16_384])
def test_of_layers_with_and_without_a_window_both_kinds_count(h200_profile, context):
    """7,110,393,856 weights that products read. Each layer holds 4096 bytes of KV a token, half of them up to 4096."""
    shape = replace(load_shape("mistralai/Mistral-7B-v0.1"), window_layers=16)
    answer = planner.recommend(shape, "h200", context, batch=16, profile=h200_profile)
    layers_bytes = 16 * 16 * 4096
    expected = (2 * 7_110_393_856 - layers_bytes * 4096) / layers_bytes
    crossover = crossover_context(answer.baseline, shape, answer.plan.workload)
    assert crossover == pytest.approx(expected, rel=0.03)


def test_it_names_the_rounds_arithmetic_and_the_memory(h200_profile):
    answer, text = explained(h200_profile, 131072)
    predicted = answer.predicted
    assert f"drafts {predicted.gamma} x " in text
    assert f"yields {predicted.tokens_per_round:.2f} tokens" in text
    assert f"{predicted.speedup:.2f}x plain decoding" in text
    gigabytes = predicted.best.peak_memory_bytes / 1e9
    assert f"peak memory {gigabytes:.3g} GB of {answer.memory_limit_bytes / 1e9:.3g} GB" in text
    assert "gives up: INT8 KV" in text
    assert text.count("\n  not ") == 5


def test_plain_decoding_has_no_round(h200_profile):
    _, text = explained(h200_profile, 131072, quality="exact", objective="memory")
    assert "no speculation: every step is the target's own" in text


def test_times_have_three_digits_and_no_exponent(h200_profile):
    roomy = replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=10**15))
    _, text = explained(roomy, 2048, batch=4096)
    assert "e+" not in text
