"""For engineers: roof shares, a round's trace, a brief as one file, and timings from elsewhere."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.planner.quantities import time_text
from ridgeplan.planner.render.trace import chrome_trace
from ridgeplan.roofline.catalog.profile import Profile, load_profile, save_profile, transferred_spread
from ridgeplan.roofline.plan.presets import short_name

LLAMA, HEAD = "Llama-3.1-8B", "class,seconds,flops,read_bytes,write_bytes\n"


def test_operations_say_what_bounds_them(invoke: Any, profile: Profile) -> None:
    command = ("estimate", LLAMA, "--preset", "quantspec", "--gpu", "h200", "--ctx", "64k")
    rows = json.loads(invoke(*command, "--json").stdout)["predicted"]["breakdown"]
    by_op = {f"{row['part']} {row['op']}": row for row in rows}
    hardware = profile.hardware
    for row in rows:
        roof_s = max(row["bytes"] / hardware.bandwidth_bytes_per_s, row["flops"] / hardware.compute_flops)
        assert row["roof_share"] == pytest.approx(roof_s / row["seconds"] if row["bound"] else 0)
    assert by_op["prefill mlp down"]["bound"] == "compute"
    assert by_op["target mlp down"]["bound"] == "memory"
    assert by_op["draft first norm"]["bound"] == "launches"
    assert "memory: linear" in invoke(*command).stdout


def test_products_in_fp8_have_the_roof_of_8_bits(invoke: Any) -> None:
    command = ("estimate", "Llama-3.1-70B", "--preset", "int8-weights", "--gpu", "h100", "--ctx", "32k", "--tp", "4")
    rows = json.loads(invoke(*command, "--json").stdout)["predicted"]["breakdown"]
    arithmetic = {row["op"]: row["arithmetic"] for row in rows}
    assert (arithmetic["mlp down"], arithmetic["lm head"], arithmetic["prefill attention"]) == (2, 1, 1)
    assert 0.5 < max(row["roof_share"] for row in rows) < 1


def test_a_trace_holds_a_round_and_what_was_measured(invoke: Any, recommendation: Any, tmp_path: Path) -> None:
    predicted = recommendation.predicted
    events = chrome_trace(predicted, [("draft 1 of 1", 1e-3), ("verification", 2e-3)])["traceEvents"]
    parts = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (1, 1)]
    assert sum(event["dur"] for event in parts) == pytest.approx(1e3 * predicted.round_ms)
    assert [event["name"] for event in parts if "draft" in event["name"]] == [
        f"draft {index + 1} of {predicted.gamma}" for index in range(predicted.gamma)
    ]
    ends = [event["ts"] + event["dur"] for event in parts]
    assert [event["ts"] for event in parts[1:]] == pytest.approx(ends[:-1])
    measured = [(event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert measured == [(0.0, 1e3), (1e3, 2e3)]
    path = tmp_path / "trace.json"
    assert invoke("estimate", LLAMA, "--preset", "int8", "--gpu", "h200", "--ctx", 64, "--trace", path).exit_code == 0
    assert {event["name"] for event in json.loads(path.read_text())["traceEvents"]} >= {"verification", "mlp down"}


def test_a_brief_is_one_file_that_loads_nothing(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "brief.html"
    result = invoke("brief", LLAMA, "--gpu", "h200", "--ctx", "120k", "-o", path)
    assert result.exit_code == 0, result.stderr
    page = path.read_text()
    assert "ms per token, " in page.partition("</h1>")[0] and "<td>recommended" in page
    assert "<td>Bottleneck</td>" in page and "--all" not in page
    assert page.count('class="plotly-graph-div"') == 2
    assert "default-src 'none'" in page and "<script src" not in page


def test_a_brief_of_a_plan_asks_the_plan_s_question(invoke: Any, refuses: Any, tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "brief.html"
    question = (LLAMA, "--gpu", "h100", "--ctx", "9k", "--batch", 2, "--quality", "4-bit")
    answer = invoke("plan", *question, "-o", plan).stdout
    result = invoke("brief", plan, "-o", page)
    assert result.exit_code == 0, result.stderr
    assert " on h100-sxm, 9216 tokens, batch 2: " in result.stdout and "note: " not in result.stdout
    assert short_name(result.stdout.partition(" for ")[0]) in answer
    assert " on h200, 9216 tokens" in invoke("brief", plan, "--gpu", "h200", "-o", page).stdout
    assert "'.pdf'; allowed: .html, .png" in refuses("brief", plan, "-o", tmp_path / "brief.pdf")


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (("plan", "--backend", "vllm"), (), "For vLLM: "),
        (("estimate", "--preset", "int8"), (), "Plan of the file: the KV cache in 8 bits (int8)."),
        (("estimate", "--preset", "int8", "--tp", "2"), (), "Plan of the file: the KV cache in 8 bits (int8)."),
        (("plan", "--quality", "4-bit"), ("--quality", "exact"), "Plan of the file (quality: "),
        (("estimate", "--preset", "int8"), ("--backend", "vllm"), "Plan of the file: the KV cache in 8 bits (int8)."),
    ],
)
def test_a_brief_of_a_plan_is_about_this_plan_and_its_engine(
    invoke: Any, tmp_path: Path, source: tuple[str, ...], options: tuple[str, ...], says: str
) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "brief.html"
    verb, *rest = source
    assert invoke(verb, LLAMA, "--gpu", "h200", "--ctx", "32k", *rest, "-o", plan).exit_code == 0
    result = invoke("brief", plan, *options, "-o", page)
    assert result.exit_code == 0, result.stderr
    engine = ("--backend", "vllm") if {"vllm", "--tp"} & {*source, *options} else ()
    expected = json.loads(invoke("explain", plan, *engine, "--json").stdout)["predicted"]["tpot_ms"]
    text = page.read_text()
    assert f" {time_text(expected)} per token" in text.partition("</h1>")[0] and f"<p>{says}" in text
    searched = says.startswith("For ")
    assert ("note: recommended: " in result.stdout and "<td>recommended: " in text) is not searched


def test_a_brief_of_a_plan_that_the_engine_lacks_is_refused(invoke: Any, refuses: Any, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    options = ("--preset", "quantspec", "--gpu", "h200", "--ctx", "32k", "-o", plan)
    assert invoke("estimate", LLAMA, *options).exit_code == 0
    refusal = refuses("brief", plan, "--backend", "vllm", "-o", tmp_path / "brief.html")
    assert "quantspec: vllm has no " in refusal and not (tmp_path / "brief.html").exists()


def test_a_brief_as_png_is_a_picture_or_names_what_is_allowed(
    invoke: Any, refuses: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture itself is drawn by kaleido, which tests do without."""
    drawn: dict[Path, Any] = {}
    command, path = ("brief", LLAMA, "--gpu", "h200", "--ctx", "8k", "-o"), tmp_path / "slide.png"
    with monkeypatch.context() as patch:
        patch.setattr("ridgeplan.dashboards.cli.brief.require_package", str)
        patch.setattr("ridgeplan.dashboards.figures.paper_figure.write_pngs", drawn.update)
        assert invoke(*command, path).exit_code == 0
    assert [trace.type for trace in drawn[path].data][-1] == "table"
    assert "ms per token" in drawn[path].layout.title.text
    assert not path.exists()
    monkeypatch.setitem(sys.modules, "kaleido", None)  # not installed
    monkeypatch.setattr("ridgeplan.planner.recommend", lambda *args, **options: pytest.fail("planned first"))
    refusal = refuses(*command, path)
    assert "needs kaleido, which is not installed; install it with pip install 'ridgeplan[png]" in refusal


def test_a_plan_for_several_gpus_shows_its_degrees_and_is_explained(invoke: Any, tmp_path: Path) -> None:
    page, plan = tmp_path / "brief.html", tmp_path / "plan.json"
    options = (LLAMA, "--gpu", "h100", "--ctx", "8k", "--tp", 2)
    assert invoke("brief", *options, "-o", page).exit_code == 0
    assert "Degrees of parallelism" in page.read_text() and "tp 2: " in page.read_text()
    assert invoke("plan", *options, "-o", plan).exit_code == 0
    explained, estimated = (json.loads(invoke(*verb, "--json").stdout) for verb in (
        ("explain", plan), ("estimate", "--plan", plan)
    ))  # fmt: skip
    assert explained["predicted"]["tpot_ms"] == estimated["predicted"]["tpot_ms"]
    assert all(" on 2 x h100" in invoke(*verb).stdout for verb in (("explain", plan), ("estimate", "--plan", plan)))


def test_a_prompt_in_the_place_of_a_model_gets_a_hint(refuses: Any) -> None:
    assert "a prompt goes to --prompt" in refuses("run", "Why is the sky blue?")


@pytest.mark.parametrize(
    ("term", "words"),
    [("suffix", "looks up the text's last tokens"), ("cascade", "verifies a drafter's proposals"),
     ("tensor-parallel", "split over GPUs"), ("expert-parallel", "experts of a layer")],
)  # fmt: skip
def test_terms_of_the_glossary_are_explained(invoke: Any, term: str, words: str) -> None:
    assert words in " ".join(invoke("explain", term).stdout.split())


def test_timings_replace_the_rates_of_their_class(invoke: Any, profile: Profile, profile_path: Path) -> None:
    """Half of the bandwidth and a launch of 10 us."""
    rows, bandwidth = profile_path.with_name("rows.csv"), profile.hardware.bandwidth_bytes_per_s
    lines = [f"linear,{1e-5 + size / (0.5 * bandwidth)},0,{size},0" for size in (1e7, 1e8, 1e9)]
    rows.write_text(HEAD + "\n".join(lines))
    output = profile_path.with_name("corrected.json")
    result = invoke("import-measurements", rows, "--profile", profile_path, "--output", output)
    assert result.exit_code == 0, result.stderr
    linear = load_profile(output).classes["linear"]
    assert (linear.bandwidth_utilization, linear.launch_s) == pytest.approx((0.5, 1e-5), rel=0.01)
    assert linear.source == "measured"
    assert load_profile(output).classes["elementwise"] == profile.classes["elementwise"]


def test_timings_of_4_bit_products_are_of_those_by_integers_too(
    invoke: Any, profile: Profile, profile_path: Path
) -> None:
    classes = {**profile.classes, "linear_int4_integer": profile.classes["linear"]}
    save_profile(replace(profile, classes=classes), profile_path)
    rows, output = profile_path.with_name("rows.csv"), profile_path.with_name("corrected.json")
    rows.write_text(HEAD + "linear_int4,2.4e-4,0,3e8,0\nlinear_int4,1.3e-4,0,1.5e8,0")
    assert invoke("import-measurements", rows, "--profile", profile_path, "--output", output).exit_code == 0
    corrected = load_profile(output).classes
    assert corrected["linear_int4"].source == "measured" and "linear_int4_integer" not in corrected


def test_timings_need_a_calibration(refuses: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(HEAD + "linear,1e-5,0,1e6,0\nlinear,1e-4,0,1e7,0")
    words = "this machine is not calibrated; run `ridgeplan calibrate` first, or give --profile"
    assert words in refuses("import-measurements", rows)


def test_two_timings_are_explained_by_the_likelier_limit(invoke: Any, profile: Profile, profile_path: Path) -> None:
    """Bytes and FLOPs grow alike, so that either explains the time: of attention the bytes, of a prefill the FLOPs."""
    rows, output = profile_path.with_name("rows.csv"), profile_path.with_name("corrected.json")
    lines = ["attention,2.4e-4,3e8,1.07e9,8192", "attention,1.3e-4,1.5e8,5.4e8,8192"]
    lines += ["prefill_linear,1e-2,6e12,1e9,0", "prefill_linear,2e-2,1.2e13,2e9,0"]
    rows.write_text(HEAD + "\n".join(lines))
    assert invoke("import-measurements", rows, "--profile", profile_path, "--output", output).exit_code == 0
    classes = load_profile(output).classes
    # Two timings of each fit exactly and say nothing of noise.
    for kind in ("attention", "prefill_linear"):
        former = profile.classes[kind].spread if kind in profile.classes else transferred_spread(0.0)
        assert classes[kind].spread >= former > 0
    assert classes["attention"].bandwidth_utilization > 0.9
    assert classes["attention"].compute_utilization > 0.5  # a large matmul's
    assert classes["prefill_linear"].compute_utilization == pytest.approx(
        6e14 / profile.hardware.compute_flops, rel=0.05
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class,seconds\n", "columns of"),
        (HEAD, "there are no timings"),
        (f"{HEAD}linear,1,1,1,1", "'linear' has 1 timing; allowed: 2 or more"),
        (f"{HEAD}gemm,1,1,1,1", "line 2 of"),
        (f"{HEAD}linear,fast,1,1,1", "could not convert string to float: 'fast'; allowed: numbers"),
        (f"{HEAD}linear,-1,1,1,1", "seconds is -1.0; allowed"),
        (f"{HEAD}linear,1e-6,0,1e6,0\nlinear,1e-1,0,1e6,0", "no rates explain the timings of 'linear'"),
        (
            f"{HEAD}linear,1e-5,0,1e9,0\nlinear,1e-4,0,1e10,0",
            "the timings of 'linear' are 20.9x as fast as any rates",
        ),
    ],
)
def test_bad_timings_are_refused(refuses: Any, profile_path: Path, text: str, words: str) -> None:
    rows, output = profile_path.with_name("rows.csv"), profile_path.with_name("corrected.json")
    rows.write_text(text)
    assert words in refuses("import-measurements", rows, "--profile", profile_path, "--output", output)
    assert not output.exists()
