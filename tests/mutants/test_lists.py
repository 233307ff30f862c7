"""The lists of mutations keep up with the sources."""

import runpy
from pathlib import Path


def test_every_mutation_still_applies() -> None:
    mutations = runpy.run_path(str(Path(__file__).with_name("run.py")))["mutations"]
    assert [mutation.name for mutation in mutations([]) if not mutation.applies] == []
