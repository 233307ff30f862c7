"""Fault injection: applies each mutation of tests/mutants/*.toml to a copy of the sources and runs the tests it names.

    python tests/mutants/run.py [AREA ...] [--jobs N]

A mutation is one wrong line: `find`, which stands once in `file`, becomes `replace`. It is killed where one of its
`tests` fails or hangs. One that changes nothing that could be observed says why in `equivalent` and is only listed.
Exit code 1 where any other one survives, or no longer applies.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[2]
PACKAGES = ("roofline", "planner", "kernels", "runtime", "validate", "dashboards")
LIMIT_S = 300  # a mutation that makes the tests hang is killed as well


@dataclass(frozen=True)
class Mutation:
    """One wrong line and the tests that must notice it."""

    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def name(self) -> str:
        """File, line and change, for the report."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        line = text[: text.index(self.find)].count("\n") + 1 if self.find in text else "gone"
        return f"{self.file}:{line}: {self.find.strip()!r} -> {self.replace.strip()!r}"

    @property
    def applies(self) -> bool:
        """Whether `find` stands exactly once in the file, and the tests' files are there."""
        once = (ROOT / self.file).read_text(encoding="utf-8").count(self.find) == 1
        return once and all((ROOT / test.partition("::")[0]).exists() for test in self.tests)


class Copy:
    """A copy of the repository whose six packages are importable as `ridgeplan.x`, ahead of any installed ones."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
        site = folder / "site" / "ridgeplan"
        site.mkdir(parents=True)
        for package in PACKAGES:
            (site / package).symlink_to(self.root / package)
        (site / "__init__.py").symlink_to(self.root / "package" / "__init__.py")
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(site.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def kills(self, mutation: Mutation) -> bool:
        """Whether the mutation's tests notice it."""
        path = self.root / mutation.file
        original = path.read_text(encoding="utf-8")
        path.write_text(original.replace(mutation.find, mutation.replace), encoding="utf-8")
        try:
            return self.fails(mutation.tests, LIMIT_S)
        finally:
            path.write_text(original, encoding="utf-8")

    def fails(self, tests: Iterable[str], limit_s: float | None = None) -> bool:
        """Whether any of the tests fails, or they take longer."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return True
        # 2: the mutation breaks an import; negative: it crashes the process; others: the tests were not found.
        if done.returncode > 2:
            raise SystemExit(f"pytest failed on {' '.join(tests)}:\n{done.stdout.decode()[-2000:]}")
        return done.returncode != 0


def mutations(areas: list[str]) -> Iterator[Mutation]:
    """Those of the named files of this folder, by default of all."""
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        if areas and path.stem not in areas:
            continue
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            yield Mutation(**{**table, "tests": tuple(table["tests"])})


def survivors(found: list[Mutation], jobs: int) -> list[Mutation]:
    """Those whose tests pass all the same, with a line on stdout for each mutation as it is decided."""
    copies: Queue[Copy] = Queue()

    def survives(mutation: Mutation) -> bool:
        copy = copies.get()
        try:
            killed = copy.kills(mutation)
        finally:
            copies.put(copy)
        print("killed  " if killed else "SURVIVES", mutation.name, flush=True)
        return not killed

    with tempfile.TemporaryDirectory() as folder:
        for index in range(jobs):
            copies.put(Copy(Path(folder, str(index))))
        if copies.queue[0].fails(sorted({test for mutation in found for test in mutation.tests})):
            raise SystemExit("tests fail without any mutation; run `make test`")
        with ThreadPoolExecutor(jobs) as pool:
            lives = list(pool.map(survives, found))
    return [mutation for mutation, alive in zip(found, lives, strict=True) if alive]


def main() -> int:
    """Runs and reports; the exit code."""
    parser = argparse.ArgumentParser(description="Fault injection over the package's sources.")
    parser.add_argument("areas", nargs="*", help="names of files in tests/mutants, without .toml")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    found = list(mutations(options.areas))
    stale = [mutation for mutation in found if not mutation.applies]
    tried = [mutation for mutation in found if mutation.applies and not mutation.equivalent]
    alive = survivors(tried, options.jobs)
    killed = len(tried) - len(alive)
    print(f"\n{killed} of {len(tried)} mutations killed ({killed / max(len(tried), 1):.1%})")
    for title, listed in (("survives", alive), ("does not apply any more", stale)):
        for mutation in listed:
            print(f"{title}: {mutation.name}")
    for mutation in found:
        if mutation.equivalent:
            print(f"changes nothing: {mutation.name}: {mutation.equivalent}")
    return 1 if alive or stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
