"""What loading accepts and refuses, each in one line."""

import dataclasses
import os
import warnings
from functools import partial

import pytest
import torch
from tokenizers import models
from transformers.utils import logging

from ridgeplan import runtime
from ridgeplan.runtime.errors import (
    ModelError,
    UnsupportedPlan,
    WorkloadError,
    failures_as,
    quiet_rust,
    quiet_transformers,
)


def test_plans_that_cannot_run_are_refused(tiny_model, make_plan, monkeypatch):
    missing = ["eviction 'h2o'", "offloaded KV"]
    monkeypatch.setattr("ridgeplan.runtime.loading.missing_execution", lambda plan, shape: missing)
    with pytest.raises(UnsupportedPlan, match="estimated but not executed: eviction 'h2o'; offloaded KV"):
        runtime.load(make_plan(), tiny_model().folder)


@pytest.mark.parametrize("device", ["tpu", "cpu:x", "cuda:x", "cuda:1"])
def test_an_unknown_device_is_refused(device, tiny_model, make_plan):
    with pytest.raises(WorkloadError, match=f"device is '{device}'; allowed here: cpu"):
        runtime.load(make_plan(), tiny_model().folder, device=device)


def test_a_gpu_before_ampere_is_refused(tiny_model, make_plan, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    with pytest.raises(WorkloadError, match=r"compute capability 7\.5; allowed: 8\.0 \(Ampere\) or more, or the CPU"):
        runtime.load(make_plan(), tiny_model().folder)


def test_weights_of_another_device_are_refused(tiny_model, make_plan):
    weights = runtime.load(make_plan(), tiny_model().folder, device="cpu").weights
    elsewhere = dataclasses.replace(weights, embedding=weights.embedding.to("meta"))
    with pytest.raises(WorkloadError, match="the shared weights are on meta; allowed: on cpu"):
        runtime.load(make_plan(), tiny_model().folder, device="cpu", weights=elsewhere)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_cpu_computes_in_float32_unless_told_otherwise(dtype, tiny_model, make_plan):
    engine = runtime.load(make_plan(), tiny_model().folder, device="cpu", dtype=dtype)
    tensors = [*engine.weights.tensors(), engine.cache.keys]
    assert {tensor.dtype for tensor in tensors} == {dtype or torch.float32}


@pytest.mark.parametrize("kv, gamma", [("int4x2", 2), ("int8", 0), ("bf16+int4", 1), ("bf16", 1)])
def test_a_sliding_window_refuses_what_it_would_break(kv, gamma, tiny_model, make_plan):
    plan = make_plan(kv, gamma, draft_bits=4 if kv == "bf16" else 16)
    reaching = tiny_model("mistral", sliding_window=256).folder  # the plan's sequences reach 256 tokens
    assert runtime.load(plan, reaching).config.windows == (256, 256)
    short = tiny_model("mistral", sliding_window=255).folder
    with pytest.raises(UnsupportedPlan, match="window is 255 tokens and the plan's sequences reach 256"):
        runtime.load(plan, short)
    assert runtime.load(make_plan("bf16"), short).config.windows == (255, 255)


def test_a_context_beyond_the_model_warns(tiny_model, make_plan):
    folder = tiny_model().folder  # for 1024 tokens
    with pytest.warns(UserWarning, match=r"1025 tokens pass the model's limit of 1024; .*`ridgeplan plan --yarn`"):
        runtime.load(make_plan(context=1000, new_tokens=25), folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime.load(make_plan(context=1000, new_tokens=24), folder)


# Failures of other packages' readers are one line, and nothing else is said of them.


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


def test_stderr_and_reports_come_back(capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(logging.set_verbosity, logging.get_verbosity()))
    logging.set_verbosity_warning()  # transformers' default
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with quiet_transformers(), quiet_rust():
        os.write(2, b"hidden")
        assert logging.get_verbosity() == logging.ERROR
    os.write(2, b"shown")
    assert capfd.readouterr().err == "shown"
    assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())
