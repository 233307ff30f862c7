"""`ridgeplan study drafts`: its JSON, its page, and its one-line errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.planner.acceptance import load_rows

TEXT = "It was the best of times, it was the worst of times. " * 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "cities.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_rows_go_to_json_and_to_a_page_that_loads_nothing(
    invoke: Any, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    output, html = tmp_path / "study.json", tmp_path / "study.html"
    shown = invoke("study", "drafts", "--model", tiny_folder, "--text", text, "--ctx", 270, "--tokens", 16,
                   "--ratios", 0.5, "--policies", "specattn", "progressive", "--formats", "bf16", "kv4",
                   "--output", output, "--html", html).stdout  # fmt: skip
    document = json.loads(output.read_text())
    cases = [(row["policy"], row["ratio"], row["format"]) for row in document["rows"]]
    sparse = [(name, 0.5, form) for name in ("specattn", "progressive") for form in ("bf16", "kv4")]
    assert cases == [("all", 1.0, "kv4"), *sparse]
    for row in document["rows"]:
        assert len(row["by_position"]) == 7
        assert row["mean"] == pytest.approx(sum(row["by_position"]) / 7)
        assert f"{row['mean']:.3f}" in shown
    page = html.read_text()
    assert page.count("<table>") == 1
    assert "https://" not in page.split("<body>")[1].replace("https://plot.ly", "")


def test_wrong_names_are_refused_before_anything_is_loaded(refuses: Any, text: Path) -> None:
    message = refuses("study", "drafts", "--text", text, "--policies", "best")
    assert "policy is 'best'; allowed: streamingllm" in message
    for tokens in (0, 8):  # a round is not counted
        message = refuses("study", "drafts", "--text", text, "--policies", "quest", "--tokens", tokens)
        assert f"tokens is {tokens}; allowed: a whole number from 16" in message
    assert "--text" in refuses("study", "drafts")


@pytest.fixture
def study(invoke: Any, tiny_folder: Path, text: Path, tmp_path: Path) -> Any:
    def run(*options: object) -> dict[str, Any]:
        output = tmp_path / "study.json"
        ran = invoke("study", "drafts", "--model", tiny_folder, "--text", text, "--ctx", 270, "--tokens", 16,
                     "--ratios", 0.5, "--formats", "bf16", "--output", output, *options)  # fmt: skip
        assert ran.exit_code == 0, ran.output
        return json.loads(output.read_text())

    return run


def test_a_resumed_study_keeps_its_rows_and_measures_what_they_lack(study: Any, tmp_path: Path) -> None:
    first = study("--policies", "specattn")
    (row,) = first["rows"]
    changed = {**row, "mean": 0.125}  # shows that it is kept, not measured again
    (tmp_path / "study.json").write_text(json.dumps({**first, "rows": [changed]}))
    both = study("--policies", "specattn", "quest", "--resume")
    assert both["rows"][0] == changed
    assert [one["policy"] for one in both["rows"]] == ["specattn", "quest"]
    assert [one["policy"] for one in study("--policies", "quest")["rows"]] == ["quest"]  # without --resume, anew


def test_each_context_is_saved_before_the_next_one_is_measured(
    refuses: Any, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    """The text is shorter than the second context, which shows when its turn comes."""
    output = tmp_path / "study.json"
    message = refuses("study", "drafts", "--model", tiny_folder, "--text", text, "--ctx", 270, 3600, "--tokens", 16,
                      "--ratios", 0.5, "--policies", "specattn", "--formats", "bf16", "--output", output)  # fmt: skip
    assert "the text has 3180 tokens" in message
    assert [row["context"] for row in json.loads(output.read_text())["rows"]] == [270]


def test_drafts_that_plans_can_have_are_merged_into_rows_of_acceptance(study: Any, tmp_path: Path) -> None:
    """Hindsight and sets by KV head are bounds and variants, which no plan has."""
    path = tmp_path / "rows.json"
    made = study("--policies", "specattn", "hindsight", "specattn-heads", "--rows", path)
    study("--policies", "specattn", "quest", "--resume", "--rows", path)
    rows = {row.draft: row for row in load_rows(path)}
    assert list(rows) == ["specattn", "quest"]
    found = rows["specattn"]
    assert (found.context, found.ratio, found.gamma, found.tokens, found.text) == (270, 0.5, 7, 16, "cities")
    assert found.acceptance == pytest.approx(made["rows"][0]["mean"])


def test_a_study_of_other_conditions_is_not_resumed(
    study: Any, refuses: Any, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    study("--policies", "specattn")
    output = tmp_path / "study.json"
    again = ("study", "drafts", "--model", tiny_folder, "--text", text, "--ctx", 270, "--resume")
    assert "its tokens is 16; allowed: 32" in refuses(*again, "--tokens", 32, "--output", output)
    assert "--resume was given without --output" in refuses(*again, "--tokens", 16)
    for damaged, problem in (("[]", "it is []"), ('{"schema": 1, "rows": [{"context": 0}]}', "context is 0")):
        output.write_text(damaged)
        assert problem in refuses(*again, "--tokens", 16, "--output", output)
        assert output.read_text() == damaged
