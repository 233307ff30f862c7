"""Drafters below the self-drafts: expected tokens of their rounds, and what their proposals cost.

A drafter has proposals before a share `hit` of the passes; given that, each proposal is accepted with conditional
probability `proposal_acceptance`. Acceptance by the tiers above is taken as independent of it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Term, is_symbolic, maximum, minimum
from ridgeplan.roofline.execution import MAX_GAMMA
from ridgeplan.roofline.host_link import small_kernel_seconds
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import fuse_params, head_step_params
from ridgeplan.roofline.strategy import HEAD_VOCAB, Strategy

LOOKUP_KERNELS = 2  # one searches, one copies what followed
HEAD_KERNELS = 15  # small ones of a step: norms, rotary embedding, the map to the target's vocabulary, a choice
FOLLOW_KERNELS = 20  # with which a head takes up what passes left since it last proposed
CPU_LOOKUP_PASSES = 12  # over a text: comparisons, shifts and ranks, each an operation of torch


def proposes(strategy: Strategy) -> bool:
    """Whether a strategy, or any of several, has a drafter."""
    return is_symbolic(strategy.proposals) or bool(np.any(strategy.proposals))


def pass_tokens(hit: Term, proposal_acceptance: Term, depth: Term) -> Term:
    """Expected tokens of a pass that verifies `depth` proposals: 1 + h (b + b^2 + ... + b^depth).

    The pass draws one token of its own (Leviathan et al., Eq 1).
    """
    below_one = _below_one(proposal_acceptance)
    return 1 + hit * below_one * (1 - below_one**depth) / (1 - below_one)


def cascade_tokens(acceptance: Term, hit: Term, proposal_acceptance: Term, depth: Term, passes: Term) -> Term:
    """Expected tokens of a round whose `passes` passes of the self-draft verify proposals, and the target their drafts.

    A pass drafts 1 + A tokens, P(A >= i) = h b^i, and the target accepts each with probability a. With N drafts a round
    has (1 - a^(N + 1)) / (1 - a) tokens; its mean needs E[a^A] = 1 - (1 - a) h b (1 - (a b)^depth) / (1 - a b).
    """
    a, b = _below_one(acceptance), _below_one(proposal_acceptance)
    mean_power = 1 - (1 - a) * hit * b * (1 - (a * b) ** depth) / (1 - a * b)
    return (1 - a * (a * mean_power) ** passes) / (1 - a)


def capped_cascade_tokens(
    acceptance: Term, hit: Term, proposal_acceptance: Term, depth: Term, passes: Term, gamma: Term
) -> Term:
    """`cascade_tokens` of rounds with at most `gamma` drafts, of numbers or arrays: 1 + sum of a^j P(N >= j)."""
    a, *sizes = np.broadcast_arrays(acceptance, hit, proposal_acceptance, depth, passes, gamma)
    rows = np.stack([size.ravel() for size in sizes], axis=1).astype(float)
    distinct, index = np.unique(rows, axis=0, return_inverse=True)
    chances = np.array([chances_of_drafts(h, b, int(k), int(m), int(g)) for h, b, k, m, g in distinct])
    powers = np.asarray(a, dtype=float)[..., None] ** np.arange(1, MAX_GAMMA + 1)
    return 1 + (powers * chances[index.reshape(a.shape)]).sum(-1)


@lru_cache(maxsize=4096)
def chances_of_drafts(hit: float, proposal_acceptance: float, depth: int, passes: int, gamma: int) -> np.ndarray:
    """P(N >= j) of the drafts N of a round, for j from 1 to MAX_GAMMA; 0 beyond gamma."""
    at_least = np.array([1.0, *(hit * proposal_acceptance**place for place in range(1, depth + 1)), 0.0])
    of_pass = np.array([0.0, *(at_least[:-1] - at_least[1:])])
    drafts = np.array([1.0])
    for _ in range(passes):
        drafts = np.convolve(drafts, of_pass)
    reached = np.zeros(MAX_GAMMA)
    tail = np.cumsum(drafts[::-1])[::-1][1 : gamma + 1]
    reached[: len(tail)] = tail
    return reached


def proposed_tokens(strategy: Strategy) -> Term:
    """Tokens of a round of a strategy with a drafter, before any loss at flush boundaries."""
    to_target = pass_tokens(strategy.hit, strategy.acceptance, strategy.gamma)
    terms = strategy.acceptance, strategy.hit, strategy.proposal_acceptance, strategy.proposals, strategy.cascade_passes
    capped = not any(map(is_symbolic, (*terms, strategy.gamma)))
    through_drafts = capped_cascade_tokens(*terms, strategy.gamma) if capped else cascade_tokens(*terms)
    return strategy.cascades * through_drafts + (1 - strategy.cascades) * to_target


def proposal_seconds(shape: ModelShape, machine: Machine, strategy: Strategy, tokens: Term, choice_s: Term) -> Term:
    """All proposals of a round over texts of `tokens` tokens; 0 without a drafter.

    A suffix is looked up once a pass, and a head takes a step for each token that it proposes, with a choice from
    logits over the model's vocabulary in `choice_s`. A block drafter's one step is priced like a head's.
    """
    lookups = maximum(strategy.cascade_passes, 1)
    lookup = ops.suffix_lookup(strategy.batch, tokens)
    passes = machine.asynchronous + (1 - machine.asynchronous) * CPU_LOOKUP_PASSES
    lookup_s = LOOKUP_KERNELS * small_kernel_seconds(machine) + passes * lookup.bytes / machine.bandwidth_bytes_per_s
    steps = strategy.proposes_block + (1 - strategy.proposes_block) * maximum(strategy.proposals, 1)
    read = minimum(tokens, strategy.head_window)
    step_s = head_step_seconds(shape, machine, strategy.batch, read, strategy.head_vocab)
    follow_s = _weight_seconds(machine, fuse_params(shape)) + FOLLOW_KERNELS * small_kernel_seconds(machine)
    head_s = follow_s + steps * (step_s + choice_s)
    return strategy.proposing * lookups * ((1 - strategy.uses_head) * lookup_s + strategy.uses_head * head_s)


def head_step_seconds(
    shape: ModelShape, machine: Machine, batch: Term, tokens: Term, draft_vocab: Term = HEAD_VOCAB
) -> Term:
    """One step of a one-layer head in 16 bits, which reads the keys and values of `tokens` tokens (EAGLE-3, section 3).

    Its attention takes the token's embedding beside the hidden state, and its output head has `draft_vocab` tokens.
    """
    kv_bytes = batch * tokens * 2 * shape.kv_width * machine.element_bytes
    kv_s = kv_bytes / (machine.bandwidth_bytes_per_s * machine.rates["attention"].bandwidth_utilization)
    weights_s = _weight_seconds(machine, head_step_params(shape, draft_vocab))
    return weights_s + kv_s + HEAD_KERNELS * small_kernel_seconds(machine)


def _weight_seconds(machine: Machine, params: Term) -> Term:
    rate = machine.bandwidth_bytes_per_s * machine.rates["linear"].bandwidth_utilization
    return params * machine.element_bytes / rate


def _below_one(acceptance: Term) -> Term:
    return acceptance if is_symbolic(acceptance) else minimum(acceptance, 1 - 1e-9)
