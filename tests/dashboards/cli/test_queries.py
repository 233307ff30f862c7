"""`compare`, `sweep`, `cost`, `fit` over GPUs, `explain`, `list` and `completion`."""

import csv
import json
from dataclasses import replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.dashboards.cli.table_file import RowTable, write_table
from ridgeplan.dashboards.figures import paper_figure
from ridgeplan.planner import Plan
from ridgeplan.planner.quantities import time_text
from ridgeplan.planner.queries.fit import fit_gpus
from ridgeplan.planner.render.text import terms
from ridgeplan.roofline.catalog.hardware import FIGURES, list_hardware, load_hardware
from ridgeplan.roofline.plan.presets import short_name

LLAMA = "meta-llama/Llama-3.1-8B"


def as_json(result: Any) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_compare_prints_what_its_json_holds(invoke: Any) -> None:
    line = ("compare", LLAMA, "--gpu", "h100,h200", "--ctx", "32k", "--preset", "autoregressive,quantspec")
    plans = as_json(invoke(*line, "--json"))["plans"]
    assert [(plan["gpu"], plan["plan"]) for plan in plans] == [
        (gpu, name) for gpu in ("h100-sxm", "h200") for name in ("autoregressive", "quantspec")
    ]
    text = invoke(*line).stdout
    assert text.startswith("Llama-3.1-8B, 32k tokens, batch 1\n")
    for plan in plans:
        assert f"{plan['gpu']} {plan['plan']}" in text
        assert f"{plan['speedup']:.2f}x" in text


@pytest.mark.parametrize(
    ("repeated", "at_once"),
    [
        (("compare", "--gpu", "h100", "--gpu", "h200"), ("compare", "--gpu", "h100,h200")),
        (("compare", "Qwen/Qwen3-8B", "--gpu", "h200"), ("compare", f"Qwen/Qwen3-8B, {LLAMA}", "--gpu", "h200")),
        (("compare", "--gpu", "h200", "--preset", "int8", "--preset", "quantspec"),
         ("compare", "--gpu", "h200", "--preset", "int8,quantspec")),
        (("cost", "--gpu", "h100", "--gpu", "h200", "--batch", "1"), ("cost", "--gpu", "h100,h200", "--batch", "1")),
        (("sweep", "--gpu", "h200", "--over", "new_tokens=64,128", "--over", "batch=1,2"),
         ("sweep", "--gpu", "h200", "--over", "new_tokens=64,128,batch=1,2")),
        (("sweep", "--gpu", "h200", "--ctx", "8k,32k", "--batch", "1,2"),
         ("sweep", "--gpu", "h200", "--over", "ctx=8k,32k,batch=1,2")),
    ],
)  # fmt: skip
def test_a_repeated_option_adds_values(invoke: Any, repeated: tuple[str, ...], at_once: tuple[str, ...]) -> None:
    answers = [as_json(invoke(*line, LLAMA, "--ctx", "8k", "--json")) for line in (repeated, at_once)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("line", [("fit", LLAMA), ("gamma", LLAMA), ("sweep", LLAMA, "--over", "batch=1")])
def test_one_gpu_is_allowed_where_the_answer_is_of_one(invoke: Any, line: tuple[str, ...]) -> None:
    result = invoke(*line, "--gpu", "h100", "--gpu", "h200")
    assert result.exit_code == 2
    assert "--gpu is h100,h200; allowed: one GPU" in result.stderr


def test_plan_files_are_compared_at_their_own_sizes(invoke: Any, tmp_path: Path) -> None:
    for name, context in (("a.json", "8k"), ("b.json", "64k")):
        result = invoke("estimate", LLAMA, "--preset", "int8", "--gpu", "h200", "--ctx", context, "-o", tmp_path / name)
        assert result.exit_code == 0
    answer = as_json(invoke("compare", tmp_path / "a.json", tmp_path / "b.json", "--json"))
    assert [plan["context"] for plan in answer["plans"]] == [8192, 65_536]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("compare", LLAMA, "--ctx", "8k"), "compare needs --gpu for models"),
        (("compare", LLAMA, "plan.json", "--gpu", "h200"), "models and plan files cannot be mixed"),
        (("compare", LLAMA, "--gpu", "h200,h20o", "--ctx", "8k"), "unknown GPU 'h20o'. Did you mean h20"),
        (("compare", "9" * 300, "--gpu", "h200", "--ctx", "8k"), "unknown model"),
        (("compare", "nothing.json"), "cannot read plan 'nothing.json'"),
        (("compare",), "Missing argument"),
        (("sweep", LLAMA, "--gpu", "h200"), "sweep needs an axis; allowed: such as --over ctx=4k"),
        (("sweep", LLAMA, "--over", "ctx=4k"), "sweep needs --gpu, or gpu=h100,h200 in --over"),
        (("sweep", LLAMA, "--gpu", "h200", "--over", "width=4k"), "axis 'width'; allowed: each of ctx, batch"),
        (
            ("sweep", LLAMA, "--gpu", "h200", "--over", "ctx=4k", "-o", "x.txt"),
            "allowed: .csv, .md, .json, .png, .html",
        ),
        (("sweep", LLAMA, "--gpu", "h200", "--over", "ctx=1M"), "every context is beyond the model's limit of 131072"),
        (("cost", LLAMA, "--gpu", "a10g", "--ctx", "8k"), "the catalog has no price of a10g; allowed: --price"),
        (("cost", LLAMA, "--gpu", "h200", "--ctx", "8k", "--price", "cheap"), "--price is 'cheap'; allowed: dollars"),
        (("cost", LLAMA, "--gpu", "h200", "--ctx", "8k", "--price", "nan"), "the price of h200 is nan; allowed"),
        (
            ("cost", LLAMA, "--gpu", "h200,h100", "--ctx", "8k", "--price", "1,2,3"),
            "3 prices were given for 2 GPUs; allowed",
        ),
        (("cost", LLAMA, "--gpu", "h200", "--ctx", "8k", "--price", "1", "--ttft-max", "2"), "'2' is not a time"),
        (("fit", LLAMA, "--ctx", "8k,16k"), "without a GPU, fit needs one --ctx"),
        (("explain", "gama"), "unknown term 'gama'. Did you mean gamma"),
        (("explain", "foo"), "Allowed: a .json plan, a preset or"),
        (("explain", "missing.json"), "cannot read plan 'missing.json'"),
        (("completion", "cmd"), "'cmd' is not one of 'bash', 'zsh', 'fish'"),
    ],
)
def test_what_is_wrong_is_one_line(refuses: Any, line: tuple[object, ...], words: str) -> None:
    assert words in refuses(*line)


def test_a_sweep_is_written_in_three_formats(invoke: Any, tmp_path: Path) -> None:
    line = ("sweep", LLAMA, "--gpu", "h200", "--over", "ctx=4k..16k,batch=1,8,512", "--host-memory", "1TB")
    rows = as_json(invoke(*line, "-o", tmp_path / "sweep.csv", "--json"))["rows"]
    assert len(rows) == 3 * 3
    with (tmp_path / "sweep.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [{name: str(value) for name, value in row.items()} for row in rows] == read
    assert invoke(*line, "-o", tmp_path / "sweep.json").exit_code == 0
    assert json.loads((tmp_path / "sweep.json").read_text())["rows"] == rows
    shown = invoke(*line, "-o", tmp_path / "sweep.html")
    page = (tmp_path / "sweep.html").read_text()
    assert "9 points; all are in" in shown.stdout
    assert all(row["plan"] in page for row in rows)
    assert {row["fits"] for row in rows} == {True}  # layers leave for the host
    small = as_json(invoke(*line, "--memory-limit", "6GB", "--json"))["rows"]
    assert {row["fits"] for row in small} == {False}
    # 512 prompts of 16k tokens: 550 GB of INT8 KV (32 layers, 8 heads of 128, keys and values), on both memories.
    little = as_json(invoke(*line[:-1], "256GB", "--json"))["rows"]
    assert [(row["context"], row["batch"]) for row in little if not row["fits"]] == [(16384, 512)]
    assert "<script src" not in page


def test_many_points_are_shown_in_part(invoke: Any) -> None:
    text = invoke("sweep", LLAMA, "--gpu", "h200", "--over", "ctx=4k..64k:20,batch=1..16").stdout
    assert "100 points, 20 of them shown" in text


def test_questions_in_turn_show_what_varies(invoke: Any) -> None:
    """Axes that one evaluation does not cover are asked one after another."""
    line = ("sweep", LLAMA, "--over", "gpu=h100,h200,quality=exact,near-lossless,new-tokens=64,1k,ctx=4k,8k")
    rows = as_json(invoke(*line, "--json"))["rows"]
    shown = invoke(*line).stdout
    for row in rows:
        assert f"{row['new_tokens']} {row['gpu']} {row['quality']} {short_name(row['plan'])}" in shown
    assert len({(row["gpu"], row["quality"], row["new_tokens"], row["context"]) for row in rows}) == 16


def test_cost_prints_what_its_json_holds(invoke: Any) -> None:
    line = ("cost", LLAMA, "--gpu", "h200", "--ctx", "8k", "--price", "$2.5", "--tpot-max", "15ms", "--batch", "1..256")
    answer = as_json(invoke(*line, "--json"))
    text = invoke(*line).stdout
    best = answer["cheapest"]
    assert f"cheapest: ${best['dollars_per_million']:.3g} per million tokens on h200 at batch {best['batch']}" in text
    assert best == min((row for row in answer["rows"] if row["serves"]), key=lambda row: row["dollars_per_million"])
    assert answer["limits"] == {"ttft_s": None, "tpot_s": 0.015}
    assert "misses TPOT" in text and "h200 at $2.50 per GPU-hour" in text
    assert "no batch fits and meets the limits" in invoke(*line, "--ttft-max", "1us").stdout


def test_cost_says_what_plan_says_of_plans_on_the_host_and_slow_ones(invoke: Any) -> None:
    line = ("cost", LLAMA, "--gpu", "rtx4090", "--ctx", "128k", "--batch", "16", "--host-memory", "1TB")
    text = invoke(*line).stdout
    assert text.count("offloaded, slow") == 1
    assert "slower than reading speed" in " ".join(text.split())
    assert " fits" not in text.partition("verdict")[2]


def test_only_limits_that_are_given_are_met(invoke: Any) -> None:
    line = ("cost", LLAMA, "--gpu", "h200", "--ctx", "8k", "--price", "2.5", "--batch", "1,2")
    assert "meets" not in invoke(*line).stdout
    assert invoke(*line, "--tpot-max", "1s").stdout.count("meets") == 2


def test_fit_names_the_smallest_gpu_of_the_catalog(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeplan.dashboards.cli.fit.fit_gpus", cache(fit_gpus))  # both forms are of one answer
    line = ("fit", LLAMA, "--ctx", "128k", "--batch", 4)
    answer = as_json(invoke(*line, "--json"))
    memory = [load_hardware(row["gpu"]).memory_bytes for row in answer]
    assert memory == sorted(row.memory_bytes for row in list_hardware())
    first = next(row for row in answer if row["fits"])
    assert f"smallest GPU that fits: {first['gpu']}" in invoke(*line).stdout
    for row in answer:
        assert row["fits"] == (row["batch"]["batch"] >= 4) == (row["context"]["context"] == 131_072)
    nowhere = invoke("fit", "Llama-3.1-70B", "--ctx", "128k", "--batch", 64, "--gpus", 1)
    assert (nowhere.exit_code, "no GPU in the catalog fits" in nowhere.stderr) == (3, True)
    assert invoke("fit", "Llama-3.1-70B", "rtx4090").exit_code == 3
    assert invoke("fit", "Llama-3.1-70B", "h200", "--ctx", "8k").exit_code == 0


def test_explain_divides_a_round_among_its_parts(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert invoke("plan", LLAMA, "--gpu", "h200", "--ctx", "120000", "-o", path).exit_code == 0
    answer = as_json(invoke("explain", path, "--json"))
    predicted = answer["predicted"]
    assert Plan.from_dict(answer["plan"]) == Plan.from_json(path.read_text())
    assert sum(predicted["round_s"].values()) * 1e3 == pytest.approx(predicted["round_ms"])
    text = invoke("explain", path).stdout
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert f"{predicted['speedup']:.2f}x plain decoding" in " ".join(text.split())
    assert "at batch 1, quantizing weights helps more than quantizing KV up to about 11" in " ".join(text.split())
    for part, seconds in predicted["round_s"].items():
        assert (f"    {part} " in text) == (seconds > 0)
    assert "which does not fit" in invoke("explain", path, "--memory-limit", "10GB").stdout


def test_a_plan_for_an_engine_is_explained_with_the_engines_times(invoke: Any, tmp_path: Path) -> None:
    path, engine = tmp_path / "plan.json", ("--backend", "vllm")
    planned = as_json(invoke("plan", LLAMA, "--gpu", "h200", "--ctx", "4k", "-o", path, "--json", *engine))
    explained = as_json(invoke("explain", path, "--json", *engine))
    assert explained["predicted"]["tpot_ms"] == pytest.approx(planned["predicted"]["tpot_ms"])
    assert "times are those of vLLM" in invoke("explain", path).stdout  # of the plan file's own backend
    assert as_json(invoke("explain", path, "--json")) == explained
    estimated = as_json(invoke("estimate", "--plan", path, "--json"))
    assert estimated["predicted"]["tpot_ms"] == pytest.approx(planned["predicted"]["tpot_ms"])
    ours = as_json(invoke("explain", path, "--json", "--backend", "ridgeplan"))
    assert ours["predicted"]["tpot_ms"] != explained["predicted"]["tpot_ms"]


@pytest.mark.parametrize(
    ("preset", "causes"),
    [
        ("specontext", "for choosing and gathering tokens and layers on the host"),
        ("specontext-resident", "for choosing and gathering tokens"),
    ],
)
def test_what_operations_do_not_show_is_told(invoke: Any, tmp_path: Path, preset: str, causes: str) -> None:
    """Layers on the host, and what a target step takes beside its operations: both add up to the step."""
    path = tmp_path / "plan.json"
    limit = ("--memory-limit", "40GB") if preset == "specontext" else ()
    command = ("estimate", LLAMA, "--preset", preset, "--gpu", "h200", "--ctx", "120k", "--batch", 4, *limit)
    predicted = as_json(invoke(*command, "--json", "-o", path))["predicted"]
    listed_ms = 1e3 * sum(op["seconds"] for op in predicted["breakdown"] if op["part"] == "target")
    beside = f"{time_text(predicted['verify_ms'] - listed_ms)} {causes}"
    layers = f"KV of {predicted['offloaded_layers']} layers is on the host"
    for result in (invoke(*command), invoke("explain", path, *limit)):
        text = " ".join(result.stdout.split())
        assert beside in text
        assert (layers in text) == ("and layers on the host" in text) == bool(limit)


def test_a_step_whose_operations_are_all_of_it_has_nothing_beside_them(invoke: Any) -> None:
    command = ("estimate", LLAMA, "--preset", "quantspec", "--gpu", "h200", "--ctx", "64k")
    assert "beside its operations" not in invoke(*command).stdout


def test_explain_takes_terms_of_several_words(invoke: Any) -> None:
    assert invoke("explain", "memory", "utilization").stdout.split() == terms()["memory utilization"].split()
    assert as_json(invoke("explain", "prior", "--json"))["term"] == "prior"


def test_a_template_is_a_gpu_that_can_be_planned_for(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(invoke("gpus", "--template").stdout)
    mine, known = load_hardware(str(path)), load_hardware("rtx4090")
    for figure in (*FIGURES, "sm_clock_hz", "compute_capability"):
        assert getattr(mine, figure) == getattr(known, figure)
    plan = tmp_path / "plan.json"
    assert invoke("plan", LLAMA, "--gpu", path, "--ctx", "8k", "-o", plan).exit_code == 0
    path.unlink()
    assert "my-gpu" in invoke("explain", plan).stdout


@pytest.mark.parametrize("kind", ["models", "gpus", "presets"])
def test_lists_print_every_name(invoke: Any, kind: str) -> None:
    names = [item["name"].rpartition("/")[2] for item in as_json(invoke("list", kind, "--json"))]
    text = "".join(invoke("list", kind).stdout.split())
    assert [name for name in names if name not in text] == []
    assert invoke("list", kind).stdout == invoke(kind).stdout


@pytest.mark.parametrize(
    ("model", "runs"), [("Qwen3-8B", "yes"), ("Kimi-K2-Instruct", "too large"), ("gemma-4-E2B-it", "no")]
)
def test_models_say_whether_they_run_and_whether_a_gpu_holds_them(invoke: Any, model: str, runs: str) -> None:
    (row,) = (line for line in invoke("list", "models").stdout.splitlines() if line.startswith(f"{model} "))
    assert f"  {runs}  " in f"{row}  "


def test_a_gpu_is_listed_in_the_units_of_its_columns(invoke: Any) -> None:
    """24,564 MiB are 25.8 GB; 1.01 TB/s and 165 TFLOP/s meet at 164 FLOP/byte."""
    (row,) = (line.split() for line in invoke("list", "gpus").stdout.splitlines() if line.startswith("rtx4090 "))
    assert row == ["rtx4090", "26", "24", "1.01", "165", "164", "32", "Triton", "transferred"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_ridgeplan(invoke: Any, shell: str) -> None:
    script = invoke("completion", shell).stdout
    assert "_RIDGEPLAN_COMPLETE" in script
    assert "ridgeplan" in script


def test_a_plan_of_this_machine_loads_after_its_calibration_is_gone(
    invoke: Any, refuses: Any, profile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_profile = replace(profile, hardware=replace(profile.hardware, name="cpu-of-mine"))
    folder = tmp_path / "ridgeplan"
    folder.mkdir()
    (folder / "profile.json").write_text(changed_profile.to_json())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "plan.json"
    answer = as_json(invoke("plan", LLAMA, "--gpu", "auto", "--ctx", "8k", "-o", path, "--json"))
    (folder / "profile.json").unlink()
    loaded = as_json(invoke("estimate", "--plan", path, "--json"))
    assert loaded["predicted"]["tpot_ms"] == answer["predicted"]["tpot_ms"]
    assert "unknown GPU" in refuses("estimate", LLAMA, "--plan", path, "--gpu", "cpu-of-mine")


def test_a_plan_of_a_gguf_loads_after_the_file_is_gone(invoke: Any, smollm2: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mine.gguf"
    copy.symlink_to(smollm2)
    path = tmp_path / "plan.json"
    answer = as_json(invoke("plan", copy, "--gpu", "h200", "--ctx", "4k", "-o", path, "--json"))
    copy.unlink()
    loaded = as_json(invoke("estimate", "--plan", path, "--json"))
    assert loaded["predicted"]["tpot_ms"] == pytest.approx(answer["predicted"]["tpot_ms"])
    assert loaded["plan"] == answer["plan"]


@pytest.mark.parametrize(
    "line",
    [
        ("compare", LLAMA, "--gpu", "h200,rtx4090", "--ctx", "4k", "--preset", "int8"),
        ("cost", LLAMA, "--gpu", "h200,rtx4090", "--ctx", "4k", "--price", 1, "--batch", 1),
        ("sweep", LLAMA, "--over", "gpu=h200,rtx4090,ctx=4k"),
        ("fit", LLAMA, "rtx4090", "--ctx", "4k", "--batch", 1),
        ("gamma", LLAMA, "rtx4090", "--ctx", "4k", "--batch", 1),
    ],
    ids=lambda line: line[0],
)
def test_what_is_not_calibrated_says_so_once(invoke: Any, line: tuple[object, ...]) -> None:
    note = "rtx4090 is not calibrated: utilizations are those of a test's H200"
    assert invoke(*line).stdout.count(note) == 1
    assert [note for note in as_json(invoke(*line, "--json"))["notes"] if note.startswith("rtx4090")] == [note]


@pytest.mark.parametrize(
    "words",
    [
        ("fit", LLAMA, "h200"),
        ("compare", LLAMA, "--gpu", "h200,rtx4090", "--ctx", "8k"),
        ("cost", LLAMA, "--gpu", "h200", "--ctx", "8k", "--price", 2),
        ("gamma", LLAMA, "h200", "--ctx", "8k,16k", "--batch", 1),
        ("sweep", LLAMA, "--gpu", "h200", "--over", "ctx=4k..16k"),
        ("list", "models"),
        ("list", "gpus"),
        ("list", "presets"),
    ],
)
def test_tables_are_written_in_the_format_of_the_suffix(
    invoke: Any, refuses: Any, words: tuple[Any, ...], tmp_path: Path
) -> None:
    paths = {suffix: tmp_path / f"table.{suffix}" for suffix in ("csv", "md", "json")}
    for path in paths.values():
        assert invoke(*words, "-o", path).exit_code == 0
    rows = list(csv.DictReader(paths["csv"].open(encoding="utf-8")))
    lines = paths["md"].read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"| {' | '.join(rows[0])} |"
    assert len(lines) == len(rows) + 2 > 3
    assert json.loads(paths["json"].read_text()) == json.loads(invoke(*words, "--json").stdout)
    assert "ends in '.txt'; allowed: .csv, .md, .json, .png" in refuses(*words, "-o", tmp_path / "table.txt")
    assert not (tmp_path / "table.txt").exists()


def test_a_name_makes_no_column_link_or_html_in_markdown(tmp_path: Path) -> None:
    table = RowTable("Rows", [{"gpu": r"a\|b <img src=x> [c](javascript:d)", "batch": 2}], None)
    write_table(tmp_path / "rows.md", table, {})
    assert (tmp_path / "rows.md").read_text() == (
        "| gpu | batch |\n| --- | --- |\n" + r"| a\\\|b \<img src=x> \[c](javascript:d) | 2 |" + "\n"
    )


@pytest.mark.parametrize("words", [("plan", LLAMA), ("estimate", LLAMA, "--preset", "quantspec")], ids=itemgetter(0))
def test_a_plan_is_written_as_json_and_its_table_in_other_formats(
    invoke: Any, words: tuple[str, ...], tmp_path: Path
) -> None:
    line = (*words, "--gpu", "h200", "--ctx", "8k")
    for suffix in ("csv", "md", "json"):
        assert invoke(*line, "-o", tmp_path / f"plan.{suffix}").exit_code == 0
    (row, *others) = csv.DictReader((tmp_path / "plan.csv").open(encoding="utf-8"))
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert (int(row["context"]), int(row["gamma"])) == (8192, plan.speculation.gamma)
    assert len((tmp_path / "plan.md").read_text(encoding="utf-8").splitlines()) == len(others) + 3


@pytest.mark.parametrize(
    ("words", "bars", "lines"),
    [
        (("plan", LLAMA, "--gpu", "h200", "--ctx", "8k"), 1, 0),
        (("list", "gpus"), 1, 0),
        (("gamma", LLAMA, "h200", "--ctx", "8k,16k", "--batch", "1,4"), 0, 2),
    ],
)
def test_pngs_show_the_table(
    invoke: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[Any, ...], bars: int, lines: int, tmp_path: Path
) -> None:
    """Drawing itself needs a browser; the figure that kaleido gets has a value for each row of the table."""
    drawn: list[Any] = []
    monkeypatch.setattr(paper_figure, "can_draw", lambda: True)
    monkeypatch.setattr(paper_figure.pio, "write_images", lambda figures, files, **_: drawn.extend(figures))
    assert invoke(*words, "-o", tmp_path / "table.png").exit_code == 0
    assert invoke(*words, "-o", tmp_path / "table.csv").exit_code == 0
    (figure,) = drawn
    assert [trace.type for trace in figure.data] == ["bar"] * bars + ["scatter"] * lines
    rows = len((tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()) - 1
    assert sum(len(trace.x) for trace in figure.data) == rows


def test_a_png_is_drawn_by_the_installed_browser(invoke: Any, tmp_path: Path) -> None:
    pytest.importorskip("kaleido")
    path = tmp_path / "gpus.png"
    result = invoke("list", "gpus", "-o", path)
    if result.exit_code:
        assert "plotly_get_chrome" in result.stderr  # no browser on this machine
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_words_have_no_png(refuses: Any, tmp_path: Path) -> None:
    assert "Presets have no figures to draw; allowed: .csv, .md, .json" in refuses(
        "list", "presets", "-o", tmp_path / "presets.png"
    )
    assert not [*tmp_path.iterdir()]


def test_stored_weights_are_among_the_presets(invoke: Any) -> None:
    listed = {row["name"]: row for row in json.loads(invoke("list", "presets", "--json").stdout)}
    assert listed["stored"] == {"name": "stored", "quality": "exact", "executable": True, "changes": "stored weights"}
    assert "stored: a GGUF file's" in invoke("list", "presets").stdout
    assert "stored weights" in invoke("explain", "stored").stdout
