"""Mutates one module with cosmic-ray in a copy of the repository: module.py roofline/ops.py tests/roofline

Each mutant runs the tests once, so name the few test files that cover the module.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from run import copy_repository

# Operators become +, -, * and /. Others would raise TypeError, and | stands mostly in annotations, which nothing runs.
CONFIG = """[cosmic-ray]
module-path = "{module}"
timeout = 120.0
excluded-modules = []
test-command = "{python} -m pytest -x -q -m 'not slow' -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.operators-filter]
exclude-operators = [
    "core/ReplaceBinaryOperator_BitOr_.*",
    "core/ReplaceBinaryOperator_.*_(FloorDiv|Mod|Pow|LShift|RShift|BitOr|BitAnd|BitXor)",
]
"""
CONFIG_FILE, SESSION = "mutants.toml", "mutants.sqlite"


def print_count(session: Path) -> None:
    """Prints how many mutants are left to run."""
    from cosmic_ray.work_db import WorkDB, use_db  # which `make mutants` installs

    with use_db(str(session), WorkDB.Mode.open) as database:
        print(f"{len(list(database.pending_work_items))} mutants", flush=True)


def main() -> None:
    module, *tests = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        copied, environment = copy_repository(Path(folder))
        config = CONFIG.format(module=module, python=sys.executable, tests=" ".join(tests or ["tests"]))
        (copied / CONFIG_FILE).write_text(config, encoding="utf-8")
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"

        def run(*command: str) -> None:
            process = subprocess.run(command, cwd=copied, env=environment)
            if process.returncode:
                sys.exit(process.returncode)

        run("cosmic-ray", "init", CONFIG_FILE, SESSION)
        run("cr-filter-operators", SESSION, CONFIG_FILE)
        run("cosmic-ray", "baseline", CONFIG_FILE)
        print_count(copied / SESSION)
        run("cosmic-ray", "exec", CONFIG_FILE, SESSION)
        run("cr-report", "--surviving-only", "--show-diff", SESSION)
        run("cr-rate", "--fail-over", "0", SESSION)


if __name__ == "__main__":
    main()
