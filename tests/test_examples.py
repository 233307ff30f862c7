"""The notebooks of docs/examples run as they stand, and keep what they show."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "examples"
NOTEBOOKS = [
    pytest.param(path, marks=[pytest.mark.model, pytest.mark.slow]) if path.stem == "serve_a_model" else path
    for path in sorted(FOLDER.glob("*.ipynb"))
]


@pytest.fixture(scope="module")
def execute() -> Callable[[Path, str], Any]:
    """What `make notebooks` executes a notebook with."""
    pytest.importorskip("nbclient")
    run: Callable[[Path, str], Any] = runpy.run_path(str(FOLDER / "run.py"))["execute"]
    return run


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, execute: Callable[[Path, str], Any], request: pytest.FixtureRequest) -> None:
    if path.stem == "serve_a_model":
        request.getfixturevalue("smollm2")  # skips where its wheel is not installed
    ran = execute(path, "json")
    kept = json.loads(path.read_text(encoding="utf-8"))
    shown = [[one["output_type"] for one in cell["outputs"]] for cell in kept["cells"] if cell["cell_type"] == "code"]
    assert [[one.output_type for one in cell.outputs] for cell in ran.cells if cell.cell_type == "code"] == shown


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_keeps_no_path_and_no_warning_of_a_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert '"stderr"' not in text
    assert "site-packages" not in text
    assert '"image/svg+xml"' in text
