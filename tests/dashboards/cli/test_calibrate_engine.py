"""`calibrate --engine`: a server is measured, and `--backend` and `export` answer with what was measured."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from fake_engine import serving

from ridgeplan.planner.engines.measurements import load_measurements, user_engine_path
from ridgeplan.planner.engines.rates import engine_profile
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.engine import EngineStep
from ridgeplan.validate import engine_steps

LLAMA, H200 = load_shape("meta-llama/Llama-3.1-8B"), load_hardware("h200")
SLOWER = 2.0
Invoke = Callable[..., Result]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files of this test alone, and few tokens a case."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    user_engine_path("vllm").parent.mkdir()
    for name, value in {"NEW_TOKENS": 40, "SKIPPED_STEPS": 3, "MIN_STEPS": 8}.items():
        monkeypatch.setattr(engine_steps, name, value)


def slow_step_s(context: int, batch: int) -> float:
    """An engine that takes twice the time of the shipped profile."""
    rates = engine_profile("vllm", H200).rates
    step = EngineStep(batch, context, 16, 16, rates.kv_rate("bf16"))
    return SLOWER * float(rates.step_s(LLAMA, H200, step))


@pytest.fixture
def shipped_s() -> dict[tuple[int, int], float]:
    """Times of the test's server, taken before anything is saved."""
    return {(context, batch): slow_step_s(context, batch) for context in (512, 4096) for batch in (1, 2, 4)}


def plan_ms(invoke: Invoke, *options: object) -> float:
    command = (
        "plan",
        LLAMA.name,
        "--gpu",
        "h200",
        "--ctx",
        "4k",
        "--batch",
        2,
        "--quality",
        "exact",
        "--backend",
        "vllm",
    )
    result = invoke(*command, *options, "--json")
    return json.loads(result.stdout)["predicted"]["tpot_ms"]


def test_answers_are_those_of_the_measured_engine(
    invoke: Invoke, shipped_s: dict[tuple[int, int], float], tmp_path: Path
) -> None:
    before_ms = plan_ms(invoke)
    with serving(lambda context, batch: shipped_s.get((context, batch), 0.01)) as server:
        measured = invoke("calibrate", "--engine", "vllm", "--url", server.url, "--model", LLAMA.name, "--gpu", "h200",
                          "--ctx", "512,4k", "--batch", "1,2,4")  # fmt: skip
    assert measured.exit_code == 0 and "fitted rates miss" not in measured.stderr, measured.stderr
    assert "vLLM 0.24.0 on h200: meta-llama/Llama-3.1-8B" in measured.stdout
    saved = load_measurements(user_engine_path("vllm"))
    assert len(saved.rows) == 6
    for row in saved.rows:
        assert row.tpot_ms == pytest.approx(1e3 * shipped_s[row.context, row.batch], rel=0.02)

    after_ms = plan_ms(invoke)
    assert after_ms / before_ms == pytest.approx(SLOWER, rel=0.15)
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(saved.to_json(), encoding="utf-8")
    user_engine_path("vllm").unlink()
    assert plan_ms(invoke) == before_ms
    assert plan_ms(invoke, "--engine-profile", elsewhere) == after_ms

    plan = tmp_path / "plan.json"
    assert plan_ms(invoke, "--engine-profile", elsewhere, "--output", plan) == after_ms
    exported = invoke("export", plan, "--to", "vllm", "--engine-profile", elsewhere, "--json")
    assert json.loads(exported.stdout)["predicted"]["tpot_ms"] == pytest.approx(after_ms, rel=1e-12)


def test_a_second_measurement_adds_formats_and_replaces_steps(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    command = (
        "calibrate",
        "--engine",
        "vllm",
        "--model",
        LLAMA.name,
        "--gpu",
        "h200",
        "--ctx",
        "256",
        "--output",
        path,
    )
    steps = []
    for options in (("--batch", "1,2"), ("--batch", "2", "--kv-cache-dtype", "fp8"), ("--batch", "2")):
        with serving(lambda context, batch: 0.01) as server:
            result = invoke(*command, "--url", server.url, *options, "--json")
        assert json.loads(result.stdout)["path"] == str(path)
        steps.append([(row.batch, row.kv) for row in load_measurements(path).rows])
    assert steps[0] == [(1, "auto"), (2, "auto")]
    assert steps[1] == [(1, "auto"), (2, "auto"), (2, "fp8")]
    assert sorted(steps[2]) == sorted(steps[1])


def test_steps_that_are_hardly_of_the_gpu_are_noted(invoke: Invoke, tmp_path: Path) -> None:
    with serving(lambda context, batch: 0.2) as server:
        result = invoke("calibrate", "--engine", "vllm", "--url", server.url, "--model", LLAMA.name, "--gpu", "h200",
                        "--ctx", "256", "--batch", "1", "--output", tmp_path / "engine.json")  # fmt: skip
    assert "note: fitted rates miss steps by up to" in result.stderr and "was it h200" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "vllm"), "--engine needs --model"),
        (("--engine", "sglang", "--model", LLAMA.name), "SGLang is measured by --url"),
        (("--engine", "vllm", "--model", LLAMA.name, "--gpu", "h200", "--ctx", "131072"), "beyond .* limit of 131072"),
        (("--engine", "vllm", "--model", LLAMA.name, "--kv-cache-dtype", "int3"), "'int3'; allowed: auto"),
        (("--engine", "vllm", "--quick"), "--engine measures an engine alone"),
        (("--url", "http://localhost:1"), "need --engine"),
    ],
)
def test_wrong_options_are_one_line(invoke: Invoke, options: tuple[str, ...], message: str) -> None:
    result = invoke("calibrate", *options)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr)


@pytest.mark.parametrize("damage", ["file", "lock"])
def test_a_file_that_cannot_be_extended_is_refused_before_measuring(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    path = tmp_path / "engine.json"
    if damage == "file":
        path.write_text("{}")
    else:
        (tmp_path / ".engine.json.lock").mkdir()
    monkeypatch.setattr("ridgeplan.dashboards.cli.calibrate_engine.measure_steps", pytest.fail)
    result = invoke("calibrate", "--engine", "vllm", "--url", "http://localhost:1", "--model", LLAMA.name,
                    "--gpu", "h200", "--output", path)  # fmt: skip
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "engine.json" in result.stderr
