"""Installs the wheel into clean environments, with and without extras, and asks each for a plan: `make test-install`.

Prints megabytes and seconds of `pip install`, and seconds of the first plan and of the next. Needs a package index.
Usage: clean_install.py [EXTRA...], by default "base", without any, then "page"; "run" downloads gigabytes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLAN = ("plan", "meta-llama/Llama-3.1-8B", "--gpu", "h200", "--ctx", "128k")
TOOLS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "__pycache__")  # what a new environment has
CACHED = "__pycache__"
BASE = "base"  # no extra


def main(extras: list[str]) -> None:
    """One line per environment. Ends with an error where an installation or a plan fails."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        wheel = built_wheel(place)
        print(f"wheel {wheel.stat().st_size / 1e6:.1f} MB")
        for extra in extras or [BASE, "page"]:
            measured = installed(wheel, "" if extra == BASE else extra, place / f"venv-{extra}")
            print(f"{extra if extra == BASE else f'[{extra}]'}: {measured}", flush=True)


def built_wheel(place: Path) -> Path:
    """The wheel of this checkout, built from a copy, as building leaves files behind."""
    source = place / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", CACHED))
    builder = place / "builder"  # Debian's Python has no pip of its own
    venv.create(builder, with_pip=True)
    pip = (builder / "bin" / "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, source)
    subprocess.run(pip, check=True)
    (wheel,) = place.glob("ridgeplan-*.whl")
    return wheel


def installed(wheel: Path, extra: str, place: Path) -> str:
    """Size and times of an installation."""
    venv.create(place, with_pip=True)
    begin = time.perf_counter()
    requirement = f"ridgeplan[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
    subprocess.run((place / "bin" / "python", "-m", "pip", "install", "--quiet", requirement), check=True)
    seconds = time.perf_counter() - begin
    packages = Path(subprocess.check_output(
        (place / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"), text=True,
    ).strip())  # fmt: skip
    first, again = (seconds_of_plan(place / "bin" / "ridgeplan") for _ in range(2))
    compiled, sources = megabytes(packages, compiled=True), megabytes(packages, compiled=False)
    return (
        f"{sources + compiled:.0f} MB in {seconds:.1f} s, {compiled:.0f} of them compiled by pip; "
        f"first plan {first:.2f} s, the next {again:.2f} s"
    )


def megabytes(packages: Path, *, compiled: bool) -> float:
    """What was installed without pip and setuptools: Python's compiled files, or all others."""
    files = (path for path in packages.rglob("*") if path.is_file() and (CACHED in path.parts) == compiled)
    return sum(path.stat().st_size for path in files if not path.relative_to(packages).parts[0].startswith(TOOLS)) / 1e6


def seconds_of_plan(command: Path) -> float:
    """Wall-clock seconds of a plan in a new process."""
    begin = time.perf_counter()
    subprocess.run((command, *PLAN), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(sys.argv[1:])
