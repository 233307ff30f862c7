"""README's commands run, its Python does what it says, at the size of a test, and docs/architecture.md is complete."""

import json
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ridgeplan.dashboards.cli import main
from ridgeplan.roofline.catalog.profile import shipped_profiles, user_profile_path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", re.findall(r"^\$ ridgeplan (.+)$", README, re.MULTILINE))
def test_commands_with_their_output_run(line: str) -> None:
    result = CliRunner().invoke(main, shlex.split(line))
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore:the plan is for")
def test_the_python_runs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    user_profile_path().parent.mkdir()
    user_profile_path().write_text(shipped_profiles()[0].to_json())  # in place of `ridgeplan calibrate`
    [code] = re.findall(r"```python\n(.+?)```", README, re.DOTALL)
    smaller = {'"120k"': "64", "new_tokens=512": "new_tokens=8", '"path-or-hub-id"': repr(str(tiny_folder))}
    for text, replacement in smaller.items():
        assert text in code
        code = code.replace(text, replacement)
    exec(code, {"prompt_ids": list(range(60))})
    assert "predicted" in capsys.readouterr().out


def test_the_table_of_folders_has_every_folder() -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)` \|", page.partition("## The folders\n")[2], re.MULTILINE)
    packages = ("roofline", "planner", "kernels", "runtime", "validate", "dashboards")
    folders = {path.parent.relative_to(root).as_posix() for name in packages for path in (root / name).rglob("*.py")}
    assert sorted(listed) == sorted(folders)


# The notebooks of docs/examples run as they stand, and keep what they show.

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
    shown = [
        [output["output_type"] for output in cell["outputs"]] for cell in kept["cells"] if cell["cell_type"] == "code"
    ]
    assert [[output.output_type for output in cell.outputs] for cell in ran.cells if cell.cell_type == "code"] == shown


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_keeps_no_path_and_no_warning_of_a_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert '"stderr"' not in text
    assert "site-packages" not in text
    assert '"image/svg+xml"' in text
