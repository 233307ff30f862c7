"""The list of faults for `make mutants` fits the sources."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_fault_replaces_text_that_stands_once_in_its_file() -> None:
    mutants = tomllib.loads((ROOT / "tests/mutants/semantic.toml").read_text(encoding="utf-8"))["mutant"]
    assert 40 <= len(mutants) <= 80
    assert not [
        mutant for mutant in mutants if (ROOT / mutant["file"]).read_text(encoding="utf-8").count(mutant["find"]) != 1
    ]
