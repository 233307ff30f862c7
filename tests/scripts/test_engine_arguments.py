"""Arguments extracted from wheels: small ones written here as the engines write theirs, and those that ship."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from engine_arguments import extract, to_text

from ridgeplan.planner.export.schema import FOLDER

VLLM = {
    "vllm/config/cache.py": """
from typing import Literal
from pydantic import Field
CacheDType = Literal["auto", "fp8"]
class CacheConfig:
    cache_dtype: CacheDType | str = "auto"
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    enable_prefix_caching: bool | None = None
    max_model_len: int | None = None
    block_size: int = Field(default=None, ge=1)
    offload_params: set[str] = set()
    hf_overrides: dict[str, str] | None = None
    backend: Literal["a", EXTRA] = "a"
EXTRA = Literal["b", "c"]
class SpeculativeConfig:
    method: Literal["eagle3", "draft_model"] | None = None
    num_speculative_tokens: int = Field(default=None, gt=0)
""",
    "vllm/engine/arg_utils.py": """
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        cache_kwargs = get_kwargs(CacheConfig)
        spec_kwargs = get_kwargs(VllmConfig)
        group = parser.add_argument_group(title="CacheConfig")
        group.add_argument("--kv-cache-dtype", **cache_kwargs["cache_dtype"])
        group.add_argument("--memory", "-m", **cache_kwargs["gpu_memory_utilization"])
        group.add_argument("--enable-prefix-caching", **{**cache_kwargs["enable_prefix_caching"], "default": None})
        group.add_argument("--max-model-len", **cache_kwargs["max_model_len"])
        group.add_argument("--block-size", **cache_kwargs["block_size"])
        group.add_argument("--offload-params", **cache_kwargs["offload_params"])
        group.add_argument("--hf-overrides", **cache_kwargs["hf_overrides"])
        group.add_argument("--backend", **cache_kwargs["backend"])
        group.add_argument("--speculative-config", **spec_kwargs["speculative_config"])
        group.add_argument("--log", choices=["x", "y"], default="x")
        group.add_argument("--quiet", action="store_true")
class AsyncEngineArgs(EngineArgs):
    pass
class VllmConfig:
    speculative_config: SpeculativeConfig | None = None
""",
    "vllm/entrypoints/cli_args.py": """
class BaseFrontendArgs:
    chat_template: str | None = None
class FrontendArgs(BaseFrontendArgs):
    port: int = 8000
""",
}
SGLANG = {
    "sglang/srt/arg_groups/choices.py": 'QUANTIZATION = ["fp8", "awq"]',
    "sglang/srt/arg_groups/fields/model.py": """
class Model:
    model_path: A[str, Arg(help="Path.", aliases=["--model"])]
    quantization: A[Optional[str], Arg(help="How.", choices=QUANTIZATION)] = None
    context_length: A[Optional[int], Arg(help="Tokens.", type_parser=human_readable_int)] = None
    trust: A[bool, "Trust."] = False
    tp_size: A[int, Arg(help="GPUs.", cli_name="--tensor-parallel-size")] = 1
    overrides: A[Optional[Dict[str, Any]], Arg(type_parser=json.loads)] = None
    shared: A[Optional[bool], Arg(action=argparse.BooleanOptionalAction)] = None
    inner: A[bool, Arg(no_cli=True)] = False
    derived = Derived(fn="x")
""",
    "sglang/srt/server_args.py": """
class ServerArgs:
    def add_cli_args(parser):
        parser.add_argument("--config", type=str)
        parser.add_argument("--old", action=DeprecatedStoreTrueAction)
""",
}


def wheel(folder: Path, name: str, modules: dict[str, str]) -> Path:
    path = folder / f"{name}-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for module, source in modules.items():
            archive.writestr(module, source)
    return path


def kinds(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        argument["names"][0]: {key: value for key, value in argument.items() if key != "names"}
        for argument in schema["arguments"]
    }


def test_arguments_of_vllm_follow_the_fields_of_its_configs(tmp_path: Path) -> None:
    schema = extract(wheel(tmp_path, "vllm", VLLM))
    assert (schema["engine"], schema["version"]) == ("vllm", "1.2.3")
    assert kinds(schema) == {
        "--kv-cache-dtype": {"kind": "choice", "choices": ["auto", "fp8"]},
        "--memory": {"kind": "float", "gt": 0, "le": 1},
        "--enable-prefix-caching": {"kind": "flag"},
        "--max-model-len": {"kind": "size"},
        "--block-size": {"kind": "int", "ge": 1},
        "--offload-params": {"kind": "list"},
        "--hf-overrides": {"kind": "json"},
        "--backend": {"kind": "choice", "choices": ["a", "b", "c"]},
        "--speculative-config": {"kind": "json", "object": "SpeculativeConfig"},
        "--log": {"kind": "choice", "choices": ["x", "y"]},
        "--quiet": {"kind": "switch"},
        "--chat-template": {"kind": "text"},
        "--port": {"kind": "int"},
        "--config": {"kind": "text"},
    }
    assert schema["objects"]["SpeculativeConfig"] == {
        "method": {"kind": "choice", "choices": ["eagle3", "draft_model"]},
        "num_speculative_tokens": {"kind": "int", "gt": 0},
    }
    (memory,) = (argument for argument in schema["arguments"] if argument["names"][0] == "--memory")
    assert memory["names"] == ["--memory", "-m"]


def test_arguments_of_sglang_follow_their_annotations(tmp_path: Path) -> None:
    schema = extract(wheel(tmp_path, "sglang", SGLANG))
    assert kinds(schema) == {
        "--model-path": {"kind": "text"},
        "--quantization": {"kind": "choice", "choices": ["fp8", "awq"]},
        "--context-length": {"kind": "size"},
        "--trust": {"kind": "switch"},
        "--tensor-parallel-size": {"kind": "int"},
        "--overrides": {"kind": "json"},
        "--shared": {"kind": "flag"},
        "--config": {"kind": "text"},
        "--old": {"kind": "switch"},
    }


def test_the_file_is_the_extraction(tmp_path: Path) -> None:
    schema = extract(wheel(tmp_path, "vllm", VLLM))
    assert json.loads(to_text(schema)) == schema


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_schemas_know_nearly_every_argument(path: Path) -> None:
    """Of the hundreds that each engine has, at most 1 in 20 has choices that only running the engine tells."""
    answer = json.loads(path.read_text(encoding="utf-8"))
    assert len(answer["arguments"]) > 250 and path.stem == f"{answer['engine']}-{answer['version']}"
    unknown = [argument for argument in answer["arguments"] if argument["kind"] == "any"]
    assert len(unknown) < len(answer["arguments"]) / 20
