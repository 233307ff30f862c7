"""Pages of Streamlit start fast enough for tests."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from streamlit.components.v2 import manifest_scanner

from ridgeplan import planner
from ridgeplan.planner import NothingFits, Recommendation
from ridgeplan.roofline.catalog.profile import Profile


@pytest.fixture(scope="session")
def answers() -> dict[str, Recommendation | NothingFits]:
    """What the planner answered to the questions of all pages."""
    return {}


@pytest.fixture(autouse=True)
def questions_answered_once(
    only_profile: Profile, answers: dict[str, Recommendation | NothingFits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run of a page asks the planner again, mostly what another run asked; "auto" is whatever a test makes it."""
    recommend = planner.recommend

    def answer(*question: Any, **options: Any) -> Recommendation:
        asked = repr((question, options))
        if "auto" in question or asked not in answers:
            try:
                answers[asked] = recommend(*question, **options)
            except NothingFits as error:
                answers[asked] = error
        known = answers[asked]
        if isinstance(known, NothingFits):
            raise known
        return known

    monkeypatch.setattr(planner, "recommend", answer)


@pytest.fixture(scope="session", autouse=True)
def packages_scanned_once() -> Iterator[None]:
    """Every page that starts would look for components in all installed packages, which takes longer than the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        yield
