"""An engine's greedy tokens differ from those of its float32 reference only in close calls."""

from types import SimpleNamespace

import pytest
import torch

from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.runtime import load
from ridgeplan.validate.quality import fidelity as module
from ridgeplan.validate.quality.fidelity import Agreement, agreement, plan_agreement

PLAN = preset("int8", Workload("tiny", "cpu", 250, 20))


def test_gaps_beyond_the_noise_are_counted():
    found = Agreement(tokens=100, gaps=(0.1, 0.5, 3.0), noise=0.1)
    assert (found.rate, found.beyond_noise) == (0.03, 1)


def test_two_logits_move_so_the_noise_of_a_gap_is_larger_by_the_root_of_two():
    # Five deviations of the difference of two logits that each move by 0.1: 0.5 * sqrt(2) = 0.7071.
    assert Agreement(tokens=10, gaps=(0.70,), noise=0.1).beyond_noise == 0
    assert Agreement(tokens=10, gaps=(0.71,), noise=0.1).beyond_noise == 1


def test_gaps_are_the_references_and_noise_is_what_is_left_of_a_common_shift():
    exact = torch.tensor([[4.0, 1.0, 0.0], [2.0, 5.0, 1.0], [0.0, 1.5, 3.0]])
    # Shifted as a whole, which changes no token; then one logit moves, and with it the likeliest token of row 2.
    ours = exact + torch.tensor([[7.0], [-2.0], [5.0]])
    ours[2, 1] += 6.0
    logits = {"engine": ours, "reference": exact}
    asked = []

    def fake(name):
        def forced(prompt, tokens):
            asked.append((name, prompt, tokens))
            return logits[name]

        generated = SimpleNamespace(tokens=[[0, 1, 1]])
        return SimpleNamespace(forced_logits=forced, generate=lambda prompt, new_tokens: generated)

    found = agreement(fake("engine"), fake("reference"), [8, 9], 3)
    assert asked == [("engine", [8, 9], [0, 1]), ("reference", [8, 9], [0, 1])]
    assert found.tokens == 3
    assert found.gaps == (1.5,)  # of the reference's 3.0 and 1.5; the engine's own gap is 4.5
    # The move of 6 is 4 above its row's mean of 2, its two neighbours 2 below: (16 + 4 + 4) / 8, with 9 - 1 degrees.
    assert found.noise == pytest.approx(3**0.5)


def test_an_engine_agrees_with_itself_and_a_bfloat16_one_is_compared_with_float32(tiny_folder, monkeypatch):
    exact = load(PLAN, str(tiny_folder), device="cpu")
    prompt = list(range(200))
    found = agreement(exact, exact, prompt, 16)
    assert (found.tokens, found.gaps, found.noise) == (16, (), 0.0)
    rounded = load(PLAN, str(tiny_folder), device="cpu", dtype=torch.bfloat16)
    monkeypatch.setattr(
        module,
        "load",
        lambda *given, dtype, **named: load(*given, device="cpu", dtype=dtype or torch.bfloat16, **named),
    )
    assert plan_agreement(PLAN, str(tiny_folder), prompt, 16) == agreement(rounded, exact, prompt, 16)
    assert agreement(rounded, exact, prompt, 16).noise > 0


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
