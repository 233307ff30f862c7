"""Models and texts that commands run on, from their options."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import click

from ridgeplan.dashboards.cli.output import echo, progress
from ridgeplan.planner.plan_file import SavedPlan
from ridgeplan.planner.quantities import parameters_text
from ridgeplan.roofline.catalog.model_shape import sizes_of
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Workload

EMBEDDED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CALIBRATION_TOKENS = 8192  # 2048 are as good for short contexts; for long ones acceptance is another 0.007 higher
FEW_CALIBRATION_TOKENS = 1000  # with fewer, weights are overfitted


def sample_or_file(path: str | None) -> tuple[str, str]:
    """The name and the content of a text file, by default of Python's help topics. Raises PromptError."""
    from ridgeplan.validate.prompts import read_prompt, sample_text

    return ("Python's help topics", sample_text()) if path is None else (Path(path).stem, read_prompt(path))


def embedded_or(model: str | None) -> str:
    """The given model, by default the embedded one. Raises ModelError if that is not installed."""
    from ridgeplan.runtime import embedded_model_path

    if model == "":
        raise click.UsageError("--model is empty; allowed: a safetensors folder, a .gguf file or a hub id")
    return str(embedded_model_path()) if model is None else model


def require_planned_model(saved: SavedPlan, model: str | None, otherwise: str = "") -> None:
    """Raises UsageError where the model's sizes differ from those of the plan's model. No weights are read.

    otherwise: another way out that the error names. Models of unknown sizes pass; the runtime compares them on loading.
    """
    try:
        planned = saved.shape or load_shape(saved.plan.workload.model)
        running = load_shape(EMBEDDED_MODEL if model is None else model)
    except ValueError:
        return
    if sizes_of(planned) != sizes_of(running):
        other = f"{running.name} ({parameters_text(running.parameters)})"
        actual = f"--model is {other}" if model else f"without --model the embedded {other} would run"
        raise click.UsageError(
            f"the plan is for {planned.name} ({parameters_text(planned.parameters)}), but {actual}; allowed: the "
            f"plan's model as --model{otherwise}"
        )


def prompt_text(text: str | None, path: str | None) -> str | None:
    """The prompt given as an argument or a file; None for neither. Raises UsageError and PromptError."""
    if text is not None and path is not None:
        raise click.UsageError("--prompt and --prompt-file cannot be combined; allowed: one of them")
    if text == "":
        raise click.UsageError("--prompt is empty; allowed: at least one character")
    if path is not None:
        from ridgeplan.validate.prompts import read_prompt

        return read_prompt(path)
    return text


def check_request(prompts: Sequence[Sequence[int]], workload: Workload, source: str, new_tokens: int) -> None:
    """Raises WorkloadError for what the plan's workload or the model's vocabulary does not allow. Reads no weights."""
    from ridgeplan.runtime.model.checkpoint import load_config
    from ridgeplan.runtime.request import Request

    vocab = load_config(model_folder(source)).vocab_size
    for prompt in prompts:
        Request.build(prompt, new_tokens, None).check(workload, vocab)


def opening_tokens(source: str, path: str | None, tokens: int) -> list[int]:
    """The first `tokens` token ids of a file, or all of a shorter one; by default of Python's help topics."""
    from ridgeplan.validate import prompts

    text = prompts.read_prompt(path) if path is not None else None
    tokenizer = model_tokenizer(source)
    return prompts.prompt_tokens(tokenizer, tokens) if text is None else prompts.first_tokens(tokenizer, tokens, text)


def model_folder(source: str) -> str:
    """The folder of a model, with a progress bar while a GGUF file is converted. Raises ModelError."""
    from ridgeplan.runtime.model.source import model_source

    with ExitStack() as shown:
        bar = cache(lambda: shown.enter_context(progress("opening the model")))
        return model_source(source, lambda *state: bar()(*state))


@cache
def model_tokenizer(source: str) -> Any:
    """The model's tokenizer, loaded once. Raises ModelError."""
    from ridgeplan.runtime.model.checkpoint import load_tokenizer

    return load_tokenizer(model_folder(source))


def calibration_tokens(source: str, path: str | None) -> list[int] | None:
    """Token ids of a calibration text, with a note if it is short; None without a file."""
    if path is None:
        return None
    tokens = opening_tokens(source, path, CALIBRATION_TOKENS)
    if len(tokens) < FEW_CALIBRATION_TOKENS:
        echo(
            f"note: {path} has only {len(tokens)} tokens; good calibration needs {FEW_CALIBRATION_TOKENS} or more",
            err=True,
        )
    return tokens
