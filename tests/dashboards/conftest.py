"""A calibrated machine without measuring one: the H200 of the catalog with round utilizations."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from ridgeplan import planner
from ridgeplan.dashboards.cli import main
from ridgeplan.planner import NothingFits, Recommendation, Workload, preset
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.profile import Profile, Rates

TEMPLATE = "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}{% endfor %}<a>"
MODEL, CONTEXT = "meta-llama/Llama-3.1-8B", 120_000
Invoke = Callable[..., Result]


@pytest.fixture(scope="session")
def profile() -> Profile:
    """Rates of the few classes that all others are related to."""
    memory_bound, small = Rates(0.8, 0.6, 3e-6, 0.05), Rates(0.3, 0.6, 2e-6, 0.1)
    classes = {"linear": memory_bound, "linear_int4": Rates(0.6, 0.5, 3e-6, 0.05), "elementwise": small}
    return Profile(load_hardware("h200"), "a test's H200", {"torch": "none"}, "2026-11-21", classes)


@pytest.fixture(scope="session")
def recommendation(profile: Profile) -> Recommendation:
    """Llama-3.1-8B on the H200 at a long context, where speculation wins."""
    return planner.recommend(MODEL, "h200", CONTEXT, profile=profile)


@pytest.fixture(autouse=True)
def no_busy_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the number of threads apart from what else the machine does."""
    monkeypatch.setattr("ridgeplan.dashboards.cli.threads.STATISTICS", Path("nowhere"))


@pytest.fixture
def only_profile(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """The test's profile as the only one that the package ships."""
    monkeypatch.setattr("ridgeplan.planner.resolution.shipped_profiles", lambda: (profile,))
    return profile


@pytest.fixture(scope="session")
def answers() -> dict[str, Recommendation | NothingFits]:
    """What the planner answered to questions on the profile of all tests."""
    return {}


@pytest.fixture
def questions_answered_once(
    only_profile: Profile, answers: dict[str, Recommendation | NothingFits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run of a page, and each form of an answer, asks the planner again, mostly what another test asked.

    What "auto" is depends on the test.
    """
    recommend = planner.recommend

    def answer(*question: Any, **options: Any) -> Recommendation:
        key = repr((question, options))
        if "auto" in question or key not in answers:
            try:
                answers[key] = recommend(*question, **options)
            except NothingFits as error:
                answers[key] = error
        outcome = answers[key]
        if isinstance(outcome, NothingFits):
            raise outcome
        return outcome

    monkeypatch.setattr(planner, "recommend", answer)


@pytest.fixture
def profile_path(profile: Profile, tmp_path: Path) -> Path:
    """The test's profile as a file."""
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json(), encoding="utf-8")
    return path


@pytest.fixture
def invoke(only_profile: Profile) -> Invoke:
    """Runs the command in this process; stdout and stderr apart."""

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        # A defect shows as itself, not as a wrong exit code.
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def refuses(invoke: Invoke) -> Callable[..., str]:
    """Runs a command that must fail; returns its one line on stderr."""

    def run(*arguments: object, code: int = 2) -> str:
        result = invoke(*arguments)
        assert result.exit_code == code, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        return click.unstyle(result.stderr)

    return run


@pytest.fixture(scope="session")
def chat_engine(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny model of bytes with a chat template, for prompts of up to 256 tokens."""
    import transformers

    from ridgeplan import runtime

    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("chat") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return runtime.load(preset("quantspec-kv", Workload("any", "here", 256, 64)), str(folder))
