"""Many rounds over mixed prompts on a CUDA device: memory does not grow and rounds do not slow down."""

import statistics

import pytest
import torch

from ridgeplan import runtime

ROUNDS = 20_000

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


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
