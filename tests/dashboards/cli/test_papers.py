"""`ridgeplan papers`: tables, JSON, files and refusals."""

import json
import sys
from pathlib import Path
from subprocess import run
from typing import Any


def test_json_has_every_table_with_its_summary(invoke: Any) -> None:
    result = invoke("papers", "--json")
    assert result.exit_code == 0, result.stderr
    tables = json.loads(result.stdout)["tables"]
    assert {table["paper"] for table in tables} == {"quantspec", "specontext", "specattn", "dapq"}
    for table in tables:
        assert set(table) == {"paper", "name", "title", "predicted", "unpredicted", "median_error", "cells", "targets"}
        assert table["predicted"] + table["unpredicted"] == len(table["cells"])
        for cell in table["cells"]:
            assert set(cell) == {"case", "method", "metric", "published", "predicted", "error", "flag"}
            numbers = all(isinstance(cell[side], (int, float)) for side in ("published", "predicted"))
            assert (cell["error"] is not None) == numbers


def test_tables_show_cells_targets_and_reasons(invoke: Any) -> None:
    result = invoke("papers", "--paper", "quantspec", "--paper", "specattn")
    assert result.exit_code == 0, result.stderr
    for part in ("quantspec, Table 3", "OOM", "target: both out-of-memory cells right: 2 of 2, met", "not modelled"):
        assert part in result.stdout
    assert "dapq" not in result.stdout


def test_output_writes_the_json_that_is_printed(invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "papers.json"
    result = invoke("papers", "--paper", "dapq", "--json", "--output", path)
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(result.stdout)


def test_an_unknown_paper_and_a_wrong_file_are_refused(refuses: Any, tmp_path: Path) -> None:
    assert "unknown paper 'magicdec'; allowed: quantspec" in refuses("papers", "--paper", "magicdec")
    assert "cannot write" in refuses("papers", "--output", tmp_path / "none" / "papers.json")


def test_the_command_imports_neither_torch_nor_sympy() -> None:
    code = (
        "import sys; from ridgeplan.dashboards.cli import main\n"
        "try: main(['papers', '--paper', 'dapq', '--json'])\n"
        "finally: print({'torch', 'sympy', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    found = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.strip() == "set()"
