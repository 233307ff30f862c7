"""`validate --suite` and `--report`: what belongs together, the files, and the tables."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from suite_results import REPORT, ROW

from ridgeplan.dashboards.cli import validate as module
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.validate.suite.report import SuiteReport, read_report
from ridgeplan.validate.suite.run import Question, heading


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(REPORT.to_json())
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """The questions that would have been measured; each has one step as its answer."""
    asked: list[Question] = []

    def run(question: Question) -> SuiteReport:
        asked.append(question)
        return replace(heading(question), rows=(replace(ROW, section=question.sections[0]),))

    monkeypatch.setattr(module, "_measured", run)
    return asked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to validate was given; allowed: one of PLAN, --suite, --report"),
        (("--suite", "smoke", "--report", "x.json"), "--suite and --report were given"),
        (("--suite", "huge"), "'huge' is not one of 'smoke', 'full'"),
        (("--suite", "smoke", "--agreement"), "--agreement cannot be given with --suite"),
        (("--suite", "smoke", "--max-new-tokens", 4), "--max-new-tokens cannot be given with --suite"),
        (("--suite", "smoke", "--only", "all"), "'all' is not one of"),
        (("--report", "x.json", "--model", "m"), "--model cannot be given with --report"),
        (("--report", "/nowhere/x.json"), "cannot read report '/nowhere/x.json'"),
        (("--suite", "smoke", "--output", "/nowhere/x.json"), "cannot write '/nowhere/x.json'"),
    ],
)
def test_what_does_not_belong_together_is_refused(refuses: Any, arguments: tuple[object, ...], words: str) -> None:
    assert words in refuses("validate", *arguments)


def test_options_of_the_suite_are_refused_beside_a_plan(refuses: Any, recommendation: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(recommendation.plan.to_json())
    assert "--only cannot be given with PLAN" in refuses("validate", path, "--only", "steps")
    assert "--model was given 2 times" in refuses("validate", path, "--model", "a", "--model", "b")


def test_parts_are_merged_in_one_file(
    invoke: Any, measured: list[Question], profile_path: Path, tmp_path: Path
) -> None:
    output = tmp_path / "results.json"
    for part in ("steps", "kernels", "steps"):
        arguments = ("validate", "--suite", "smoke", "--only", part, "--profile", profile_path, "--output", output)
        assert invoke(*arguments).exit_code == 0
    report = read_report(output)
    assert report.sections == ("kernels", "steps")
    assert sorted(row.section for row in report.rows) == ["kernels", "steps"]
    assert [question.only for question in measured] == [("steps",), ("kernels",), ("steps",)]
    assert all(question.models == () for question in measured)  # none is needed without generations


def test_a_file_of_another_machine_is_refused_before_anything_runs(
    refuses: Any, measured: list[Question], profile_path: Path, results: Path
) -> None:
    before = results.read_text()
    command = ("validate", "--suite", "full", "--only", "steps", "--profile", profile_path, "--output", results)
    assert "its device is 'a GPU'" in refuses(*command)
    assert not measured
    assert results.read_text() == before


def test_models_and_texts_reach_the_suite(
    invoke: Any, measured: list[Question], profile: Profile, profile_path: Path, tmp_path: Path
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"the text {name}")
    arguments = (
        "--model",
        "one",
        "--model",
        "two",
        "--prompt-file",
        tmp_path / "a.txt",
        "--other-text",
        tmp_path / "b.txt",
    )
    answer = invoke("validate", "--suite", "smoke", "--profile", profile_path, *arguments, "--json")
    question = measured[0]
    assert question == Question("smoke", (), profile, ("one", "two"), "the text a.txt", "the text b.txt")
    assert {"summary", "rows", "regret"} <= json.loads(answer.stdout).keys()


def test_a_report_is_shown_as_tables_json_and_html(invoke: Any, results: Path, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    shown = invoke("validate", "--report", results, "--html", html).stdout
    for words in ("plain step", "missed", "skipped: a case: why", "+10.0%", "20.0%"):
        assert words in shown
    assert html.read_text().startswith("<!doctype html>")
    data = json.loads(invoke("validate", "--report", results, "--json").stdout)
    assert SuiteReport.from_json(json.dumps({key: value for key, value in data.items() if key != "summary"})) == REPORT
    assert {one["name"] for one in data["summary"]} == {"steps", "plain step", "regret"}


def test_without_plotly_there_is_a_note_and_no_html(
    invoke: Any, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    answer = invoke("validate", "--report", results, "--html", tmp_path / "report.html")
    assert answer.exit_code == 0
    assert "ridgeplan validate --report" in answer.stderr
    assert not (tmp_path / "report.html").exists()
