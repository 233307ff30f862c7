"""`distill`, `study retrieval` and `run` with a head, from end to end on a tiny model."""

import json

import pytest

from ridgeplan.roofline.plan.draft_selection import RetrievalHead
from ridgeplan.roofline.plan.plan import Plan, TargetAttention, Workload


@pytest.fixture(scope="module")
def text(tmp_path_factory, long_text):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(long_text[:20000])
    return str(path)


def test_a_head_is_trained_studied_and_executed(invoke, refuses, tiny_folder, text, tmp_path):
    head, model = tmp_path / "head.safetensors", str(tiny_folder)
    asked = ["distill", model, "--text", text, "--steps", "2", "--tokens", "64", "--batch", "1", "--device", "cpu"]
    found = invoke(*asked, "--output", str(head), "--checkpoint", str(tmp_path / "run.safetensors"))
    assert found.exit_code == 0, found.output
    again = refuses(*asked, "--output", str(head), "--checkpoint", str(tmp_path / "run.safetensors"), "--seed", "1")
    assert "it is of another run; allowed: the same model, text and options, or no checkpoint" in again
    same = refuses(*asked, "--output", str(head), "--checkpoint", str(head))
    assert "as --output is; allowed: another file" in same
    output, html = tmp_path / "study.json", tmp_path / "study.html"
    found = invoke(
        "study", "retrieval", "--model", model, "--text", text, "--retrieval-head", str(head), "--ctx", "600",
        "--budgets", "300", "--tokens", "2", "--output", str(output), "--html", str(html),
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    methods = [row["method"] for row in json.loads(output.read_text())["rows"]]
    assert methods[:2] == ["retrieval-head", "retrieval-batch"]
    assert "plotly" in html.read_text()
    plan = tmp_path / "plan.json"
    attention = TargetAttention(RetrievalHead(recent=8), 20)
    plan.write_text(Plan(Workload("tiny", "cpu", 64, 16), attention=attention).to_json())
    asked = ["run", str(plan), "--model", model, "--prompt", "It was a bright cold day", "--max-new-tokens", "4"]
    assert invoke(*asked, "--retrieval-head", str(head)).exit_code == 0
    assert "`ridgeplan distill` trains one" in refuses(*asked)
