"""`ridgeplan study drafts`: its JSON, its page, and its one-line errors."""

import json
from pathlib import Path
from typing import Any

import pytest

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
    assert "'best' is none of: streamingllm" in message
    assert "--text" in refuses("study", "drafts")
