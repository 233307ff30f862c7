"""`bench decode` and `bench suite`: a small model's function at another shape's size, as tables and JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeplan.dashboards.cli_bench_decode import SUITE_WORKLOADS
from ridgeplan.roofline.shapes import ModelShape
from ridgeplan.validate.toy import toy_shape


@pytest.fixture
def small_shape(monkeypatch: pytest.MonkeyPatch) -> ModelShape:
    """A shape little larger than SmolLM2's, under a name of the catalog."""
    shape = toy_shape(30, 640, 1600, 9, 3, 64, vocab=49_200)
    monkeypatch.setattr("ridgeplan.dashboards.cli_bench_decode.load_shape", lambda name: shape)
    return shape


@pytest.mark.model
def test_decode_runs_plain_decoding_and_the_preset(
    invoke: Any, profile_path: Path, small_shape: ModelShape, smollm2: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "bench.json"
    arguments = ["bench", "decode", "--model-shape", "toy", "--ctx", 64, "--preset", "quantspec-kv", "--gamma", 2]
    arguments += ["--new-tokens", 6, "--profile", profile_path, "--output", saved]
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert json.loads(saved.read_text()) == json.loads(result.stdout)
    assert [(row["preset"], row["gamma"]) for row in rows] == [("autoregressive", 0), ("quantspec-kv", 2)]
    assert rows[1]["measured"]["generated"] == 6
    table = invoke(*arguments).stdout
    assert "tokens/round" in table
    assert "quantspec-kv" in table


@pytest.mark.model
def test_the_text_that_comes_with_python_holds_the_default_suite(smollm2: Path) -> None:
    from ridgeplan.runtime.checkpoint import load_tokenizer, model_source
    from ridgeplan.validate.prompts import sample_text

    tokens = len(load_tokenizer(model_source(str(smollm2))).encode(sample_text()))
    sizes = [map(int, workload.split("x")) for workload in SUITE_WORKLOADS]
    assert max(context + batch - 1 for context, batch in sizes) <= tokens


@pytest.mark.model
def test_a_shape_too_small_for_the_model_is_one_line(
    refuses: Any, profile_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    shape = toy_shape(30, 512, 1600, 9, 3, 64, vocab=49_200)
    monkeypatch.setattr("ridgeplan.dashboards.cli_bench_decode.load_shape", lambda name: shape)
    arguments = ("bench", "decode", "--model-shape", "toy", "--ctx", 64, "--profile", profile_path)
    assert "needs 577 hidden channels and a constant" in refuses(*arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("suite", "--model-shape", "toy", "--workload", "4096"),
            "'4096' is not a workload; allowed: context and batch",
        ),
        (("decode", "--model-shape", "nonsense-9b", "--ctx", "64"), "nonsense-9b"),
        (("decode", "--ctx", "64"), "--model-shape"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(invoke: Any, arguments: tuple[str, ...], message: str) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
