"""An engine's greedy tokens differ from its float32 twin's only in close calls."""

import pytest
import torch

from ridgeplan.planner.plan import Workload
from ridgeplan.planner.presets import preset
from ridgeplan.runtime import WorkloadError, load
from ridgeplan.validate.agreement import Agreement, agreement, forced_logits


def test_gaps_beyond_the_noise_are_counted():
    found = Agreement(tokens=100, gaps=(0.1, 0.5, 3.0), noise=0.1)
    assert (found.rate, found.beyond_noise) == (0.03, 1)


@pytest.mark.model
def test_a_bfloat16_engine_differs_only_in_close_calls(smollm2, long_text):
    plan = preset("int8", Workload("smollm2", "cpu", 200, 16))
    reference = load(plan, str(smollm2), device="cpu")
    engine = load(plan, str(smollm2), device="cpu", dtype=torch.bfloat16)
    prompt = reference.tokenizer(long_text[30_000:40_000])["input_ids"][:200]
    found = agreement(engine, reference, prompt, 16)
    assert found.tokens == 16
    assert 0 < found.noise < 1
    assert found.beyond_noise == 0
    exact = agreement(reference, reference, prompt, 16)
    assert (exact.gaps, exact.noise) == ((), 0.0)


@pytest.mark.model
def test_a_closed_twin_says_so(smollm2):
    engine = load(preset("int8", Workload("smollm2", "cpu", 64, 8)), str(smollm2), device="cpu")
    engine.close()
    with pytest.raises(WorkloadError, match="the engine is closed"):
        forced_logits(engine, [1, 2, 3], [4])


@pytest.mark.model
def test_forced_logits_are_those_of_generation(smollm2):
    engine = load(preset("int8", Workload("smollm2", "cpu", 250, 20)), str(smollm2), device="cpu")
    prompt = list(range(100, 350))
    tokens = engine.generate(prompt, 20).tokens[0]  # past the first flush
    assert forced_logits(engine, prompt, tokens[:-1]).argmax(-1).tolist() == tokens
