"""`ridgeplan bench kernels`: what it prints and writes for a given report, and what it refuses."""

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import Result

from ridgeplan.dashboards.cli_bench import row_texts
from ridgeplan.kernels import linear_dense_cuda, linear_dense_plan, linear_int4_cuda
from ridgeplan.validate import kernel_bench
from ridgeplan.validate.kernel_bench import KernelReport, Roof, Row
from ridgeplan.validate.kernel_sizes import FULL, KERNELS

ROOT = Path(__file__).parents[2]
Invoke = Callable[..., Result]
ROWS = (
    Row("attention", "32/8 x 128", 4e-5, {"SDPA cuDNN": 1.2e-4, "FlashInfer": 1.3e-4}, "SDPA cuDNN", 3e-5, 1e-3, 5e-5),
    Row("draw", "32 x 128256", 3e-5, {}, None, 1e-5, 0.0, 2.5e-5),
)
COLUMNS = {"kernel", "shape", "ours_us", "peer", "peer_us", "peers_us", "ratio", "roof", "error", "target_us", "met"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The kernels that a run was asked for; the run itself finds `ROWS`."""
    calls: list[tuple[str, ...]] = []

    def bench_kernels(kernels: Iterable[str], on_progress: Callable[[str, int, int], None]) -> KernelReport:
        calls.append(tuple(kernels))
        on_progress("attention", 0, 1)
        return KernelReport("a GPU", {"torch": "2"}, "2026-11-21", Roof(4e12, 7e14), ROWS)

    monkeypatch.setattr(kernel_bench, "bench_kernels", bench_kernels)
    return calls


def test_the_table_shows_ours_and_the_peer(invoke: Invoke, asked: list[tuple[str, ...]]) -> None:
    result = invoke("bench", "kernels")
    assert result.exit_code == 0
    assert asked == [KERNELS]
    lines = result.stdout.splitlines()
    assert lines[0] == "a GPU, 4 TB/s, 700 TFLOP/s, 2026-11-21"
    cells = [cell.strip() for cell in next(line for line in lines if "attention" in line).strip("│").split("│")]
    assert cells == ["attention 32/8 x 128", "40", "120", "3.00x", "75%", "1.0e-03", "50", "met", "SDPA cuDNN"]
    cells = [cell.strip() for cell in next(line for line in lines if "draw" in line).strip("│").split("│")]
    assert cells == ["draw 32 x 128256", "30", "", "", "33%", "0.0e+00", "25", "missed", ""]
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


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    """The report from the H200."""
    found: dict[str, Any] = json.loads((ROOT / "validate" / "kernels_h200.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def section() -> str:
    """What README says of it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.partition("## Kernels on an H200\n")[2].partition("\n## ")[0]


def test_the_readme_shows_the_shipped_measurement(shipped: dict[str, Any], section: str) -> None:
    _, _, *shown = [line for line in section.partition("<details>")[2].splitlines() if line.startswith("|")]
    assert shown == [f"| {' | '.join(row_texts(row))} |" for row in shipped["rows"]]
    rows, met, text = shipped["rows"], sum(row["met"] for row in shipped["rows"]), " ".join(section.split())
    assert f"{met} of {len(rows)} meet their targets" in text
    assert f"({shipped['copy_bytes_per_s'] / 1e12:.2f} TB/s)" in text
    assert f"({shipped['matmul_flops'] / 1e12:.0f} TFLOP/s)" in text
    assert shipped["date"] in text


def test_the_readme_tells_the_misses_as_they_were_measured(shipped: dict[str, Any], section: str) -> None:
    told = section.partition("The misses:\n\n- ")[2].partition("\n\n")[0].split("\n- ")
    narrow, verified, dense, quantized = (" ".join(item.split()) for item in told)
    missed: dict[str, list[Any]] = {}
    for row in shipped["rows"]:
        if not row["met"]:
            missed.setdefault(row["kernel"], []).append(row)
    assert missed.keys() == {"attention", "verification", "linear_dense", "quantize"}

    for name in ("INT4", "INT8", "full"):
        rows = [row for row in missed["attention"] if row["shape"].endswith(name)]
        assert all(" x 64, " in row["shape"] for row in rows)
        assert name == "full" or all(" 4096 tokens" in row["shape"] for row in rows)
        ratios = [row["ratio"] for row in rows]
        assert f"{min(ratios):.2f}x to {max(ratios):.2f}x " in narrow
    (slow,) = missed["verification"]
    assert f"takes {1 / slow['ratio']:.2f} times as long as one query" in verified
    slower = [f"{row['ours_us'] / row['peer_us'] - 1:.1%}" for row in missed["linear_dense"]]
    assert f"two of 20, with 8 rows, take {' and '.join(slower)} longer" in dense
    assert [row["shape"][:4] for row in missed["linear_dense"]] == ["8 x "] * 2
    left = [size for size in FULL.linear_dense if max(size.outputs, size.inputs) > linear_dense_plan.FEW_CHANNELS]
    assert len(left) == 3
    assert f"Three with 16 rows, those of more than {linear_dense_plan.FEW_CHANNELS} inputs or outputs" in dense
    (few,) = missed["quantize"]
    assert f"reaches {few['roof']:.0%} of the bandwidth" in quantized


@pytest.mark.parametrize(("kernel", "module"), [("linear_int4", linear_int4_cuda), ("linear_dense", linear_dense_cuda)])
def test_the_logs_of_products_end_with_the_shipped_times(
    shipped: dict[str, Any], kernel: str, module: ModuleType
) -> None:
    log = " ".join((module.__doc__ or "").split())
    outcome = log.partition("outcome (validate/kernels_h200.json) with 1, 4, 8, 16 rows: ")[2]
    told = re.findall(r"(\d+) x (\d+) ((?:[\d.]+, ){3}(?:-|\d+(?:\.\d)?))[;.]", outcome)
    ours_us = {row["shape"]: row["ours_us"] for row in shipped["rows"] if row["kernel"] == kernel}
    assert len(told) * 4 == len(ours_us)
    for outputs, inputs, times in told:
        for rows, time in zip((1, 4, 8, 16), times.split(", "), strict=True):
            found = ours_us[f"{rows} x {inputs} -> {outputs}"]
            assert time in ("-", f"{found:.0f}", f"{found:.1f}"), (kernel, outputs, inputs, rows)
