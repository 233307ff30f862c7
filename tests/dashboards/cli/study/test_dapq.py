"""`ridgeplan study dapq`: its JSON, plots, tables and errors."""

import json
from pathlib import Path
from typing import Any

import pytest

SIZES = ("--ctx", 512, "--response", 32, "--passages", 2)


def test_a_study_writes_json_and_plots_and_prints_tables(invoke: Any, tiny_folder: Path, tmp_path: Path) -> None:
    output, html = tmp_path / "study.json", tmp_path / "study.html"
    run = ("study", "dapq", "--model", tiny_folder, *SIZES)
    printed = invoke(*run, "--output", output, "--html", html).stdout
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["model"] == tiny_folder.name
    assert document["sizes"] == {"context": 512, "response": 32, "passages": 2, "seed": 0}
    assert {row["figure"][0] for row in document["figures"]} == {"similarity", "offset", "recall", "attention"}
    assert json.loads(invoke(*run, "--json").stdout) == document  # seeds are fixed
    lines = printed.splitlines()
    assert sum(line.startswith(("holds: ", "differs here: ")) for line in lines) == len(document["claims"]) == 6
    same = next(row["mean"] for row in document["figures"] if row["figure"] == ["similarity", "other", "same", "after"])
    assert f"{same:.4f}" in printed
    page = html.read_text(encoding="utf-8")
    assert page.count("Plotly.newPlot(") == 4
    assert "Recall of the prompt tokens" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ctx", "100"), "context is 100; allowed: 512 to"),
        (("--passages", "0"), "passages is 0"),
        (("--text", "/nowhere/text"), "cannot read text file '/nowhere/text'"),
        (("--html", "/nowhere/page.html"), "cannot write '/nowhere/page.html'"),
        (("--ctx", "many"), "'many' is not a number of tokens"),
    ],
)
def test_mistakes_are_one_line(refuses: Any, tiny_folder: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in refuses("study", "dapq", "--model", tiny_folder, *arguments)


def test_a_text_that_is_too_short_is_refused(refuses: Any, tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Too short. " * 20, encoding="utf-8")
    assert "needed: 545" in refuses("study", "dapq", "--model", tiny_folder, "--text", path, *SIZES)
