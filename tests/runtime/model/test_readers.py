"""Failures of other packages' readers are one line, and nothing else is said of them."""

import os

import pytest
from tokenizers import models
from transformers.utils import logging

from ridgeplan.runtime.errors import ModelError, failures_as, quiet_rust, quiet_transformers


def test_a_failure_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"^cannot read x: first second$"), failures_as("cannot read x"):
        raise RuntimeError("first\nsecond")


def test_a_panic_of_rust_code_is_one_line_as_well(capfd: pytest.CaptureFixture[str]) -> None:
    """A merge whose continuation is shorter than its prefix makes tokenizers panic, which is no Exception."""
    vocabulary = {"ab": 0, "c": 1, "abc": 2}
    with pytest.raises(ModelError, match=r"^cannot read x: range"), failures_as("cannot read x"), quiet_rust():
        models.BPE(vocabulary, [("ab", "c")], continuing_subword_prefix="long")
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_is_no_failure() -> None:
    with pytest.raises(KeyboardInterrupt), failures_as("cannot read x"):
        raise KeyboardInterrupt


def test_stderr_and_reports_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with quiet_transformers(), quiet_rust():
        os.write(2, b"hidden")
        assert logging.get_verbosity() == logging.ERROR
    os.write(2, b"shown")
    assert capfd.readouterr().err == "shown"
    assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())
