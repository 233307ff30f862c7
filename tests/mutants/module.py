"""Mutates one module with cosmic-ray in a copy of the repository: module.py roofline/ops.py tests/roofline"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from run import copy_repository

CONFIG = """[cosmic-ray]
module-path = "{module}"
timeout = 120.0
excluded-modules = []
test-command = "{python} -m pytest -x -q -m 'not slow' -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
"""


def main() -> None:
    module, *tests = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        copied, environment = copy_repository(Path(folder))
        config = CONFIG.format(module=module, python=sys.executable, tests=" ".join(tests or ["tests"]))
        (copied / "mutants.toml").write_text(config, encoding="utf-8")
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        for command in (
            ["cosmic-ray", "init", "mutants.toml", "mutants.sqlite"],
            ["cosmic-ray", "baseline", "mutants.toml"],
            ["cosmic-ray", "exec", "mutants.toml", "mutants.sqlite"],
            ["cr-report", "--surviving-only", "mutants.sqlite"],
            ["cr-rate", "--fail-over", "0", "mutants.sqlite"],
        ):
            done = subprocess.run(command, cwd=copied, env=environment)
            if done.returncode:
                sys.exit(done.returncode)


if __name__ == "__main__":
    main()
