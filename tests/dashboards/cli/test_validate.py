"""`validate`, `demo` and `calibrate`: predictions against what this machine does."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from suite_results import REPORT, ROW

from ridgeplan.dashboards.cli import demo, output
from ridgeplan.dashboards.cli.calibrate import machine_profile
from ridgeplan.dashboards.cli.run import misfit_note
from ridgeplan.planner import Recommendation, Workload, preset
from ridgeplan.roofline.catalog.profile import Profile, load_profile, save_profile, user_profile_path
from ridgeplan.runtime import load
from ridgeplan.validate import NoiseCheck
from ridgeplan.validate.calibration.fit import Samples
from ridgeplan.validate.comparison import Comparison, ComparisonRow
from ridgeplan.validate.suite.report import SuiteReport
from ridgeplan.validate.suite.run import SuiteOptions, heading

WORKLOAD = Workload("HuggingFaceTB/SmolLM2-135M", "h200", 160, 6)
PLAIN_ROWS = {"prefill", "decode step", "tpot", "peak memory", "speed-up over plain decoding"}
SPECULATIVE_ROWS = (PLAIN_ROWS - {"decode step"}) | {"draft step", "verification", "acceptance", "tokens per round"}


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(preset("quantspec", WORKLOAD).to_json())
    return path


@pytest.fixture
def measured_profile(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """What calibrating gives, without measuring anything."""

    def calibrate(
        quick: bool, noise: NoiseCheck, on_progress: Callable[[str, int, int], None], keep: Callable[[Samples], None]
    ) -> Profile:
        assert quick
        keep(Samples(profile.device, "2026-11-22", 0.8, 0.9, ()))
        on_progress("attention", 1, 2)
        noise.record("linear", [0.02])
        noise.record("linear_int4", [0.25])
        return profile

    monkeypatch.setattr("ridgeplan.validate.calibrate", calibrate)
    return profile


def names(comparison: Any) -> set[str]:
    return {row["name"] for row in comparison["rows"]}


def test_validate_compares_both_runs(
    invoke: Any, plan_path: Path, profile_path: Path, tmp_path: Path, tiny_folder: Path
) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    arguments = (
        "validate",
        plan_path,
        "--any-model",
        "--model",
        tiny_folder,
        "--prompt-file",
        text,
        "--profile",
        profile_path,
    )
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    validation = json.loads(result.stdout)["validation"]
    assert names(validation["plain"]) == PLAIN_ROWS
    assert names(validation["plan"]) >= SPECULATIVE_ROWS
    assert (validation["plan"]["context"], validation["plan"]["new_tokens"]) == (160, 6)
    # The target differs from plain decoding's, as its old tokens are INT8.
    runs = {name: load(preset(name, WORKLOAD), str(tiny_folder)) for name in ("autoregressive", "int8")}
    prompt = list(runs["int8"].tokenizer.encode(text.read_text(encoding="utf-8")))[:160]
    for run, engine in zip(("plain", "plan"), runs.values(), strict=True):
        assert validation[run]["texts"] == [engine.tokenizer.decode(engine.generate(prompt, 6).tokens[0])]
    tables = invoke(*arguments).stdout
    assert "plain decoding: autoregressive, context 160, 6 new tokens, batch 1 [" in tables
    assert "the plan: quantspec" in tables
    assert "speed-up over plain decoding" in tables


def test_validate_refuses_another_model_than_the_plans(refuses: Any, plan_path: Path, tiny_folder: Path) -> None:
    words = refuses("validate", plan_path, "--model", tiny_folder, "--profile", "unread.json")
    assert "the plan is for" in words and "--any-model" in words


def test_validate_counts_tokens_that_differ_from_float32(
    invoke: Any, plan_path: Path, profile_path: Path, tiny_folder: Path
) -> None:
    model = ("--any-model", "--model", tiny_folder)
    arguments = ("validate", plan_path, *model, "--profile", profile_path, "--max-new-tokens", 3, "--agreement")
    agreement = json.loads(invoke(*arguments, "--json").stdout)["agreement"]
    assert (agreement["tokens"], agreement["beyond_noise"]) == (3, 0)
    assert f"{len(agreement['gaps'])} of 3 greedy tokens" in invoke(*arguments).stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot read text file"), (b"", "is empty"), (b"\xff\xfe", "is not UTF-8 text")],
)
def test_bad_prompt_files_are_refused(
    refuses: Any,
    plan_path: Path,
    profile_path: Path,
    tmp_path: Path,
    tiny_folder: Path,
    content: bytes | None,
    words: str,
) -> None:
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    for command in (("validate", plan_path, "--profile", profile_path), ("run", plan_path)):
        assert words in refuses(*command, "--any-model", "--model", tiny_folder, "--prompt-file", path)


def test_a_machine_that_is_not_calibrated_is_refused_before_anything_runs(
    refuses: Any, plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ridgeplan.planner.resolution.detect_hardware", lambda: None)
    monkeypatch.setattr("ridgeplan.dashboards.cli.validate.opening_tokens", lambda *_: pytest.fail("it was read"))
    assert "this machine is neither calibrated nor in the catalog" in refuses("validate", plan_path)


@pytest.mark.parametrize("text", ["", "{", '{"schema": 7}', '{"schema": Infinity}'])
def test_validate_refuses_damaged_profiles(refuses: Any, plan_path: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    assert "broken.json" in refuses("validate", plan_path, "--profile", path)


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.model])])
def test_demo_runs_the_recommended_plan_and_quantspec(
    real: bool, invoke: Any, profile_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeplan.planner.resolution.user_profile_path", lambda: profile_path)
    folder = request.getfixturevalue("smollm2" if real else "tiny_folder")
    monkeypatch.setattr("ridgeplan.runtime.embedded_model_path", lambda: folder)
    arguments = ("demo", "--context", 160, "--new-tokens", 6)
    answer = json.loads(invoke(*arguments, "--json").stdout)
    titles = [run["title"] for run in answer["runs"]]
    assert titles[0].startswith("plain decoding")
    assert any("recommended" in title for title in titles)
    assert "preset quantspec" in titles[-1]
    assert names(answer["runs"][0]["comparison"]) == PLAIN_ROWS
    assert names(answer["runs"][-1]["comparison"]) >= SPECULATIVE_ROWS
    assert all(run["statistics"]["generated"] == 6 and run["text"] for run in answer["runs"])


def test_demo_shows_texts_and_comparisons(
    invoke: Any, profile_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeplan.planner.resolution.user_profile_path", lambda: profile_path)
    monkeypatch.setattr("ridgeplan.runtime.embedded_model_path", lambda: tiny_folder)
    shown = invoke("demo", "--context", 160, "--new-tokens", 6).stdout
    assert shown.count("continues the prompt") == shown.count("speed-up over plain decoding") >= 2
    assert "tokens per round" in shown
    title, *bars = shown[shown.index("Time per token\n") : shown.index("\nNext:")].splitlines()
    assert title == "Time per token"
    assert bars[0].startswith("plain decoding")
    assert all(line.count("\u2588") <= 40 for line in bars)
    assert sum("measured" in line for line in bars) == shown.count("continues the prompt")


@pytest.mark.parametrize("option", ["--context", "--new-tokens"])
def test_demo_refuses_nothing_to_do(refuses: Any, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeplan.validate.calibrate", None)
    assert "'0' is out of range; allowed: 1 to 16777216" in refuses("demo", option, 0)


def test_demo_runs_each_plan_once(recommendation: Recommendation) -> None:
    titles = demo.plans_to_run(recommendation)
    assert next(iter(titles.values())) == "plain decoding"
    assert titles[recommendation.plan].startswith("recommended")
    assert preset("quantspec", recommendation.plan.workload) in titles


def test_demo_calibrates_only_once_and_notes_noise(
    measured_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine_profile() == (measured_profile, user_profile_path())
    assert "kernel classes differ by up to 25%" in capsys.readouterr().err
    assert load_profile(tmp_path / "ridgeplan" / "profile.json") == measured_profile
    monkeypatch.setattr("ridgeplan.validate.calibrate", None)
    assert machine_profile() == (measured_profile, None)


@pytest.mark.parametrize("known", [False, True])
def test_demo_drops_a_calibration_of_its_own_that_plain_decoding_refutes(
    known: bool, invoke: Any, measured_profile: Profile, tiny_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ridgeplan.runtime.embedded_model_path", lambda: tiny_folder)
    monkeypatch.setattr("ridgeplan.dashboards.cli.run.misfit_note", lambda *_: "plain decoding took 9x the time")
    if known:
        save_profile(measured_profile, user_profile_path())
    result = invoke("demo", "--context", 160, "--new-tokens", 6)
    shown, notes = (" ".join(text.split()) for text in (result.stdout, result.stderr))
    assert "note: plain decoding took 9x the time" in notes
    assert ("plain decoding took 9x the time; the calibration is not kept" in notes) == (not known)
    assert ("Next: ridgeplan calibrate --quick" in shown) == (not known)
    assert user_profile_path().exists() == known


def test_demo_takes_the_profile_of_a_gpu_in_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrating a GPU compiles kernels of every class, which takes minutes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ridgeplan.planner.resolution.detect_hardware", lambda: "h100-sxm")
    monkeypatch.setattr("ridgeplan.validate.calibrate", None)
    profile, measured = machine_profile()
    assert (profile.hardware.name, measured) == ("h100-sxm", None)


def test_calibrate_saves_and_prints_the_profile(invoke: Any, measured_profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    result = invoke("calibrate", "--quick", "--allow-noisy", "--output", path)
    assert result.exit_code == 0
    assert "linear_int4" in result.stdout
    assert "25.0%" in result.stdout
    assert str(path) in result.stdout
    assert load_profile(path) == measured_profile
    answer = json.loads(invoke("calibrate", "--quick", "--allow-noisy", "--output", path, "--json").stdout)
    noise = {"linear": 0.02, "linear_int4": 0.25}
    assert answer == {"path": str(path), "noise": noise, "profile": json.loads(measured_profile.to_json())}


def test_calibrate_keeps_what_was_measured_and_fits_it_again(
    invoke: Any, refuses: Any, measured_profile: Profile, tmp_path: Path
) -> None:
    path, samples = tmp_path / "own.json", tmp_path / "samples.json"
    kept = invoke("calibrate", "--quick", "--allow-noisy", "--output", path, "--samples", samples)
    assert kept.exit_code == 0
    assert Samples.read(samples).device == measured_profile.device
    assert invoke("calibrate", "--refit", samples, "--output", path).exit_code == 0
    assert load_profile(path) == replace(measured_profile, date="2026-11-22")  # there was nothing to fit
    assert "--refit measures nothing" in refuses("calibrate", "--refit", samples, "--quick", "--output", path)
    assert "--samples needs all kernel classes" in refuses("calibrate", "--only", "rope", "--samples", samples)
    assert "cannot read samples" in refuses("calibrate", "--refit", tmp_path / "none.json", "--output", path)
    assert "calibrate it in full" in refuses(
        "calibrate", "--only", "rope", "--output", path
    )  # the profile's are others


def test_a_quick_calibration_notes_what_differed(invoke: Any, measured_profile: Profile, tmp_path: Path) -> None:
    result = invoke("calibrate", "--quick", "--output", tmp_path / "own.json")
    assert result.exit_code == 0
    assert "kernel classes differ by up to 25%, so their bands are wider" in result.stderr


def test_a_noisy_machine_is_not_calibrated(
    refuses: Any, measured_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeplan.validate.calibration.noise.QUICK_AGREEMENT", 0.2)
    path = tmp_path / "own.json"
    assert "readings of 'linear_int4' differ by 25%" in refuses("calibrate", "--quick", "--output", path, code=4)
    assert not path.exists()


def test_calibrate_checks_its_output_first(refuses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeplan.validate.calibrate", None)
    assert "cannot write '/nowhere/profile.json'" in refuses("calibrate", "--output", "/nowhere/profile.json")


def test_unwritable_cache_is_one_line(
    refuses: Any, measured_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert "cannot write" in refuses("calibrate", "--quick")


# `validate --suite` and `--report`: what belongs together, the files, and the tables.


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(REPORT.to_json())
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[SuiteOptions]:
    """The options that would have been measured; each has one step as its answer."""
    calls: list[SuiteOptions] = []

    def run(options: SuiteOptions) -> SuiteReport:
        calls.append(options)
        return replace(heading(options), rows=(replace(ROW, section=options.sections[0]),))

    monkeypatch.setattr("ridgeplan.validate.suite.run.run_suite", lambda question, *_, **__: run(question))
    return calls


def test_a_suite_that_is_cut_off_leaves_what_it_measured(
    invoke: Any, profile_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(options: SuiteOptions, _: object, keep: Callable[[SuiteReport], object]) -> SuiteReport:
        keep(replace(heading(options), rows=(ROW,)))
        raise KeyboardInterrupt

    monkeypatch.setattr("ridgeplan.validate.suite.run.run_suite", cut_off)
    path = tmp_path / "results.json"
    invoke("validate", "--suite", "smoke", "--only", ROW.section, "--profile", profile_path, "--output", path)
    assert SuiteReport.read(path).rows == (ROW,)


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
    invoke: Any, measured: list[SuiteOptions], profile_path: Path, tmp_path: Path
) -> None:
    output = tmp_path / "results.json"
    for part in ("steps", "kernels", "steps"):
        arguments = ("validate", "--suite", "smoke", "--only", part, "--profile", profile_path, "--output", output)
        assert invoke(*arguments).exit_code == 0
    report = SuiteReport.read(output)
    assert report.sections == ("kernels", "steps")
    assert sorted(row.section for row in report.rows) == ["kernels", "steps"]
    assert [options.only for options in measured] == [("steps",), ("kernels",), ("steps",)]
    assert all(options.models == () for options in measured)  # none is needed without generations


def test_a_file_of_another_machine_is_refused_before_anything_runs(
    refuses: Any, measured: list[SuiteOptions], profile_path: Path, results: Path
) -> None:
    before = results.read_text()
    command = ("validate", "--suite", "full", "--only", "steps", "--profile", profile_path, "--output", results)
    assert "its device is 'a GPU'" in refuses(*command)
    assert not measured
    assert results.read_text() == before


def test_models_and_texts_reach_the_suite(
    invoke: Any, measured: list[SuiteOptions], profile: Profile, profile_path: Path, tmp_path: Path
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
    options = measured[0]
    assert options == SuiteOptions("smoke", (), profile, ("one", "two"), "the text a.txt", "the text b.txt")
    assert {"summary", "rows", "regret"} <= json.loads(answer.stdout).keys()


def test_a_report_is_shown_as_tables_json_and_html(invoke: Any, results: Path, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    shown = invoke("validate", "--report", results, "--html", html).stdout
    for words in ("plain step", "missed", "skipped: a case: why", "+10.0%", "20.0%"):
        assert words in shown
    assert html.read_text().startswith("<!doctype html>")
    data = json.loads(invoke("validate", "--report", results, "--json").stdout)
    assert SuiteReport.from_json(json.dumps({key: value for key, value in data.items() if key != "summary"})) == REPORT
    assert {item["name"] for item in data["summary"]} == {"steps", "plain step", "regret"}


def test_without_plotly_there_is_a_note_and_no_html(
    invoke: Any, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.importlib.util, "find_spec", lambda name: None)
    answer = invoke("validate", "--report", results, "--html", tmp_path / "report.html")
    assert answer.exit_code == 0
    assert "ridgeplan validate --report" in answer.stderr
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("measured_ms", "spread", "words"),
    [
        (11.0, 0.05, None),
        (25.0, 0.05, "took 2.5x the time that the calibration of 2026-11-21 predicts: this is another machine now"),
        (25.0, 0.9, "other programs slow the machine now"),
        (5.0, 0.05, "took 0.5x the time that the calibration of 2026-11-21 predicts: it was busy then"),
        (5.0, 0.9, "it was busy then"),
    ],
)
def test_a_demo_says_where_the_calibration_does_not_hold(
    profile: Any, measured_ms: float, spread: float, words: str | None
) -> None:
    rows = (ComparisonRow("tpot", "ms", 10.0, measured_ms),)
    note = misfit_note(Comparison("autoregressive", 64, 8, 1, "calibrated", rows, spread), profile)
    assert (note is None) if words is None else words in str(note)
