"""`ridgeplan quality`: its file, what it goes on from, its errors, and that recommend and estimate show it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.planner.quality import FIDELITY, read_rows
from ridgeplan.roofline.catalog.profile import user_quality_path
from ridgeplan.roofline.plan.plan import Plan, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.validate.quality import ruler_questions
from ridgeplan.validate.quality.ruler_questions import NoQuestions

TEXT = "It was the best of times. It was the worst of times. It was the age of wisdom. " * 40
SIZES = ("--ctx", 1100, "--tasks", "niah_single_1", "--samples", 1, "--passages", 2, "--tokens", 8)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "cities.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ridgeplan.planner.quality.user_quality_path", user_quality_path)


@pytest.fixture
def run(invoke: Any, tiny_folder: Path, text: Path) -> Any:
    return lambda *arguments: invoke("quality", *arguments, "--model", tiny_folder, "--text", text, *SIZES)


def test_rows_are_saved_and_an_interrupted_run_goes_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = json.loads(run("int8", "--json").stdout)
    assert first["path"] == str(user_quality_path())
    saved = user_quality_path().read_text(encoding="utf-8")
    assert len(read_rows(saved)) == len(first["rows"]) == 12  # two plans, six measures
    monkeypatch.setattr(
        "ridgeplan.validate.quality.measure.load", lambda *_, **__: pytest.fail("it was measured again")
    )
    assert json.loads(run("int8", "--json").stdout) == first
    assert user_quality_path().read_text(encoding="utf-8") == saved


def test_rows_are_written_as_soon_as_they_are_measured(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise NotImplementedError("power failure")

    with monkeypatch.context() as patch:
        patch.setattr("ridgeplan.validate.quality.measure.answer_scores", broken)
        with pytest.raises(NotImplementedError):
            run("int8")
    assert [row.measure for row in read_rows(user_quality_path().read_text())][:2] == ["fidelity", "perplexity"]
    assert len(json.loads(run("int8", "--json").stdout)["rows"]) == 12


def test_the_table_has_a_line_for_every_plan_and_plans_may_be_files(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(Plan(Workload("tiny", "h200", 50)).to_json(), encoding="utf-8")
    printed = run(path, "int8", "quantspec-kv", "--output", tmp_path / "rows.json").stdout
    assert [printed.count(f"{name} ") for name in ("autoregressive", "int8", "quantspec-kv gamma 4")] == [1, 1, 1]
    assert f"saved to {tmp_path / 'rows.json'}" in printed
    assert not user_quality_path().exists()


def test_recommend_and_estimate_show_what_was_measured(run: Any, invoke: Any, tiny_folder: Path) -> None:
    command = ("estimate", tiny_folder, "--preset", "quantspec", "--gpu", "h200", "--ctx", 1000, "--new-tokens", 100)
    assert "[not measured here]" in " ".join(invoke(*command).stdout.split())  # as it is wrapped
    rows = json.loads(run("int8", "--json").stdout)["rows"]
    fidelity = next(row["value"] for row in rows if (row["plan"], row["measure"]) == ("int8", FIDELITY))
    (loss,) = json.loads(invoke(*command, "--json").stdout)["losses"]
    assert f"fidelity {fidelity:.3f}" in loss
    assert loss.endswith("at 1100 tokens of cities [measured]")
    assert f"quality cost: {loss}" in " ".join(invoke(*command).stdout.split())


def test_questions_that_cannot_be_had_are_skipped_with_one_line(
    invoke: Any, tiny_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline() -> None:
        raise NoQuestions("no network here")

    monkeypatch.setattr(ruler_questions, "question_sets", offline)
    result = invoke(
        "quality", "autoregressive", "--model", tiny_folder, "--text", text, *SIZES, "--tasks", "qa_1", "qa_2"
    )
    assert result.stderr.startswith("skipped: qa_1, qa_2: no network here\n")  # progress follows on a slow machine
    assert "niah_single_1" in result.stdout


def estimated_only(tmp_path: Path) -> Path:
    """A plan that the runtime cannot execute."""
    path = tmp_path / "selection_after_eviction.json"
    evicting, choosing = (preset(name, Workload("tiny", "h200", 50)) for name in ("dapq", "quest"))
    path.write_text(replace(evicting, attention=choosing.attention).to_json(), encoding="utf-8")
    return path


def test_plans_that_are_only_estimated_are_skipped_with_one_line(run: Any, tmp_path: Path) -> None:
    result = run(estimated_only(tmp_path), "int8")
    (skipped,) = (line for line in result.stderr.splitlines() if line.startswith("skipped: "))
    assert "after an eviction" in skipped
    assert result.stdout.count("autoregressive ") == 1


def test_only_estimated_plans_are_refused(refuses: Any, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    command = ("quality", estimated_only(tmp_path), "--model", tiny_folder, "--text", text, "--tasks", "none")
    assert "cannot execute" in refuses(*command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'PLAN...'"),
        (("int9",), "unknown preset 'int9'. Did you mean int8"),
        (("int8", "--budgets", "64", "--tasks", "niah"), "task is 'niah'; allowed: niah_single_1"),
        (("dapq", "--budgets", "0"), "Invalid value for '--budgets': 0 is not in the range 1<=x<="),
        (("int8", "--ctx", "100"), "context is 100; allowed: more than"),
        (("int8", "--ctx", "20000", "--tasks", "none"), "beyond the model's limit of 16384"),
        (("int8", "--ctx", "400", "--tokens", "8", "--tasks", "cwe"), "cwe takes"),
        (("int8", "--ctx", "9000", "--tasks", "none"), "needed: "),
        (("int8", "--passages", "0"), "passages is 0"),
        (("int8", "--output", "/nowhere/rows.json"), "cannot write '/nowhere/rows.json'"),
        (("/nowhere/plan.json",), "unknown preset"),
    ],
)
def test_mistakes_are_one_line(
    refuses: Any, tiny_folder: Path, text: Path, arguments: tuple[str, ...], message: str
) -> None:
    sizes = () if "--tasks" in arguments else ("--tasks", "none")
    assert message in refuses("quality", *arguments, "--model", tiny_folder, "--text", text, *sizes)


def test_a_damaged_file_is_refused_and_not_overwritten(refuses: Any, tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"schema": 1, "rows": [{"plan": "int8"}]}', encoding="utf-8")
    before = path.read_bytes()
    assert "rows.json" in refuses("quality", "int8", "--model", tiny_folder, "--output", path)
    assert path.read_bytes() == before


def test_a_wrong_head_is_told_before_anything_is_measured(run: Any, tmp_path: Path) -> None:
    wrong, output = tmp_path / "head.safetensors", tmp_path / "rows.json"
    wrong.write_bytes(b"nonsense")
    result = run("specontext", "--retrieval-head", wrong, "--output", output)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cannot load the retrieval head" in result.stderr
    assert not output.exists()
