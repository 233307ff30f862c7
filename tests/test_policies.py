"""What plans are told can be executed, and what the runtime has."""

from ridgeplan.roofline.plan.draft_selection import DRAFT_SELECTIONS
from ridgeplan.roofline.plan.policies import SELECTIONS
from ridgeplan.roofline.plan.policies.base import Role
from ridgeplan.runtime.policies import POLICIES
from ridgeplan.runtime.policies.base import DraftPolicy


def test_drafts_are_executed_by_the_policies_that_say_so() -> None:
    assert {name for name, policy in SELECTIONS.items() if Role.DRAFT in policy.executable} == set(POLICIES)


def test_every_policy_of_the_runtime_has_the_plans_name() -> None:
    for name, make in POLICIES.items():
        assert isinstance(make, type), name
        assert issubclass(make, DraftPolicy), name
        assert make.__name__ == DRAFT_SELECTIONS[name].__name__
