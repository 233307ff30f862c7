"""The layers of the package, read from the imports of its files."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What each folder may import: modules of the package (with all below them), then installed packages; None is any.
LAYERS: dict[str, tuple[set[str], set[str] | None]] = {
    "roofline": (set(), {"sympy", "numpy", "scipy"}),
    "planner": ({"roofline"}, {"sympy", "numpy", "scipy"}),
    "kernels": ({"roofline.cost", "roofline.ops"}, {"torch", "triton"}),
    "runtime": (
        {"kernels", "planner.plan", "planner.support", "planner.capacity",
         "roofline.catalog.shapes", "roofline.catalog.huggingface"},
        {"torch", "transformers", "safetensors", "gguf", "numpy"},
    ),
    "validate": ({"roofline", "planner", "kernels", "runtime"}, {"torch", "triton", "transformers", "numpy", "scipy"}),
    "dashboards": ({"roofline", "planner", "kernels", "runtime", "validate"}, None),
}  # fmt: skip
FILES = {path.relative_to(ROOT).as_posix(): path for folder in LAYERS for path in sorted((ROOT / folder).rglob("*.py"))}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every module a file imports, also inside functions; relative ones start with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from ridgeplan.roofline import ops` may name a module: the name decides about the layer.
            whole = module == "ridgeplan" or module in [f"ridgeplan.{folder}" for folder in LAYERS]
            yield from ((node.lineno, f"{module}.{alias.name}" if whole else module) for alias in node.names)


def problem(folder: str, name: str) -> str | None:
    """What is wrong with importing `name` in a file of `folder`, or None."""
    inside, installed = LAYERS[folder]
    top, _, rest = name.partition(".")
    if name.startswith(".") or top in LAYERS:
        return "imports within the package are absolute: ridgeplan.x"
    if top == "ridgeplan":
        own = rest.partition(".")[0] == folder
        allowed = own or any(rest == module or rest.startswith(f"{module}.") for module in inside)
        return None if allowed else f"{folder} may import of the package only {sorted(inside)}"
    if installed is None or top in installed or top in sys.stdlib_module_names:
        return None
    return f"{folder} may import of installed packages only {sorted(installed)}"


@pytest.mark.parametrize("file", FILES)
def test_imports_follow_the_layers(file: str) -> None:
    folder = file.partition("/")[0]
    tree = ast.parse(FILES[file].read_text(encoding="utf-8"))
    found = [f"{file}:{line}: {name}: {why}" for line, name in imports(tree) if (why := problem(folder, name))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("roofline", "import torch"),
        ("roofline", "def f():\n    from ridgeplan.planner import plan"),
        ("roofline", "from ridgeplan import planner"),
        ("planner", "import transformers.utils"),
        ("planner", "from ridgeplan.runtime.engine import Engine"),
        ("kernels", "from ridgeplan.roofline.catalog.profile import Profile"),
        ("kernels", "from ridgeplan.roofline import profile"),
        ("kernels", "import transformers"),
        ("runtime", "from ridgeplan.planner.search import recommend"),
        ("runtime", "from ridgeplan import validate"),
        ("validate", "import ridgeplan.dashboards.charts"),
        ("dashboards", "from kernels.merge import merge"),
        ("dashboards", "import planner"),
        ("dashboards", "from . import charts"),
        ("dashboards", "from .charts import roofline"),
    ],
)
def test_an_arrow_against_the_layers_is_found(folder: str, source: str) -> None:
    assert any(problem(folder, name) for _, name in imports(ast.parse(source)))


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("roofline", "import math, numpy as np\nfrom ridgeplan.roofline import ops"),
        ("planner", "from ridgeplan.roofline.catalog.shapes import ModelShape"),
        ("kernels", "from ridgeplan.roofline import ops\nfrom ridgeplan.roofline.cost import Cost"),
        ("runtime", "from ridgeplan.planner.plan import Plan"),
        ("dashboards", "from ridgeplan import planner, runtime\nimport streamlit"),
    ],
)
def test_arrows_along_the_layers_pass(folder: str, source: str) -> None:
    assert not [name for _, name in imports(ast.parse(source)) if problem(folder, name)]


def test_every_folder_has_files() -> None:
    assert {file.partition("/")[0] for file in FILES} == set(LAYERS)


def test_nothing_shadows_installed_packages() -> None:
    # As packages on sys.path, kernels/ and tests/ would take the place of others of those names.
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "ridgeplan").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not [*(ROOT / "tests").rglob("__init__.py")]


def test_kernels_has_no_version() -> None:
    # transformers reads `kernels.__version__` of whatever it finds under that name.
    for path in (ROOT / "kernels").rglob("*.py"):
        assert "__version__" not in path.read_text(encoding="utf-8"), path


def test_conftest_lives_in_tests_only() -> None:
    assert not [*ROOT.glob("conftest.py")]
    assert not [path for folder in LAYERS for path in (ROOT / folder).rglob("conftest.py")]
