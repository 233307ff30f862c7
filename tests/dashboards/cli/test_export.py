"""`ridgeplan export`: from a saved plan to a command, its YAML and one JSON object."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ridgeplan.planner import preset, resolve, workload_for
from ridgeplan.planner.engines.measurements import shipped_measurements
from ridgeplan.planner.export import schema_for

LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    shape, profile = resolve(LLAMA, "h200")
    path = tmp_path / "plan.json"
    path.write_text(preset("quantspec", workload_for(shape, profile, 120_000, 1024, 1, yarn=False)).to_json())
    return path


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_printed_command_is_what_the_engine_takes(invoke: Any, saved: Path, engine: str) -> None:
    text = invoke("export", saved, "--to", engine).stdout
    command = text.split("\n\n")[1]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == [engine, "serve"] and LLAMA in words[:4]
    assert schema_for(engine).parse(words[words.index(LLAMA) + 1 :])
    prose = [line for line in text.splitlines() if line not in command.splitlines()]
    assert max(map(len, prose)) <= 110


@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_the_cost_of_an_engines_formats_is_said_and_what_ampere_lacks(invoke: Any, tmp_path: Path, gpu: str) -> None:
    path = tmp_path / "fp8.json"
    line = (LLAMA, "--gpu", "h200", "--ctx", "32k", "--batch", 8, "--backend", "vllm", "-o", path)
    assert "fp8_per_channel weights and fp8 KV: fidelity 0.900; --all" in " ".join(invoke("plan", *line).stdout.split())
    text = " ".join(invoke("export", path, "--to", "vllm", "--gpu", gpu).stdout.split())
    assert "quality cost: fp8_per_channel weights and fp8 KV: fidelity 0.900, with vLLM's rounding" in text
    assert ("weight-only (FP8 Marlin)" in text) == (gpu == "a100")


def test_times_name_the_version_that_was_measured(invoke: Any, saved: Path) -> None:
    """Another one than the exported command is for; with the plugin, the kernels are this package's."""
    exported, with_plugin = (invoke("export", saved, "--to", "vllm", *more).stdout for more in ((), ("--plugin",)))
    measured = shipped_measurements().version
    heading = exported.partition("\n\n")[0]
    assert f"from steps measured with vLLM {measured}" in " ".join(heading.split())
    assert f"vLLM {measured}:" not in heading
    assert "from steps" not in with_plugin


def test_json_and_yaml_hold_the_same(invoke: Any, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "serve.yaml"
    result = invoke("export", saved, "--to", "vllm", "--json", "--output", out)
    answer = json.loads(result.stdout)
    assert yaml.safe_load(out.read_text()) == yaml.safe_load(answer["yaml"])
    assert answer["predicted"]["source"] == "transferred"  # as the drafts' acceptance is
    assert {feature["axis"] for feature in answer["carried"]} == {"weights", "KV cache", "drafts"}


def test_keep_drafts_keeps_those_that_slow_the_plugin_down(invoke: Any, tmp_path: Path) -> None:
    shape, profile = resolve(LLAMA, "h200")
    path = tmp_path / "plan.json"
    plan = preset("quantspec-int8", workload_for(shape, profile, 4096, 1024, 8, yarn=False))
    path.write_text(replace(plan, speculation=replace(plan.speculation, gamma=15)).to_json())
    for options, drafts in (((), False), (("--keep-drafts",), True)):
        answer = json.loads(invoke("export", path, "--to", "vllm", "--plugin", "--json", *options).stdout)
        assert ("--speculative-config" in answer["words"]) == drafts


def test_a_rule_that_forbids_ends_in_one_line(refuses: Any, saved: Path) -> None:
    options = ("--kv-cache-dtype", "turboquant_k8v4", "--draft-model", "someone/draft")
    assert "issues/53180" in refuses("export", saved, "--to", "vllm", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "tgi"), "vllm"),
        (("--to", "vllm", "--engine-version", "0.1"), "allowed: 0.24.0 up to 0.33.0"),
        (("--to", "vllm", "--engine-version", "9.9"), "vllm version '9.9' is not known; allowed: 0.24.0 up to 0.33.0"),
        (("--to", "vllm", "--kv-cache-dtype", "int3"), "allowed in vLLM"),
        (("--to", "vllm", "--model", "--port"), "'--port'; allowed"),
        (("--to", "vllm", "--model", " "), "' '; allowed"),
        (("--to", "vllm", "--model", "a/b\nport: 1"), r"'a/b\nport: 1'; allowed"),
        (("--to", "vllm", "--model", "a/b; id"), "model is 'a/b; id'; allowed: a hub id, or a path without any of ;"),
        (("--to", "sglang", "--model", "/weights/$(id)"), "model is '/weights/$(id)'; allowed"),
        (("--to", "vllm", "--model", "a/b\u200b"), r"model is 'a/b\u200b'; allowed"),
        (("--to", "vllm", "--draft-model", "a/b`id`"), "draft model is 'a/b`id`'; allowed"),
        (("--to", "sglang", "--draft-model", "a/b|id"), "draft model is 'a/b|id'; allowed"),
        (("--to", "sglang", "--draft-model", "--trust-remote-code"), "'--trust-remote-code'; allowed"),
        (("--to", "vllm", "--gpu", "rtx4060-laptop"), "GiB"),
        (("--to", "vllm", "--model", "Qwen/Qwen3-8B"), "the same model"),
    ],
)
def test_what_is_wrong_is_one_line(refuses: Any, saved: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refuses("export", saved, *options)


def test_a_model_without_an_owner_must_be_named(refuses: Any, invoke: Any, saved: Path) -> None:
    """As a GGUF file's stem; the engine is told what to load."""
    plan = json.loads(saved.read_text())
    plan["workload"]["model"] = "llama-3.1-8b"
    saved.write_text(json.dumps(plan))
    assert "is not a hub id; allowed: --model" in refuses("export", saved, "--to", "vllm")
    for path in ("./weights", "~/models/llama-3.1_8B@main", "s3://bucket/llama+x=1,2", "/weights/ladder name/模型"):
        answer = json.loads(invoke("export", saved, "--to", "vllm", "--model", path, "--json").stdout)
        assert answer["words"][:3] == ["vllm", "serve", path]
