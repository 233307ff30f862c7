"""`ridgeplan bench kernels`: what it prints and writes for a given report, and what it refuses."""

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from click.testing import Result

from ridgeplan.validate import kernel_bench, planner_speed
from ridgeplan.validate.kernel_bench import KernelReport, KernelRow, MachinePeaks
from ridgeplan.validate.kernel_calls.sizes import KERNELS
from ridgeplan.validate.measure import Progress
from ridgeplan.validate.planner_speed import PlannerSpeed

ROOT = Path(__file__).parents[2]
Invoke = Callable[..., Result]
ROWS = (
    KernelRow(
        "attention", "32/8 x 128", 4e-5, {"SDPA cuDNN": 1.2e-4, "FlashInfer": 1.3e-4}, "SDPA cuDNN", 3e-5, 1e-3, 5e-5
    ),
    KernelRow("draw", "32 x 128256", 3e-5, {}, None, 1e-5, 0.0, 2.5e-5),
)
COLUMNS = {"kernel", "shape", "ours_us", "peer", "peer_us", "peers_us", "ratio", "roof", "error", "target_us", "met"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The kernels that a run was asked for; the run itself finds `ROWS`."""
    calls: list[tuple[str, ...]] = []

    def bench_kernels(kernels: Iterable[str], on_progress: Callable[[str, int, int], None]) -> KernelReport:
        calls.append(tuple(kernels))
        on_progress("attention", 0, 1)
        return KernelReport("a GPU", {"torch": "2"}, "2026-11-21", MachinePeaks(4e12, 7e14), ROWS)

    monkeypatch.setattr(kernel_bench, "bench_kernels", bench_kernels)
    return calls


def test_the_table_shows_ours_and_the_peer(invoke: Invoke, asked: list[tuple[str, ...]]) -> None:
    result = invoke("bench", "kernels")
    assert result.exit_code == 0
    assert asked == [KERNELS]
    lines = result.stdout.splitlines()
    assert lines[0] == "a GPU, 4 TB/s, 700 TFLOP/s, 2026-11-21"
    cells = re.split(r"\s{2,}", next(line for line in lines if "attention" in line).strip())
    assert cells == ["attention 32/8 x 128", "40", "120", "3.00x", "75%", "1.0e-03", "50", "met", "SDPA cuDNN"]
    cells = re.split(r"\s{2,}", next(line for line in lines if "draw" in line).strip())
    assert cells == ["draw 32 x 128256", "30", "33%", "0.0e+00", "25", "missed"]
    assert lines[-1] == "1 of 2 meet the targets for an H200"


def test_json_is_one_object_and_the_file_holds_the_same(
    invoke: Invoke, asked: list[tuple[str, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "kernels.json"
    result = invoke("bench", "kernels", "--only", "draw", "--only", "attention", "--json", "--output", path)
    report = json.loads(result.stdout)
    assert asked == [("draw", "attention")]
    assert json.loads(path.read_text(encoding="utf-8")) == report
    assert [file.name for file in tmp_path.iterdir()] == ["kernels.json"]
    assert (report["device"], report["copy_bytes_per_s"], report["matmul_flops"]) == ("a GPU", 4e12, 7e14)
    assert all(set(row) == COLUMNS for row in report["rows"])
    first, second = report["rows"]
    assert (first["ours_us"], first["peer_us"], first["ratio"], first["met"]) == (40.0, 120.0, 3.0, True)
    assert (second["peer"], second["ratio"], second["target_us"], second["met"]) == (None, None, 25.0, False)


def test_once_lists_the_errors(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "run_kernels_once", lambda kernels: [(name, "tiny", 1e-3) for name in kernels])
    result = invoke("bench", "kernels", "--once", "--only", "norm")
    assert result.exit_code == 0
    assert "norm" in result.stdout
    assert "1.0e-03" in result.stdout
    result = invoke("bench", "kernels", "--once", "--only", "norm", "--json")
    assert json.loads(result.stdout) == {"rows": [{"kernel": "norm", "shape": "tiny", "error": 1e-3}]}


def test_an_error_that_is_not_finite_is_shown_and_saved(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_bench, "run_kernels_once", lambda kernels: [("norm", "tiny", math.nan)])
    path = tmp_path / "once.json"
    result = invoke("bench", "kernels", "--once", "--output", path)
    assert result.exit_code == 0
    assert "not finite" in result.stdout
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert row == {"kernel": "norm", "shape": "tiny", "error": None}


def test_an_unknown_kernel_names_the_allowed(refuses: Callable[..., str]) -> None:
    line = refuses("bench", "kernels", "--only", "softmax")
    assert "'softmax'" in line
    assert all(f"'{name}'" in line for name in KERNELS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("arguments", [(), ("--once",), ("--json",)], ids=str)
def test_without_a_gpu_one_line_says_so(refuses: Callable[..., str], arguments: tuple[str, ...]) -> None:
    assert "needs a CUDA device" in refuses("bench", "kernels", *arguments)


def test_an_output_that_cannot_be_written_is_refused_first(
    refuses: Callable[..., str], asked: list[tuple[str, ...]], tmp_path: Path
) -> None:
    refuses("bench", "kernels", "--output", tmp_path / "nowhere" / "kernels.json")
    assert not asked


def test_planner_speed_is_told_in_units_and_saved(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[int] = []

    def measure_planner(runs: int, on_progress: Progress) -> PlannerSpeed:
        asked.append(runs)
        on_progress("a new process", 0, 3)
        return PlannerSpeed(
            help_s=0.1, cold_s=0.4, first_s=0.05, warm_s=0.02, map_s=0.6, grid_s=2.5, searched_plans=5000,
            swept_plans_per_s=1.5e7,
        )  # fmt: skip

    monkeypatch.setattr(planner_speed, "measure_planner", measure_planner)
    path = tmp_path / "speed.json"
    result = invoke("bench", "planner", "--runs", "2", "--output", str(path))
    assert result.exit_code == 0
    assert asked == [2]
    assert "400 ms" in result.stdout and "20.0 ms for 5,000 plans" in result.stdout
    assert "0.25 million plans per second" in result.stdout and "15.0 million plans per second" in result.stdout
    assert json.loads(path.read_text(encoding="utf-8"))["searched_plans_per_s"] == 250_000
