"""Which package may import which, read from the sources; nothing is imported."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each package may import those before it. What they have installed beside them is listed below.
PACKAGES = ("roofline", "planner", "kernels", "runtime", "validate", "dashboards")
MODEL = {"numpy", "scipy", "sympy", "pydantic_core", "huggingface_hub", "pandas", "plotly", "yaml"}
RUNTIME = {"torch", "triton", "transformers", "safetensors", "gguf", "numpy", "huggingface_hub", "filelock", "tqdm"}
INSTALLED: dict[str, set[str]] = {
    "roofline": MODEL - {"pandas", "plotly", "yaml"},
    "planner": MODEL,
    "kernels": {"torch", "triton"},
    "runtime": RUNTIME - {"triton"} | {"vllm"},  # the last in its plugin, where installed
    "validate": RUNTIME | {"scipy", "sympy", "flashinfer"},  # the last is a peer, where installed
}
# The plan lies below the planner. Only the engine, loading and memory checks ask the planner itself for figures.
DECODER = ("model", "kv", "policies", "speculation", "offload", "quantization", "retrieval")
NOT_FROM_PLANNER = ("kernels", *(f"runtime.{folder}" for folder in DECODER))
FILES = {path.relative_to(ROOT).as_posix(): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}


def module_of(file: str) -> str:
    """`roofline/ops.py` -> `roofline.ops`; a folder's __init__ is the folder."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(file): file for file in FILES}


def imported(tree: ast.AST, *, at_import: bool) -> Iterator[str]:
    """Full names that the import statements load; without at_import, also those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not used"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        types_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not (at_import and (later or types_only)):
            yield from imported(node, at_import=at_import)


def violation(module: str, name: str) -> str | None:
    """Why `module` may not import `name`, if so."""
    package = module.partition(".")[0]
    top, _, rest = name.partition(".")
    if top in sys.stdlib_module_names:
        return None
    if top in PACKAGES:
        return f"write ridgeplan.{name}"
    if top != "ridgeplan":
        allowed = INSTALLED.get(package)
        return (
            None if allowed is None or top in allowed else f"{package} may use of installed packages {sorted(allowed)}"
        )
    target = rest.partition(".")[0]
    if target not in PACKAGES:
        return None if name == "ridgeplan.__version__" else "there is no such package"
    if PACKAGES.index(target) > PACKAGES.index(package):
        return f"{target} lies above {package}"
    if target == "planner" and f"{module}.".startswith(tuple(f"{part}." for part in NOT_FROM_PLANNER)):
        return "kernels and the decoder take no part of the planner"
    return None


@pytest.mark.parametrize("file", FILES)
def test_imports_follow_the_order_of_packages(file: str) -> None:
    tree = ast.parse(FILES[file].read_text(encoding="utf-8"))
    violations = {name: why for name in imported(tree, at_import=False) if (why := violation(module_of(file), name))}
    assert not violations


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("roofline.ops", "import torch"),
        ("roofline.ops", "def f():\n    from ridgeplan.planner import search"),
        ("planner.search", "from ridgeplan.runtime.engine import Engine"),
        ("kernels.linear", "import transformers"),
        ("kernels.linear", "from ridgeplan.planner import search"),
        ("runtime.model.decoder", "from ridgeplan.planner.search import recommend"),
        ("validate.suite", "import ridgeplan.dashboards.charts"),
        ("dashboards.cli", "import planner"),
    ],
)
def test_a_forbidden_import_is_noticed(module: str, source: str) -> None:
    assert any(violation(module, name) for name in imported(ast.parse(source), at_import=False))


def test_no_import_goes_in_a_circle() -> None:
    arrows = {}
    for module, file in MODULES.items():
        names = imported(ast.parse(FILES[file].read_text(encoding="utf-8")), at_import=True)
        paths = [name.removeprefix("ridgeplan.") for name in names if name.startswith("ridgeplan.")]
        arrows[module] = {path if path in MODULES else path.rpartition(".")[0] for path in paths} - {module}
    while leaves := {module for module, targets in arrows.items() if not targets & arrows.keys()}:
        arrows = {module: targets for module, targets in arrows.items() if module not in leaves}
    assert not arrows, f"these import each other: {sorted(arrows)}"


def test_every_folder_ships_and_shadows_nothing() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in FILES.values()}
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert {name.removeprefix("ridgeplan.") for name in shipped} == folders | {"kernels", "ridgeplan"}
    # On sys.path, kernels/ and tests/ would take the place of others of those names; transformers reads __version__.
    for path in ("__init__.py", "ridgeplan", "kernels/__init__.py", "conftest.py"):
        assert not (ROOT / path).exists()
    assert not [*(ROOT / "tests").rglob("__init__.py")]
    assert not [
        path for path in FILES if path.startswith("kernels") and "__version__" in FILES[path].read_text("utf-8")
    ]
