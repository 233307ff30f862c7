"""Hostile plans export to YAML that holds the flags of the plan and no other, or are refused with one line."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mutations import FUZZ, assert_one_line, mutated, raw_tokens

from ridgeplan.planner import PlanError, resolve, workload_for
from ridgeplan.planner.export import ENGINES, Exported, ServeCommandOptions, engine_named, export, schema_for
from ridgeplan.planner.plan_file import plan_json, read_plan
from ridgeplan.roofline.plan.presets import preset

SHAPE, PROFILE = resolve("meta-llama/Llama-3.1-8B", "h200")
PLAN = preset("quantspec", workload_for(SHAPE, PROFILE, 120_000, 1024, 1, yarn=False))  # vLLM drafts with the model
DOCUMENT = json.loads(plan_json(PLAN, replace(SHAPE, name="owner/tuned"), PROFILE))
EVIL = "evil/x\ntrust-remote-code: true\n#"
PARTS = (
    "owner", "/", ":", ": ", " #", "\n", "\r", "\r\n", "\x85", "\u2028", "\x1b[31m", "\u202e", "\x00", "\ud800", "'",
    '"', "\\", "{", "}", "[", "]", "&a", "*a", "!!python/object/apply:os.system", "|", ">", "%", "@", "`", "- ", "--",
    "---", "...", "trust-remote-code: true", "? ", "true", "null", "1e3", "~", "<<: ", "$(id)", ";", " ", "\t", "名",
    "\U0001f600",
    "\u200b", "\u200e", "\ufeff", "\U000e0041",
)  # fmt: skip
NAMES = st.lists(st.sampled_from(PARTS) | st.text(max_size=4), min_size=1, max_size=6).map("".join)


def exported(text: str | bytes, engine: str, draft: str | None = None) -> Exported:
    """What `ridgeplan export` does with a plan's file."""
    saved = read_plan(text)
    shape, profile = saved.resolve()
    name = saved.plan.workload.model
    return export(
        ServeCommandOptions(
            saved.plan, shape, profile, engine_named(engine), schema_for(engine), name, draft_model=draft
        )
    )


def check(text: str | bytes, engine: str, draft: str | None = None) -> None:
    try:
        command = exported(text, engine, draft).command
    except ValueError as error:
        assert type(error).__module__.startswith("ridgeplan."), error
        assert_one_line(error)
        return
    flags = {name.removeprefix("--"): value for name, value in command.arguments}
    loaded = yaml.safe_load(command.yaml())
    read = {name: json.loads(value) if isinstance(flags[name], dict) else value for name, value in loaded.items()}
    assert read == flags
    assert len(command.yaml().splitlines()) == 1 + len(flags)
    # As the engine parses them: what the plan does not set stays at its default.
    parsed = {name: value for name, value in schema_for(engine).parse(command.options).items() if value}
    assert len(parsed) == len(flags) and "trust_remote_code" not in parsed


@settings(FUZZ, max_examples=max(200, FUZZ.max_examples))
@example(EVIL, None, "vllm")
@example("owner/x", EVIL, "vllm")
@example("owner/x", "--trust-remote-code", "sglang")
@given(NAMES, st.none() | NAMES, st.sampled_from([*ENGINES]))
def test_names(model: str, draft: str | None, engine: str) -> None:
    specs = {"model": {**asdict(SHAPE), "name": model}}
    document = {**DOCUMENT, "specs": specs, "workload": {**DOCUMENT["workload"], "model": model}}
    check(json.dumps(document), engine, draft)


@FUZZ
@given(mutated(DOCUMENT), st.sampled_from([*ENGINES]))
def test_mutated_plans(document: Any, engine: str) -> None:
    check(raw_tokens(json.dumps(document)), engine)


def test_the_valid_plan_is_exported_with_its_name() -> None:
    command = exported(json.dumps(DOCUMENT), "vllm").command
    assert command.words[2] == PLAN.workload.model
    assert dict(command.arguments)["--speculative-config"]["model"] == PLAN.workload.model
    with pytest.raises(PlanError, match="trust-remote-code"):
        exported(json.dumps(DOCUMENT).replace(PLAN.workload.model, EVIL.replace("\n", "\\n")), "vllm")
