"""Draft policies: a registry of what can run, and when the speculator asks them."""

import torch

from ridgeplan import runtime
from ridgeplan.planner.plan import DraftSelection, Plan, Speculation, Workload
from ridgeplan.planner.support import missing_execution
from ridgeplan.runtime.drafting.policies import POLICIES, AllTokens


def test_the_registry_holds_what_the_planner_takes_for_executable():
    def executable(selection):
        ratio = 1.0 if selection is DraftSelection.ALL else 0.1
        return not missing_execution(Plan(Workload("m", "h", 64), speculation=Speculation(2, "full", selection, ratio)))

    assert set(POLICIES) == {selection for selection in DraftSelection if executable(selection)}


def test_a_policy_chooses_for_every_draft_of_a_round(tiny_model, make_plan, prompts, monkeypatch):
    asked = []

    class Watched(AllTokens):
        def select(self, cache, ahead):
            metadata = super().select(cache, ahead)
            asked.append((ahead, metadata.positions.tolist()))
            return metadata

    engine = runtime.load(make_plan("int4x2", 3), tiny_model().folder, device="cpu")
    monkeypatch.setitem(POLICIES, "all", Watched)
    rounds = engine.generate(prompts(50), 6).statistics.rounds
    assert len(asked) == 3 * rounds
    assert asked[:3] == [(0, [[50]]), (1, [[51]]), (2, [[52]])]
    assert torch.tensor([ahead for ahead, _ in asked]).view(rounds, 3).eq(torch.arange(3)).all()
