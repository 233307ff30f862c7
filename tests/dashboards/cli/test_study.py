"""`ridgeplan study drafts`: its JSON, its page, and its one-line errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ridgeplan.planner.acceptance import load_rows
from ridgeplan.planner.acceptance.drafter_rows import load_drafter_rows
from ridgeplan.roofline.plan.plan import Drafter, Plan, Speculation, TargetAttention, Workload
from ridgeplan.roofline.plan.policies.selections import RetrievalHead

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
                   "--verification", "teacher-forced", "--output", output, "--html", html).stdout  # fmt: skip
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


def test_a_study_that_would_measure_nothing_is_refused(
    refuses: Any, invoke: Any, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    """At 270 tokens a ratio of 0.1 is fewer than the four sinks and 128 recent tokens that are read in any case."""
    output, rows = tmp_path / "study.json", tmp_path / "rows.json"
    command = ("study", "drafts", "--model", tiny_folder, "--text", text, "--ctx", 270, "--tokens", 24, "--ratios")
    files = ("--formats", "bf16", "--output", output, "--rows", rows)
    message = refuses(*command, 0.1, 0.2, "--policies", "streamingllm", "quest", *files)
    assert "nothing can be measured: at 270 tokens the sinks and recent tokens fill the budget" in message
    assert "allowed: a ratio and a context whose product is above 132" in message
    assert not output.exists() and not rows.exists()
    ran = invoke(*command, 0.1, 0.5, "--policies", "quest", *files)  # of which one is measured
    assert "note: not measured at 270 tokens: quest at 0.1" in " ".join(ran.stderr.split())
    assert [row["ratio"] for row in json.loads(output.read_text())["rows"]] == [0.5]
    invoke(*command, 0.1, 0.5, "--policies", "quest", *files, "--resume")  # nothing is missing


@pytest.fixture
def study(invoke: Any, tiny_folder: Path, text: Path, tmp_path: Path) -> Any:
    def run(*options: object) -> dict[str, Any]:
        output = tmp_path / "study.json"
        ran = invoke("study", "drafts", "--model", tiny_folder, "--text", text, "--ctx", 270, "--tokens", 16,
                     "--ratios", 0.5, "--formats", "bf16", "--verification", "teacher-forced", "--output", output,
                     *options)  # fmt: skip
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
    assert [row["policy"] for row in both["rows"]] == ["specattn", "quest"]
    assert [row["policy"] for row in study("--policies", "quest")["rows"]] == ["quest"]  # without --resume, anew


def test_each_context_is_saved_before_the_next_one_is_measured(
    refuses: Any, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    """The text is shorter than the second context, which shows when its turn comes."""
    output = tmp_path / "study.json"
    message = refuses("study", "drafts", "--model", tiny_folder, "--text", text, "--ctx", 270, 3600, "--tokens", 16,
                      "--ratios", 0.5, "--policies", "specattn", "--formats", "bf16",
                      "--verification", "teacher-forced", "--output", output)  # fmt: skip
    assert "the text has 3180 tokens" in message
    assert [row["context"] for row in json.loads(output.read_text())["rows"]] == [270]


def test_drafts_that_plans_can_have_are_merged_into_rows_of_acceptance(study: Any, tmp_path: Path) -> None:
    """Hindsight and sets by KV head are bounds and variants, which no plan has."""
    path = tmp_path / "rows.json"
    report = study("--policies", "specattn", "hindsight", "specattn-heads", "--rows", path)
    study("--policies", "specattn", "quest", "--resume", "--rows", path)
    rows = {row.draft: row for row in load_rows(path)}
    assert list(rows) == ["specattn", "quest"]
    specattn_row = rows["specattn"]
    assert (specattn_row.context, specattn_row.ratio, specattn_row.gamma, specattn_row.tokens, specattn_row.text) == (
        270,
        0.5,
        7,
        16,
        "cities",
    )
    assert specattn_row.acceptance == pytest.approx(report["rows"][0]["mean"])


def test_a_study_of_other_conditions_is_not_resumed(
    study: Any, refuses: Any, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    study("--policies", "specattn")
    output = tmp_path / "study.json"
    again = ("study", "drafts", "--model", tiny_folder, "--text", text, "--ctx", 270, "--resume",
             "--verification", "teacher-forced")  # fmt: skip
    assert "its tokens is 16; allowed: 32" in refuses(*again, "--tokens", 32, "--output", output)
    assert "--resume needs --output" in refuses(*again, "--tokens", 16)
    for damaged, problem in (("[]", "it is []"), ('{"schema": 1, "rows": [{"context": 0}]}', "context is 0")):
        output.write_text(damaged)
        assert problem in refuses(*again, "--tokens", 16, "--output", output)
        assert output.read_text() == damaged


def test_sampled_rounds_are_saved_with_how_they_went_on(
    invoke: Any, refuses: Any, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    output, html, rows = (tmp_path / name for name in ("study.json", "study.html", "rows.json"))
    command = ("study", "drafts", "--model", tiny_folder, "--text", text, "--ctx", 270, "--tokens", 32, "--ratios", 0.5,
               "--policies", "specextend", "streamingllm", "--formats", "bf16", "--passages", 2)  # fmt: skip
    shown = invoke(*command, "--output", output, "--html", html, "--rows", rows).stdout
    document = json.loads(output.read_text())
    assert (document["verification"], document["passages"]) == ("sampled", 2)
    assert "sampled rounds" in shown
    for row in document["rows"]:
        assert row["verified"][0] == row["rounds"] >= 4
        assert len(row["verified"]) == len(row["by_position"]) <= 7
        assert 1 <= row["tokens_per_round"] <= 8
    assert html.read_text().count("<table>") == 1
    assert "its verification is 'sampled'; allowed: 'greedy'" in refuses(
        *command, "--verification", "greedy", "--resume", "--output", output
    )
    message = refuses(*command, "--verification", "greedy", "--rows", rows)
    assert "--rows cannot be combined with --verification greedy" in message


# `ridgeplan study dapq`: its JSON, plots, tables and errors.

SIZES = ("--ctx", 512, "--response", 32, "--passages", 2)


def test_perplexity_by_axes_is_printed_and_written(
    invoke: Any, refuses: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "axes.json"
    run = ("study", "quantspec", "--model", tiny_folder, "--ctx", 300, "--tokens", 20, "--passages", 1)
    printed = invoke(*run, "--output", output).stdout
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["sizes"] == {"context": 300, "tokens": 20, "passages": 1, "group": 128}
    assert [row["bits"] for row in document["rows"]] == [16, 8, 8, 8, 8, 4, 4, 4, 4]
    assert all(f"{row['perplexity']:.4f}" in printed for row in document["rows"])
    assert "context is 100; allowed: 347 to" in refuses("study", "quantspec", "--ctx", 100)


def test_a_study_writes_json_and_plots_and_prints_tables(invoke: Any, tiny_folder: Path, tmp_path: Path) -> None:
    output, html = tmp_path / "study.json", tmp_path / "study.html"
    run = ("study", "dapq", "--model", tiny_folder, *SIZES)
    printed = invoke(*run, "--output", output, "--html", html).stdout
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["model"] == tiny_folder.name
    assert document["sizes"] == {"context": 512, "response": 32, "passages": 2, "seed": 0}
    assert {row["figure"][0] for row in document["figures"]} == {
        "similarity",
        "offset",
        "recall",
        "attention",
        "choice",
    }
    assert json.loads(invoke(*run, "--json").stdout) == document  # seeds are fixed
    lines = printed.splitlines()
    assert sum(line.startswith(("holds: ", "differs here: ")) for line in lines) == len(document["claims"]) == 8
    same = next(row["mean"] for row in document["figures"] if row["figure"] == ["similarity", "other", "same", "after"])
    assert f"{same:.4f}" in printed
    page = html.read_text(encoding="utf-8")
    assert page.count("Plotly.newPlot(") == 5
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


# `distill`, `study retrieval` and `run` with a head, from end to end on a tiny model.


@pytest.fixture(scope="module")
def retrieval_text(tmp_path_factory, long_text):
    path = tmp_path_factory.mktemp("retrieval_text") / "text.txt"
    path.write_text(long_text[:20000])
    return str(path)


def test_a_head_is_trained_studied_and_executed(invoke, refuses, tiny_folder, retrieval_text, tmp_path):
    head, model = tmp_path / "head.safetensors", str(tiny_folder)
    command = [
        "distill",
        model,
        "--text",
        retrieval_text,
        "--steps",
        "2",
        "--tokens",
        "64",
        "--batch",
        "1",
        "--device",
        "cpu",
    ]
    result = invoke(*command, "--output", str(head), "--checkpoint", str(tmp_path / "run.safetensors"))
    assert result.exit_code == 0, result.output
    again = refuses(*command, "--output", str(head), "--checkpoint", str(tmp_path / "run.safetensors"), "--seed", "1")
    assert "it is of another run; allowed: the same model, text and options, or no checkpoint" in again
    same = refuses(*command, "--output", str(head), "--checkpoint", str(head))
    assert "as --output is; allowed: another file" in same
    output, html = tmp_path / "study.json", tmp_path / "study.html"
    result = invoke(
        "study", "retrieval", "--model", model, "--text", retrieval_text, "--retrieval-head", str(head), "--ctx", "600",
        "--budgets", "300", "--tokens", "2", "--output", str(output), "--html", str(html),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    methods = [row["method"] for row in json.loads(output.read_text())["rows"]]
    assert methods[:2] == ["retrieval-head", "retrieval-batch"]
    assert "plotly" in html.read_text()
    plan = tmp_path / "plan.json"
    attention = TargetAttention(RetrievalHead(recent=8), 20)
    plan.write_text(Plan(Workload("tiny", "cpu", 64, 16), attention=attention).to_json())
    command = ["run", str(plan), "--model", model, "--prompt", "It was a bright cold day", "--max-new-tokens", "4"]
    assert invoke(*command, "--retrieval-head", str(head)).exit_code == 0
    assert "`ridgeplan distill` trains one" in refuses(*command)


def test_an_eagle3_checkpoint_becomes_a_head(invoke, refuses, tiny_folder, retrieval_text, tmp_path):
    config = json.loads((tiny_folder / "config.json").read_text())
    hidden, heads, kv_heads = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    width = config.get("head_dim") or hidden // heads
    sizes = {
        "midlayer.self_attn.q_proj.weight": (heads * width, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_heads * width, 2 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
    }
    save_file({name: torch.ones(size) for name, size in sizes.items()}, tmp_path / "model.safetensors")
    head, model = tmp_path / "head.safetensors", str(tiny_folder)
    result = invoke("import-head", str(tmp_path), "--model", model, "--output", str(head))
    assert result.exit_code == 0, result.output
    assert f"{heads} query heads, {kv_heads} KV heads; saved to {head}" in result.output
    study = ("study", "retrieval", "--model", model, "--text", retrieval_text, "--ctx", "600", "--budgets", "300")
    result = invoke(*study, "--tokens", "2", "--retrieval-head", str(head), "--json")
    assert json.loads(result.stdout)["rows"][0]["method"] == "retrieval-head"
    full = ("import-head", str(tmp_path), "--model", model, "--inputs", "full", "--output", str(head))
    assert "it lacks midlayer.hidden_norm.weight" in refuses(*full)


def test_a_draft_head_is_trained_measured_planned_with_and_executed(
    invoke, refuses, tiny_folder, retrieval_text, tmp_path
):
    head, model, output = tmp_path / "head", str(tiny_folder), tmp_path / "rows.json"
    sizes = ("--steps", "2", "--tokens", "64", "--draft-vocab", "100", "--unroll", "2", "--window", "32")
    text = ("--text", retrieval_text)
    train = ("distill", model, *text, "--output")
    output.write_text("")
    assert f"'{output}'; allowed: a folder" in refuses(*train, str(output), "--drafter")
    output.unlink()
    for _ in range(2):  # the second head replaces the first, and what was measured of it
        if head.exists():
            (head / "speculation_profile.json").write_text("[]")
        result = invoke(*train, str(head), "--drafter", *sizes, "--device", "cpu")
    assert f"'{head}'; allowed: a file, or a folder with --drafter" in refuses(*train, str(head))
    assert result.exit_code == 0, result.output
    assert json.loads((head / "config.json").read_text())["sliding_window"] == 32
    assert not (head / "speculation_profile.json").exists()
    drafters = ("--ctx", "64", "--tokens", "16", "--drafter", "head", "suffix", "--drafter-head", str(head))
    measured = invoke("acceptance", model, *text, "--kind", "prose", *drafters, "--output", str(output))
    assert measured.exit_code == 0, measured.output
    assert f"saved to {output}; `plan --text prose` uses the rows" in measured.output
    rows = load_drafter_rows(output)
    assert [(row.kind, row.context, row.depth) for row in rows] == [("head", 64, 4), ("suffix", 64, 4)]
    assert load_rows(output) == ()
    profile = json.loads((head / "speculation_profile.json").read_text())
    assert profile["num_speculative_tokens"] == 4 and profile["measurement_conditions"]["rows"][0]["text"] == "prose"
    study = ("study", "drafts", "--model", model, *text, *drafters, "--windows", "0", "--rows", str(output), "--json")
    cases = json.loads(invoke(*study).stdout)["rows"]
    assert [(row["case"], row["context"], row["window"]) for row in cases] == [("head", 64, 0), ("suffix", 64, 0)]
    assert [row.text for row in load_drafter_rows(output)] == ["prose", "prose", "", ""]
    assert len(json.loads((head / "speculation_profile.json").read_text())["measurement_conditions"]["rows"]) == 2
    assert "allowed: suffix, head, cascade, w4" in refuses("acceptance", model, *text, "--drafter", "medusa")
    assert "no head to measure" in refuses("acceptance", model, *text, "--ctx", "64", "--drafter", "head")
    plan, speculation = tmp_path / "plan.json", Speculation(2, drafter=Drafter("head", 2, window=32))
    plan.write_text(Plan(Workload("tiny", "cpu", 64, 16, drafter_head=str(head)), speculation=speculation).to_json())
    command = ("run", str(plan), "--model", model, "--prompt", "It was a bright cold day", "--max-new-tokens", "4")
    assert invoke(*command).exit_code == 0
    assert "cannot load the draft head" in refuses(*command, "--drafter-head", str(tmp_path))
