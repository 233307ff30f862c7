"""The package as it is installed: its version, its types, and what its wheel holds."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ridgeplan

ROOT = Path(__file__).parents[1]
PACKAGES = ("roofline", "planner", "kernels", "runtime", "validate", "dashboards")
SHIPPED = (".py", ".toml", ".cu", ".cuh", ".safetensors")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel, built from a copy as building leaves files behind."""
    source, built = tmp_path_factory.mktemp("source") / "ridgeplan", tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__"))
    command = [sys.executable, "-c", BUILD, str(built)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = built.glob("*.whl")
    assert path.name == f"ridgeplan-{ridgeplan.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


def test_the_wheel_has_every_source_and_no_test(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    expected = {
        f"ridgeplan/{path.relative_to(ROOT).as_posix()}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in SHIPPED or path.parent.name in ("profiles", "measured")
    }
    assert {name for name in expected if "__pycache__" not in name} <= held
    assert {name.partition("/")[0] for name in held} == {"ridgeplan"}
    assert not [name for name in held if "test" in Path(name).name.split("_")]


def test_users_see_types_and_one_command(wheel: zipfile.ZipFile) -> None:
    assert "ridgeplan/py.typed" in wheel.namelist()  # it counts for all packages below ridgeplan (PEP 561)
    (entries,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(entries).decode().split() == [
        "[console_scripts]", "ridgeplan", "=", "ridgeplan.dashboards.cli:main",
    ]  # fmt: skip


def test_the_changelog_begins_with_this_version() -> None:
    (latest, *_) = re.findall(r"^## ([^,\n]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest == ridgeplan.__version__


def test_kernels_has_a_file_of_its_own_in_the_wheel_alone(wheel: zipfile.ZipFile) -> None:
    """The folder must not have one, and an editable install finds no package without one below ridgeplan."""
    assert "ridgeplan/kernels/__init__.py" in wheel.namelist()
    assert not (ROOT / "kernels" / "__init__.py").exists()
