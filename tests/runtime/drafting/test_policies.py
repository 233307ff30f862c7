"""Draft policies: a registry of what can run, and when the speculator asks them."""

import torch

from ridgeplan import runtime
from ridgeplan.roofline.plan.draft_selection import DRAFT_SELECTIONS
from ridgeplan.roofline.plan.plan import KVCache, Plan, Speculation, Workload
from ridgeplan.roofline.plan.support import missing_execution
from ridgeplan.runtime.policies import POLICIES
from ridgeplan.runtime.policies.base import AllTokens


def test_the_registry_holds_what_the_planner_takes_for_executable():
    def executable(kind):
        plan = Plan(Workload("m", "h", 64), kv=KVCache("int4x2"), speculation=Speculation(2, "full", kind()))
        return not missing_execution(plan)

    assert set(POLICIES) == {name for name, kind in DRAFT_SELECTIONS.items() if executable(kind)}


def test_a_policy_chooses_for_every_draft_of_a_round(tiny_model, make_plan, prompts, monkeypatch):
    asked = []

    class Watched(AllTokens):
        def draft_metadata(self, ahead, queries=1):
            metadata = super().draft_metadata(ahead, queries)
            asked.append((ahead, metadata.positions.tolist()))
            return metadata

    monkeypatch.setitem(POLICIES, "all", Watched)
    engine = runtime.load(make_plan("int4x2", 3), tiny_model().folder, device="cpu")
    rounds = engine.generate(prompts(50), 6).statistics.rounds
    assert len(asked) == 3 * rounds
    assert asked[:3] == [(0, [[50]]), (1, [[51]]), (2, [[52]])]
    assert torch.tensor([ahead for ahead, _ in asked]).view(rounds, 3).eq(torch.arange(3)).all()
