"""What a recommendation says of itself."""

from dataclasses import replace

import pytest

from ridgeplan import planner


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
    expected = 2 * 7_504_658_432 / 131_072 / batch
    assert answer.crossover_context == pytest.approx(expected, rel=0.03)  # queries and partial results are read, too
    tokens = text.split("gain more than of KV up to about ")[1].split(" tokens")[0]
    assert int(tokens.replace(",", "")) == pytest.approx(answer.crossover_context, abs=500)


def test_it_names_the_rounds_arithmetic_and_the_memory(h200_profile):
    answer, text = explained(h200_profile, 131072)
    predicted = answer.predicted
    assert f"drafts {predicted.gamma} x " in text
    assert f"yields {predicted.tokens_per_round:.2f} tokens" in text
    assert f"{predicted.speedup:.2f}x plain decoding" in text
    gib = predicted.best.peak_memory_bytes / 2**30
    assert f"peak memory {gib:.2f} GiB of {answer.memory_limit_bytes / 2**30:.2f} GiB" in text
    assert "gives up: INT8 KV" in text
    assert text.count("\n  not ") == 5


def test_plain_decoding_has_no_round(h200_profile):
    _, text = explained(h200_profile, 131072, quality="exact", objective="memory")
    assert "no speculation: every step is the target's own" in text


def test_times_have_three_digits_and_no_exponent(h200_profile):
    roomy = replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=10**15))
    _, text = explained(roomy, 2048, batch=4096)
    assert "e+" not in text
