"""Import rules between packages, and file-count limits.

Everything is read from the sources; nothing is imported. A room is a folder with the imports that it allows; tests/ is
in no room.
"""

import ast
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_FILES, MOST_LINES, MEDIAN_LINES = 14, 60, 8
MODEL = {"sympy", "numpy", "scipy", "pydantic_core"}
RUNTIME = {"torch", "transformers", "safetensors", "gguf", "numpy", "huggingface_hub", "filelock"}
VALIDATE = {"torch", "triton", "transformers", "numpy", "scipy", "flashinfer"}  # the last is a peer, where installed
# What each room may import beside itself: modules of the package (with all below them, but for rooms of their own),
# then installed packages; None is any. A file belongs to the room with the longest name that fits it.
ROOMS: dict[str, tuple[set[str], set[str] | None]] = {
    "roofline.catalog.weight_formats": ({"roofline.catalog"}, MODEL),
    "roofline.catalog.model_files": (
        {"roofline.catalog", "roofline.catalog.weight_formats"},
        MODEL | {"huggingface_hub"},
    ),
    "roofline.catalog": ({"roofline.catalog.model_files", "roofline.catalog.weight_formats"}, MODEL),
    "roofline": ({"roofline.catalog", "roofline.catalog.weight_formats", "roofline.sparsity"}, MODEL),
    "roofline.sparsity": ({"roofline", "roofline.catalog"}, MODEL),
    "roofline.symbolic": ({"roofline", "roofline.catalog"}, MODEL),
    "roofline.papers": ({"roofline", "roofline.catalog", "roofline.symbolic"}, MODEL),
    "planner.axes": ({"roofline.catalog", "roofline.execution"}, MODEL),
    "planner.policies.selection": ({"planner.axes", "planner.plan", "planner.policies", "roofline.sparsity"}, MODEL),
    "planner.policies.eviction": (
        {"planner.plan", "planner.policies", "planner.policies.selection", "roofline.catalog", "roofline.strategy"},
        MODEL,
    ),
    "planner.policies": (
        {
            "planner.axes", "planner.plan", "planner.policies.eviction", "planner.policies.selection",
            "roofline.catalog", "roofline.sparsity", "roofline.strategy",
        },
        MODEL,
    ),
    "planner.acceptance": (
        {
            "planner.axes", "planner.plan", "planner.policies", "planner.policies.selection", "roofline",
            "roofline.catalog",
        },
        MODEL,
    ),
    "planner.display": (
        {"planner", "planner.interface.quantities", "roofline", "roofline.catalog"}, {"pandas", "plotly"}
    ),
    "planner.interface": ({"planner", "roofline.catalog"}, MODEL),
    "planner.questions": (
        {
            "planner", "planner.display", "planner.interface", "planner.policies.selection", "planner.search",
            "roofline.catalog",
        },
        MODEL,
    ),
    "planner.search": (
        {
            "planner", "planner.acceptance", "planner.display", "planner.interface.quantities", "planner.policies",
            "planner.policies.selection", "roofline", "roofline.catalog",
        },
        MODEL,
    ),
    "planner": (
        {
            "planner.acceptance", "planner.axes", "planner.display", "planner.interface.quantities", "planner.policies",
            "planner.policies.eviction", "planner.policies.selection", "planner.questions", "planner.search",
            "roofline", "roofline.catalog", "roofline.catalog.weight_formats", "roofline.sparsity", "roofline.symbolic",
        },
        MODEL,
    ),
    "planner.curves": (
        {
            "planner", "planner.acceptance", "planner.policies", "planner.policies.selection", "planner.search",
            "roofline",
        },
        MODEL,
    ),
    "planner.export": ({"planner", "planner.acceptance", "roofline", "roofline.catalog"}, MODEL),
    "planner.published": (
        {"planner", "planner.acceptance", "roofline", "roofline.catalog", "roofline.papers", "roofline.sparsity"},
        MODEL,
    ),
    "kernels.device": ({"roofline.cost"}, {"torch", "triton"}),
    "kernels.kv_cache": ({"kernels.device", "roofline.cost"}, {"torch", "triton"}),
    "kernels.attention": (
        {"kernels.device", "kernels.kv_cache", "roofline.cost", "roofline.execution"},
        {"torch", "triton"},
    ),
    "kernels.selection": (
        {"kernels.attention", "kernels.device", "kernels.kv_cache", "roofline.cost", "roofline.execution"},
        {"torch", "triton"},
    ),
    "kernels.sparse_attention": (
        {
            "kernels.attention", "kernels.device", "kernels.kv_cache", "kernels.selection", "roofline.cost",
            "roofline.execution",
        },
        {"torch", "triton"},
    ),
    "kernels.residency": ({"kernels.device", "kernels.kv_cache", "roofline.cost"}, {"torch", "triton"}),
    "kernels.layer": ({"kernels.device", "roofline.cost"}, {"torch", "triton"}),
    "kernels.linear": ({"kernels.device", "roofline.cost", "roofline.execution"}, {"torch", "triton"}),
    "kernels.linear.dense": (
        {"kernels.device", "kernels.layer", "kernels.linear", "roofline.cost", "roofline.execution"},
        {"torch", "triton"},
    ),
    "kernels.linear.quantized": (
        {"kernels.device", "kernels.layer", "kernels.linear", "roofline.cost", "roofline.execution"},
        {"torch", "triton"},
    ),
    "kernels.sampling": ({"kernels.device", "roofline.cost"}, {"torch", "triton"}),
    "runtime.kv": (
        {
            "kernels.attention", "kernels.kv_cache", "kernels.selection", "planner.axes", "planner.plan",
            "planner.policies", "planner.policies.eviction", "roofline.catalog", "roofline.execution",
            "runtime.kv.offload",
        },
        RUNTIME,
    ),
    "runtime.kv.offload": (
        {
            "kernels.kv_cache", "kernels.residency", "kernels.selection", "roofline.catalog", "roofline.execution",
            "runtime.arena", "runtime.errors", "runtime.host_memory", "runtime.kv",
        },
        RUNTIME,
    ),
    "runtime.kv.eviction": (
        {
            "kernels.layer", "planner.plan", "planner.policies", "planner.policies.eviction", "roofline.execution",
            "runtime.errors",
        },
        RUNTIME,
    ),
    "runtime.model": (
        {
            "kernels.attention", "kernels.layer", "kernels.linear.dense", "kernels.linear.quantized",
            "roofline.catalog", "roofline.catalog.model_files", "roofline.catalog.weight_formats",
            "roofline.execution", "runtime.arena",
            "runtime.errors", "runtime.host_memory", "runtime.kv", "runtime.kv.eviction", "runtime.model_config",
        },
        RUNTIME,
    ),
    "runtime.drafting.policies": (
        {
            "kernels.attention", "kernels.selection", "kernels.sparse_attention", "planner.axes",
            "roofline.execution", "runtime.drafting.policies.per_query", "runtime.errors", "runtime.kv",
            "runtime.kv.offload", "runtime.retrieval",
        },
        RUNTIME,
    ),
    "runtime.drafting.policies.per_query": (
        {
            "kernels.attention", "kernels.selection", "kernels.sparse_attention", "planner.axes",
            "runtime.drafting.policies", "runtime.kv",
        },
        RUNTIME,
    ),
    "runtime.drafting": (
        {
            "kernels.device", "kernels.sampling", "runtime.drafting.policies", "runtime.kv", "runtime.model",
            "planner.plan", "planner.round_costs", "roofline.execution", "roofline.speculation", "runtime.retrieval",
            "runtime.sampling",
        },
        RUNTIME,
    ),
    "runtime.quantization": (
        {
            "kernels.linear", "kernels.linear.quantized", "planner.axes", "roofline.catalog", "roofline.execution",
            "runtime.drafting", "runtime.drafting.policies", "runtime.errors", "runtime.host_memory", "runtime.kv",
            "runtime.model", "runtime.sampling",
        },
        RUNTIME,
    ),
    "runtime.retrieval": (
        {"kernels.layer", "roofline.catalog", "runtime.errors", "runtime.model", "runtime.model_config"},
        RUNTIME,
    ),
    "runtime.retrieval.distill": (
        {
            "roofline.catalog", "runtime.arena", "runtime.errors", "runtime.model", "runtime.model_config",
            "runtime.retrieval",
        },
        RUNTIME,
    ),
    "runtime": (
        {
            "kernels.sampling", "planner.axes", "planner.capacity", "planner.plan", "planner.resolution",
            "planner.round_costs", "planner.support", "roofline.catalog", "roofline.catalog.model_files",
            "roofline.catalog.weight_formats", "roofline.device",
            "roofline.execution", "runtime.drafting", "runtime.drafting.policies", "runtime.kv",
            "runtime.kv.eviction", "runtime.kv.offload", "runtime.model", "runtime.quantization", "runtime.retrieval",
        },
        RUNTIME,
    ),
    "validate.calibration": (
        {
            "kernels.attention", "kernels.device", "kernels.kv_cache", "kernels.layer", "kernels.linear.dense",
            "kernels.linear.quantized", "kernels.sampling", "kernels.selection", "kernels.sparse_attention", "planner",
            "roofline", "roofline.catalog", "roofline.sparsity", "runtime.host_memory", "runtime.kv",
            "runtime.kv.offload", "runtime.model", "runtime.quantization",
            "validate.machine", "validate.progress", "validate.random_decoder", "validate.random_rounds",
            "validate.segments", "validate.timing", "kernels.residency",
        },
        VALIDATE,
    ),
    "validate.kernel_bench": (
        {
            "kernels.attention", "kernels.device", "kernels.kv_cache", "kernels.layer", "kernels.linear.dense",
            "kernels.linear.quantized", "kernels.residency", "kernels.sampling", "kernels.selection",
            "kernels.sparse_attention", "planner.plan", "roofline", "runtime.kv", "runtime.kv.offload",
            "validate.machine", "validate.progress", "validate.random_decoder", "validate.timing",
        },
        VALIDATE,
    ),
    "validate.decode_bench": (
        {
            "planner", "planner.axes", "planner.export", "roofline", "roofline.catalog", "runtime",
            "runtime.drafting", "runtime.drafting.policies", "runtime.kv", "runtime.kv.offload", "runtime.model",
            "runtime.quantization", "runtime.retrieval", "validate.calibration", "validate.comparison",
            "validate.machine", "validate.measure", "validate.progress", "validate.prompts", "validate.random_rounds",
            "validate.timing",
        },
        VALIDATE,
    ),
    "validate.engine_arguments": ({"planner.export"}, VALIDATE),
    "validate.studies": (
        {
            "kernels.attention", "kernels.layer", "planner.acceptance", "planner.axes", "planner.plan",
            "planner.policies.selection", "planner.resolution", "roofline.catalog", "runtime",
            "runtime.drafting.policies", "runtime.drafting.policies.per_query", "runtime.kv", "runtime.model",
            "runtime.retrieval", "validate.acceptance", "validate.progress", "validate.prompts",
        },
        VALIDATE,
    ),
    "validate.tuning": (
        {
            "planner", "planner.acceptance", "roofline.catalog", "roofline.speculation", "runtime", "runtime.drafting",
            "validate.acceptance", "validate.progress", "validate.prompts",
        },
        VALIDATE,
    ),
    "validate.ruler": ({"roofline.catalog"}, VALIDATE),
    "validate.quality": (
        {
            "planner", "planner.policies", "planner.policies.selection", "roofline.catalog", "runtime",
            "runtime.kv.eviction", "runtime.model", "runtime.retrieval", "validate.machine", "validate.progress",
            "validate.prompts", "validate.ruler",
        },
        VALIDATE,
    ),
    "validate.suite": (
        {
            "planner", "planner.search", "roofline", "roofline.catalog", "runtime", "runtime.drafting",
            "runtime.drafting.policies", "runtime.kv", "runtime.model", "runtime.quantization", "validate",
            "validate.calibration",
            "validate.decode_bench",
        },
        VALIDATE,
    ),
    "validate": (
        {
            "kernels.kv_cache", "planner", "planner.acceptance", "planner.axes", "planner.interface",
            "planner.policies.selection", "planner.questions", "planner.search", "roofline", "roofline.catalog",
            "runtime", "runtime.drafting", "runtime.drafting.policies", "runtime.kv", "runtime.kv.offload",
            "runtime.model", "runtime.quantization", "runtime.retrieval", "validate.calibration",
        },
        VALIDATE,
    ),
    "dashboards.cli.acceptance": (
        {
            "dashboards.cli", "planner", "planner.acceptance", "planner.interface", "roofline.catalog",
            "roofline.speculation", "validate", "validate.tuning",
        },
        None,
    ),
    "dashboards.cli.study": (
        {
            "dashboards.charts", "dashboards.cli", "dashboards.cli.acceptance", "dashboards.draft_study_page",
            "dashboards.html_page", "dashboards.retrieval_study_page", "roofline.catalog", "validate",
            "validate.studies",
        },
        None,
    ),
    "dashboards.cli.planning": (
        {
            "dashboards.cli", "dashboards.sweep_page", "planner", "planner.display", "planner.export",
            "planner.interface", "planner.questions", "planner.search", "roofline", "roofline.catalog",
        },
        None,
    ),
    "dashboards.cli.retrieval": (
        {
            "dashboards.cli", "runtime.model", "runtime.model_config", "runtime.retrieval",
            "runtime.retrieval.distill", "validate",
        },
        None,
    ),
    "dashboards.cli": (
        {
            "dashboards.cli.acceptance", "dashboards.cli.catalog", "dashboards.cli.planning",
            "dashboards.cli.retrieval", "dashboards.cli.study",
            "dashboards.cli.validation", "dashboards.user_errors",
            "planner", "planner.interface", "planner.search", "roofline", "roofline.catalog", "runtime",
            "runtime.model", "validate",
            "validate.calibration", "validate.decode_bench", "validate.kernel_bench", "validate.quality",
            "validate.ruler",
        },
        None,
    ),
    "dashboards.cli.validation": (
        {
            "dashboards.cli", "dashboards.user_errors", "dashboards.validation_page", "planner", "roofline.catalog",
            "validate", "validate.suite",
        },
        None,
    ),
    "dashboards.cli.catalog": (
        {
            "dashboards.cli", "dashboards.figures", "dashboards.html_page", "planner", "planner.interface",
            "planner.published", "roofline", "roofline.catalog",
        },
        None,
    ),
    "dashboards.figures": (
        {"planner", "planner.published", "roofline", "roofline.catalog", "roofline.papers"},
        {"numpy", "plotly", "kaleido"},
    ),
    "dashboards.charts": (
        {"planner", "planner.curves", "planner.interface", "planner.search", "roofline", "roofline.catalog",
         "roofline.papers"},
        {"numpy", "plotly"},
    ),
    "dashboards.page": (
        {
            "dashboards", "dashboards.charts", "dashboards.figures", "planner", "planner.curves", "planner.interface",
            "planner.policies.selection", "planner.search", "roofline", "roofline.catalog", "roofline.papers",
            "roofline.symbolic", "validate.suite",
        },
        {"numpy", "streamlit", "sympy"},
    ),
    "dashboards": (
        {
            "dashboards.charts", "dashboards.page", "planner", "planner.interface", "planner.questions",
            "planner.search", "roofline", "roofline.catalog",
        },
        None,
    ),
}  # fmt: skip
PACKAGES = tuple(dict.fromkeys(room.partition(".")[0] for room in ROOMS))
FILES = {path.relative_to(ROOT).as_posix(): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}
DYNAMIC = {"find_spec", "import_module", "__import__", "files", "run_module"}  # they take a module's name as text


def module_of(file: str) -> str:
    """`roofline/catalog/shapes.py` as `roofline.catalog.shapes`, a package's __init__ as the package."""
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def room_of(module: str) -> str:
    """The room that a module of the package is in; "" for none."""
    fitting = (room for room in ROOMS if module == room or module.startswith(f"{room}."))
    return max(fitting, key=len, default="")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every module a file imports, also inside functions and by name as text.

    Relative ones start with a dot.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:  # `from ridgeplan.roofline import ops` may name a module
                whole = f"{module}.{alias.name}"
                is_module = whole.removeprefix("ridgeplan.") in MODULES or module == "ridgeplan"
                yield node.lineno, whole if is_module else module
        elif isinstance(node, ast.Call) and (name := imported_by_name(node)):
            yield node.lineno, name


def imported_by_name(node: ast.Call) -> str | None:
    """The module that a call such as `find_spec("torch")` names, if it is such a call and names it as text."""
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    given = [*node.args[:1], *(keyword.value for keyword in node.keywords)]
    texts = [value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return texts[0] if called in DYNAMIC and texts else None


def problem(room: str, name: str) -> str | None:
    """What is wrong with importing `name` in a file of `room`, or None."""
    inside, installed = ROOMS[room]
    top, _, rest = name.partition(".")
    if name.startswith(".") or top in PACKAGES:
        return "imports within the package are absolute: ridgeplan.x"
    if top == "ridgeplan":
        target = room_of(rest)
        fine = target == room or target in inside or rest in inside
        return None if fine else f"{room} may import of the package only {sorted(inside)}"
    if installed is None or top in installed or top in sys.stdlib_module_names:
        return None
    return f"{room} may import of installed packages only {sorted(installed)}"


def tree_of(file: str) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(FILES[file].read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", FILES)
def test_imports_follow_the_rooms(file: str) -> None:
    room = room_of(module_of(file))
    found = [f"{file}:{line}: {name}: {why}" for line, name in imports(tree_of(file)) if (why := problem(room, name))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("roofline", "import torch"),
        ("roofline", "def f():\n    from ridgeplan.planner import plan"),
        ("roofline", "from ridgeplan import planner"),
        ("roofline.catalog", "from ridgeplan.roofline import ops"),
        ("roofline.catalog", "importlib.util.find_spec('ridgeplan.validate')"),
        ("planner", "import transformers.utils"),
        ("planner", "from ridgeplan.runtime.engine import Engine"),
        ("planner", "import_module('torch')"),
        ("planner", "find_spec(name='torch')"),
        ("kernels.linear", "from ridgeplan.roofline.catalog.profile import Profile"),
        ("kernels.linear", "from ridgeplan.kernels.attention import decode_attention"),
        ("kernels.device", "from ridgeplan.kernels.kv_cache.layout import QuantizedKV"),
        ("kernels.layer", "import transformers"),
        ("runtime", "from ridgeplan.planner.search import recommend"),
        ("runtime.kv", "from ridgeplan.runtime.model.decoder import Decoder"),
        ("runtime.model", "from ridgeplan.runtime.quantization import gptq"),
        ("validate.kernel_bench", "from ridgeplan.validate.calibration import fit"),
        ("validate", "import ridgeplan.dashboards.charts"),
        ("dashboards", "from kernels.attention.merge import merge"),
        ("dashboards", "import planner"),
        ("dashboards", "from . import charts"),
    ],
)
def test_an_arrow_against_the_rooms_is_found(room: str, source: str) -> None:
    assert any(problem(room, name) for _, name in imports(ast.parse(source)))


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("roofline", "import math, numpy as np\nfrom ridgeplan.roofline import ops"),
        ("planner", "from ridgeplan.roofline.catalog.shapes import ModelShape"),
        ("kernels.attention", "from ridgeplan.roofline import cost\nfrom ridgeplan.kernels.kv_cache import layout"),
        ("runtime", "from ridgeplan.planner.plan import Plan"),
        ("dashboards.cli", "from ridgeplan import planner, runtime\nimport streamlit"),
    ],
)
def test_arrows_along_the_rooms_pass(room: str, source: str) -> None:
    assert not [name for _, name in imports(ast.parse(source)) if problem(room, name)]


def test_no_import_goes_in_a_circle() -> None:
    """At import time: what stands inside a function or under TYPE_CHECKING is loaded later or never."""
    assert loaded(ast.parse("try:\n    from ridgeplan.roofline import ops\nfinally:\n    pass")) == {"roofline.ops"}
    arrows = {module: {name for name in loaded(tree_of(file)) if name != module} for module, file in MODULES.items()}
    while free := {module for module, targets in arrows.items() if not targets & arrows.keys()}:
        arrows = {module: targets for module, targets in arrows.items() if module not in free}
    assert not arrows, f"these import each other: {sorted(arrows)}"


def loaded(tree: ast.Module) -> set[str]:
    """Modules of the package that are imported when a file is."""
    names = (name.removeprefix("ridgeplan.") for node in run_at_import(tree) for _, name in imports(node))
    return {name for name in names if name in MODULES}


def run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The import statements outside functions and TYPE_CHECKING, also those in `try` and `if`."""
    for node in ast.iter_child_nodes(tree):
        is_later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_never = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not is_later and not is_never:
            yield from run_at_import(node)


def test_every_room_is_a_folder_that_ships() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in FILES.values()}
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert {name.removeprefix("ridgeplan.") for name in shipped} == folders | {"kernels", "ridgeplan"}
    assert set(ROOMS) == folders


def test_no_folder_is_crowded() -> None:
    counts = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for folder in (*PACKAGES, "tests")
        for pattern in ("*.py", "*.cu", "*.cuh")
        for path in (ROOT / folder).rglob(pattern)
        if path.name != "__init__.py"
    )
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_functions_are_small() -> None:
    nodes = [
        (file, node)
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {f"{file}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1 for file, node in nodes}
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}
    bodies = [body_lines(node) for _, node in nodes]
    assert statistics.median(bodies) <= MEDIAN_LINES


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's statements, its docstring left out."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES.values()} - {ROOT / "kernels"}), ids=str)
def test_every_folder_says_what_lives_there(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert text
    assert "Not here:" in text


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
    assert not [path for folder in PACKAGES for path in (ROOT / folder).rglob("conftest.py")]
