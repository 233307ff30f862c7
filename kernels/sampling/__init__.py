"""Sampling from logits and rejection sampling, without host synchronization and without storing probabilities.

Not here: a request's settings (runtime/sampling.py), and the execution of rounds (runtime/speculation).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.sampling.cuda import find_filter_kernel
from ridgeplan.kernels.sampling.reference import (
    Choice,
    Distribution,
    Greedy,
    VerifyResult,
    count_accepted,
    draw_reference,
    kth_largest,
    nucleus,
    rejection_sample_reference,
    row_uniform_reference,
    softmax_distribution_reference,
)
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost


def filter_logits(
    logits: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    *,
    backend: Backend = "auto",
) -> Choice:
    """The distribution of logits [..., vocab] in any floating type, which it references without a copy.

    Temperature 0 is greedy. top_k keeps the k likeliest tokens; of these, top_p keeps the smallest set of likeliest
    ones whose mass reaches top_p (in this order, as transformers does). Ties with the last kept token are all kept.
    """
    if temperature == 0:
        return greedy(logits, backend=backend)
    is_filtered = (top_k is not None and top_k < logits.shape[-1]) or (top_p is not None and top_p < 1)
    kernel = find_filter_kernel(logits) if is_filtered and backend == "auto" else None
    if kernel is not None:
        return kernel.run(logits, temperature, top_k, top_p)
    cutoff = None if top_k is None or top_k >= logits.shape[-1] else kth_largest(logits, top_k)
    distribution = softmax_distribution(logits, temperature, cutoff, backend=backend)
    return distribution if top_p is None or top_p == 1 else nucleus(distribution, top_p)


def softmax_distribution(
    logits: Tensor, temperature: float, cutoff: Tensor | None = None, *, backend: Backend = "auto"
) -> Distribution:
    """The distribution over logits [..., vocab] of at least `cutoff`, float32 [...], at a temperature above 0."""
    if not uses_gpu_kernel(backend, logits):
        return softmax_distribution_reference(logits, temperature, cutoff)
    from ridgeplan.kernels.sampling.triton import softmax_distribution_triton

    return softmax_distribution_triton(logits, temperature, cutoff)


def greedy(logits: Tensor, *, backend: Backend = "auto") -> Greedy:
    """The likeliest token of each row of logits [..., vocab]; of ties, the first."""
    if not uses_gpu_kernel(backend, logits):
        return Greedy(logits.argmax(-1))
    from ridgeplan.kernels.sampling.triton import greedy_triton

    return greedy_triton(logits)


def row_uniform(seed: Tensor, positions: Tensor, stream: int, draws: int, *, backend: Backend = "auto") -> Tensor:
    """Random numbers float64 [rows, draws] in [0, 1), by a counter: each depends on its key alone.

    Its key is seed, row, position, stream and the draw's number, so that a row's numbers do not depend on other rows.
    seed: int64 [], on the device, as a captured graph reads it when it is replayed. positions: int32 [rows]. stream:
    what the numbers are for; numbers of other streams are independent.
    """
    if not uses_gpu_kernel(backend, positions):
        return row_uniform_reference(seed, positions, stream, draws)
    from ridgeplan.kernels.sampling.triton import row_uniform_triton

    return row_uniform_triton(seed, positions, stream, draws)


def draw(choice: Choice, uniform: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Tokens int64 [...] by inverse CDF; uniform: float64 [...] in [0, 1). Never draws a token of probability 0."""
    if isinstance(choice, Greedy):
        return choice.best
    if not uses_gpu_kernel(backend, choice.logits):
        return draw_reference(choice, uniform)
    from ridgeplan.kernels.sampling.triton import draw_triton

    return draw_triton(choice, uniform)


def rejection_sample(
    target: Choice,
    drafts: Sequence[Choice],
    drafted: Tensor,
    max_tokens: Tensor,
    uniform: Tensor,
    drafted_counts: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> VerifyResult:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1), truncated at each row's `max_tokens`.

    target: of [rows, gamma + 1]; drafts: gamma choices of [rows] each; drafted: int64 [rows, gamma]; max_tokens: int32
    [rows], a row with 0 keeps nothing; uniform: float64 [rows, gamma + 1] in [0, 1), the last of which draws the
    target's token. drafted_counts: int64 [rows], the first drafts of each row that count; all by default.

    Draft j is accepted with probability min(1, p/q). At the first rejection the token is drawn from the residual
    distribution, (p - q)+ normalized; after a row's last draft one more from p. A row that reaches its `max_tokens`
    ends with an accepted draft. A greedy target accepts drafts that equal its own choice, however they were drawn.
    Under a sampled target the probability q of greedy drafts is 1.

    Raises ValueError when only some of the drafts are greedy under a sampled target.
    """
    if isinstance(target, Greedy):
        return _agree(target, drafted, max_tokens, drafted_counts, backend)
    sampled = [draft for draft in drafts if isinstance(draft, Distribution)]
    if 0 < len(sampled) < len(drafts):
        raise ValueError("some drafts are greedy and some are sampled; allowed: all of them alike")
    arguments = target, sampled if sampled or not drafts else None, drafted, max_tokens, uniform, drafted_counts
    if not uses_gpu_kernel(backend, target.logits):
        return rejection_sample_reference(*arguments)
    from ridgeplan.kernels.sampling.triton import rejection_sample_triton

    return rejection_sample_triton(*arguments)


def _agree(
    target: Greedy, drafted: Tensor, max_tokens: Tensor, drafted_counts: Tensor | None, backend: Backend
) -> VerifyResult:
    if not uses_gpu_kernel(backend, drafted):
        accepted, full, verified = count_accepted(drafted == target.best[:, :-1], max_tokens, drafted_counts)
        return VerifyResult(target.best, accepted + (~full).long(), accepted, verified)
    from ridgeplan.kernels.sampling.triton import agree_triton

    return agree_triton(target, drafted, max_tokens, drafted_counts)


def filter_cost(logits: Tensor) -> Cost:
    """Cost of `filter_logits` of [..., vocab], greedy or not, with or without top-k and top-p."""
    *rows, vocab = logits.shape
    return ops.filter_logits(prod(rows), vocab, logits.element_size())


def draw_cost(*logits: Tensor) -> Cost:
    """Cost of a draw for each row of [rows, vocab] from one distribution, or from the residual of two."""
    *rows, vocab = logits[0].shape
    return ops.draw(prod(rows), vocab, logits[0].element_size(), len(logits))
