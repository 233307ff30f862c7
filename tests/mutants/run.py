"""Applies each fault of semantic.toml to a copy of the repository and runs the tests that must notice it.

    python tests/mutants/run.py [--first N] [--limit N]

Each fault replaces `find`, which stands once in `file`. Survivors are listed and the exit code is 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("roofline", "planner", "runtime", "validate", "dashboards")
LIMIT_S = 300  # tests that hang have noticed the fault as well


def load_mutants() -> list[dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("semantic.toml").read_text(encoding="utf-8"))["mutant"]


def copy_repository(folder: Path) -> tuple[Path, dict[str, str]]:
    """A copy, and the environment in which `ridgeplan` is imported from it instead of the installed package."""
    copied, site = folder / "repository", folder / "site" / "ridgeplan"
    shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    (site / "kernels").mkdir(parents=True)
    links = {name: copied / name for name in PACKAGES} | {"__init__.py": copied / "package" / "__init__.py"}
    links["kernels/__init__.py"] = copied / "package" / "kernels" / "__init__.py"
    links |= {f"kernels/{part.name}": part for part in (copied / "kernels").iterdir() if part.is_dir()}
    for name, target in links.items():
        (site / name).symlink_to(target)
    extra = {"PYTHONPATH": str(site.parent), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return copied, {**os.environ, **extra}


def tests_fail(tests: list[str], copied: Path, environment: dict[str, str], limit_s: float | None = LIMIT_S) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=copied, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode > 2:
        sys.exit(f"{tests} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    mutants = load_mutants()[options.first :][: options.limit]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copied, environment = copy_repository(Path(folder))
        files = sorted({test for mutant in mutants for test in mutant["tests"]})
        if tests_fail(files, copied, environment, limit_s=None):
            sys.exit("the tests fail without any fault")
        for mutant in mutants:
            path = copied / mutant["file"]
            original = path.read_text(encoding="utf-8")
            path.write_text(original.replace(mutant["find"], mutant["replace"]), encoding="utf-8")
            survived = not tests_fail(mutant["tests"], copied, environment)
            path.write_text(original, encoding="utf-8")
            line = f"{mutant['file']}: {mutant['find'].strip()!r} -> {mutant['replace'].strip()!r}"
            print("SURVIVED" if survived else "killed  ", line, flush=True)
            survivors += [line] * survived
    if survivors:
        sys.exit(f"{len(survivors)} of {len(mutants)} faults survived")


if __name__ == "__main__":
    main()
