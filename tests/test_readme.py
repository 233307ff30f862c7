"""README's commands run, and its Python does what it says, at the size of a test."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from ridgeplan.dashboards.cli import main
from ridgeplan.roofline.catalog.profile_lookup import shipped_profiles, user_profile_path

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
    smaller = {'"128k"': "64", "new_tokens=512": "new_tokens=8", '"path-or-hub-id"': repr(str(tiny_folder))}
    for text, replacement in smaller.items():
        assert text in code
        code = code.replace(text, replacement)
    exec(code, {"prompt_ids": list(range(60))})
    assert "predicted" in capsys.readouterr().out
