"""CUDA kernel of top-k and top-p: its variants anywhere, its results and capture on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.sampling import draw, filter_logits, rejection_sample
from ridgeplan.kernels.sampling.cuda import (
    CLUSTERS,
    MAX_LOADS,
    PACK_BYTES,
    THREADS,
    TWO_CTA_LOADS,
    TopKTopPKernel,
    find_filter_kernel,
    variant_of,
)
from ridgeplan.kernels.sampling.reference import Distribution

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HOPPER_CTA_BYTES, HISTOGRAM_BYTES = 227 * 1024, 17 * 1024  # of shared memory
VOCABS = (151_936, 128_256, 50_257, 1_000)


@pytest.mark.parametrize("vocab", [262_144, *VOCABS, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cluster_holds_a_row(dtype: torch.dtype, vocab: int) -> None:
    variant = variant_of(torch.empty(1, vocab, dtype=dtype, device="meta"))
    pass_bytes, row_bytes = variant.cluster * THREADS * PACK_BYTES, vocab * dtype.itemsize
    assert 0 <= variant.loads(vocab) * pass_bytes - row_bytes < pass_bytes
    assert variant.loads(vocab) <= (TWO_CTA_LOADS if variant.cluster == min(CLUSTERS) else MAX_LOADS)
    assert MAX_LOADS * THREADS * PACK_BYTES + HISTOGRAM_BYTES <= HOPPER_CTA_BYTES
    assert 2 * (TWO_CTA_LOADS * THREADS * PACK_BYTES + HISTOGRAM_BYTES) <= HOPPER_CTA_BYTES


def test_rows_take_four_ctas_as_long_as_two_fit_an_sm() -> None:
    """12 packs of 8 logits for each of 4 x 512 threads."""
    maximum = 12 * 8 * 4 * 512
    clusters = [
        variant_of(torch.empty(1, vocab, dtype=torch.bfloat16, device="meta")).cluster
        for vocab in (maximum, maximum + 1)
    ]
    assert clusters == [4, 8]


def test_cpu_logits_are_left_to_the_reference() -> None:
    assert find_filter_kernel(torch.zeros(2, 8)) is None


def random_logits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (4 * torch.randn(*shape, device="cuda", generator=generator)).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 50, 3000, 60_000])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_top_k_keeps_what_the_reference_keeps(dtype: torch.dtype, vocab: int, top_k: int) -> None:
    logits = random_logits(7, vocab, dtype=dtype)
    actual, expected = (filter_logits(logits, 0.9, top_k, backend=b).probabilities() for b in ("auto", "reference"))
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.1), (None, 0.9), (None, 0.999999), (50, 0.9), (3000, 0.5)])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_top_p_keeps_what_the_reference_keeps(dtype: torch.dtype, vocab: int, top_k: int | None, top_p: float) -> None:
    logits = random_logits(7, vocab, dtype=dtype)
    actual, expected = (
        filter_logits(logits, 0.9, top_k, top_p, backend=b).probabilities() for b in ("auto", "reference")
    )
    # Where the mass reaches top_p within rounding, a token more or less may be kept.
    assert (actual - expected).abs().sum(-1).max() < 2e-5


@pytest.mark.gpu
def test_masked_tokens_stay_without_probability() -> None:
    logits = random_logits(3, 2000, dtype=torch.bfloat16)
    logits[:, 20:] = -torch.inf
    for top_k, top_p in [(50, None), (50, 0.9), (None, 1 - 1e-9)]:
        actual, expected = (
            filter_logits(logits, 1.0, top_k, top_p, backend=b).probabilities() for b in ("auto", "reference")
        )
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("top_k", "top_p"), [(50, None), (50, 0.9), (None, 0.9)])
def test_logits_that_are_no_numbers_give_tokens_of_the_vocabulary(
    value: float, top_k: int | None, top_p: float | None
) -> None:
    logits = random_logits(3, 2000, dtype=torch.bfloat16)
    logits[0] = value
    logits[1, 1000] = value
    choice = filter_logits(logits, 1.0, top_k, top_p)
    tokens = draw(choice, torch.rand(3, dtype=torch.float64, device="cuda"))
    assert ((tokens >= 0) & (tokens < 2000)).all()


@pytest.mark.gpu
def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, 1.0] * 100], device="cuda")
    for top_k, top_p in [(101, None), (200, None), (None, 0.6), (None, 0.75)]:
        assert (filter_logits(logits, 1.0, top_k, top_p).probabilities() > 0).sum() == 300


@pytest.mark.gpu
def test_a_round_of_sampling_is_captured_whole() -> None:
    rows, gamma, vocab = 3, 2, 128_256
    logits = random_logits(rows, gamma + 1, vocab, dtype=torch.bfloat16)
    uniform = torch.rand(gamma + 2, rows, dtype=torch.float64, device="cuda")
    max_tokens = torch.full((rows,), gamma + 1, dtype=torch.int32, device="cuda")

    def choice(x: Tensor) -> Distribution:
        filtered = filter_logits(x, 0.8, 50, 0.9)
        assert isinstance(filtered, Distribution)
        return filtered

    def body() -> Tensor:
        drafts = [choice(logits[:, j].contiguous()) for j in range(gamma)]
        drafted = torch.stack([draw(draft, uniform[j]) for j, draft in enumerate(drafts)], dim=1)
        return rejection_sample(choice(logits), drafts, drafted, max_tokens, uniform[:-1].T).tokens

    body()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = body()
    for seed in (1, 2):
        logits.copy_(random_logits(rows, gamma + 1, vocab, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        assert torch.equal(tokens, body())


@pytest.mark.parametrize(
    ("top_k", "top_p", "passed"),
    [
        (50, 0.9, (50, 0.9)),
        (None, 0.9, (0, 0.9)),
        (50, None, (50, 1.0)),
        (1024, 0.5, (0, 0.5)),
        (1023, None, (1023, 1.0)),
    ],
)
def test_the_launch_passes_filters(
    top_k: int | None, top_p: float | None, passed: tuple[int, float], launches: Any
) -> None:
    """What keeps all has a number too; a cluster of four CTAs takes a row, and each thread one pack of it."""
    logits = torch.zeros(2, 3, 1024, dtype=torch.bfloat16)
    output = TopKTopPKernel("filter", variant_of(logits)).run(logits, 0.5, top_k, top_p)
    ((kernel, grid, threads, params, shared_bytes, early),) = launches.asked
    assert (kernel, grid, threads, shared_bytes, early) == ("filter", (4 * 6, 1, 1), 512, 512 * 16, True)
    assert params.logits == logits.data_ptr()
    outputs = (output.peak, output.cutoff, output.mass)
    assert (params.peaks, params.cutoffs, params.masses) == tuple(tensor.data_ptr() for tensor in outputs)
    assert (params.vocab, params.loads, params.top_k, params.top_p) == (1024, 1, *passed)
    assert params.scale == pytest.approx(2.885390, rel=1e-6)  # log2(e) / 0.5
    assert output.logits is logits
    assert output.temperature == 0.5
