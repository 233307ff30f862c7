"""Options shared by several commands, and the types of their values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ridgeplan.dashboards.user_errors import FileProblem
from ridgeplan.planner import Plan, PlanError
from ridgeplan.planner.capacity import MEMORY_UTILIZATION
from ridgeplan.roofline.catalog.documents import read_document

Command = TypeVar("Command", bound=Callable[..., Any])
UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, letter in enumerate("kmgt", start=1)
}


class Size(click.ParamType):
    """Bytes, with or without a unit."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """`24GiB`, `80 GB` or `25769803776` in bytes."""
        match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z]*)", str(value).strip().lower(), re.ASCII)
        size = float(match[1]) * UNITS.get(match[2], 0) if match else 0
        if 0 < size < math.inf:
            return size
        return self.fail(
            f"{value!r} is not a size; allowed: bytes above 0, or with a unit such as 24GiB or 80GB", param, ctx
        )


def may_be_written(path: Path) -> bool:
    """Whether a regular file of that name can be written; a device or a pipe of that name would be replaced."""
    try:
        target = Path(os.path.realpath(path))
        free = target.is_file() or not target.exists()
        return free and target.parent.is_dir() and os.access(target.parent, os.W_OK)
    except (OSError, ValueError):  # an invalid file name
        return False


class OutputFile(click.ParamType):
    """A file to write. Checked before any work starts."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, if its folder exists and may be written to."""
        path = Path(value)
        if not may_be_written(path):
            self.fail(f"cannot write {value!r}; allowed: a file in an existing, writable folder", param, ctx)
        return path


class PlanFile(click.ParamType):
    """A plan's file, as written by `recommend --output`."""

    name = "plan.json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Plan:
        """The plan. Raises PlanError or FileProblem naming the file."""
        if isinstance(value, Plan):
            return value
        try:
            return Plan.from_json(read_document(Path(value)))
        except (OSError, ValueError) as error:
            if isinstance(error, PlanError):
                raise PlanError(f"plan {value!r}: {error}") from error
            raise FileProblem(f"cannot read plan {value!r}: {getattr(error, 'strerror', None) or error}") from error


def options(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Combines several click decorators, in the order in which `--help` shows them."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
profile_file = click.option("--profile", metavar="FILE", help="Calibration to predict with, of `ridgeplan calibrate`.")
acceptance_file = click.option(
    "--acceptance", metavar="FILE", help="Rows of `ridgeplan acceptance`.  [default: those that it saved]"
)
yarn = click.option("--yarn", is_flag=True, help="Stretch rotary embeddings beyond the model's context limit.")
memory_utilization = click.option(
    "--memory-utilization", type=float, default=MEMORY_UTILIZATION, show_default=True,
    help="Share of the machine's memory that may be used.",
)  # fmt: skip
model_to_run = click.option(
    "--model", help="Folder, GGUF file or hub id to run.  [default: the embedded SmolLM2-135M-Instruct]"
)
prompt_file = click.option(
    "--prompt-file", metavar="FILE", help="UTF-8 text to continue.  [default: a text that comes with Python]"
)
retrieval_head = click.option(
    "--retrieval-head", metavar="FILE", help="Head of `ridgeplan distill`, for plans that choose tokens by one."
)
calibration_file = click.option(
    "--calibration", metavar="FILE", help="UTF-8 text like what will be decoded, to fit 4-bit weights to."
)
