"""Requests to export a preset."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ridgeplan.planner import preset, resolve, workload_for
from ridgeplan.planner.export import ServeCommandOptions, engine_named, schema_for

LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture
def request_for() -> Callable[..., ServeCommandOptions]:
    """A request for a preset of a model on a GPU, with changes to the plan and to what the user decides."""

    def make(
        name: str = "quantspec", engine: str = "vllm", model: str = LLAMA, gpu: str = "h200", context: int = 32768,
        batch: int = 1, version: str | None = None, plan: dict[str, Any] | None = None, yarn: bool = False,
        **decided: Any,
    ) -> ServeCommandOptions:  # fmt: skip
        shape, profile = resolve(model, gpu)
        resized_plan = preset(name, workload_for(shape, profile, context, 1024, batch, yarn=yarn))
        changed, schema = replace(resized_plan, **(plan or {})), schema_for(engine, version)
        return ServeCommandOptions(changed, shape, profile, engine_named(engine), schema, shape.name, **decided)

    return make
