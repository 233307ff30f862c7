"""Paths of this repository that documents, comments and docstrings name exist."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("roofline", "planner", "kernels", "runtime", "validate", "dashboards", "docs", "tests", "scripts", "package")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
FILES += ROOT.glob("*.*")
PARTS = [path.relative_to(ROOT).parts for path in FILES]
# A file may be named by the end of its path, as in `slots.py` or `offload/slots.py`.
ENDS = {"/".join(parts[start:]) for parts in PARTS for start in range(len(parts))}
BELOW_A_FOLDER = rf"(?:{'|'.join(FOLDERS)})/[\w/.-]*\w"
NAMED = re.compile(rf"(?<![\w./*-])({BELOW_A_FOLDER}|(?:[\w-]+/)*[\w-]+\.(?:py|md|cuh?|toml))\b(?![*-])")
# What the recipes and commands write, and files of other projects.
ELSEWHERE = {
    "tests/kernels/layer/test_softcap.py", "roofline/catalog/profiles/NAME.json", "runtime/policies/window.py",
    "roofline/plan/policies/window.py", "code.py", "mine.toml", "config.toml", "cache_utils.py", "modeling_llama.py",
    "modeling_flash_attention_utils.py", "vllm/config/cache.py", "ggml/docs/gguf.md", "config/vllm.py",
    "gpu_model_runner.py", "model_executor/layers/attention/attention.py", "v1/worker/gpu_model_runner.py", "manual.md",
    "a.py", "b.py", "v1/cudagraph_dispatcher.py", "models/llama_eagle3.py", "integrations/mxfp4.py",
    "v1/engine/core.py", "model_executor/custom_op.py",
}  # fmt: skip


def prose(path: Path) -> Iterator[str]:
    """The comments and docstrings of a Python file, all text of another."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py" or not NAMED.search(text):
        yield text
        return
    with path.open("rb") as file:
        yield from (token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    yield from (ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented))


@pytest.mark.parametrize("folder", (*FOLDERS, "."))
def test_named_paths_exist(folder: str) -> None:
    files = (ROOT / folder).rglob("*.*") if folder != "." else set(ROOT.glob("*.*")) - {ROOT / "CHANGELOG.md"}
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in files
        if path.suffix in (".py", ".md", ".cu", ".cuh", ".toml", ".yml")
        for text in prose(path)
        for name in NAMED.findall(text)
    }
    assert not {(path, name) for path, name in named if name not in ENDS and name not in ELSEWHERE}
