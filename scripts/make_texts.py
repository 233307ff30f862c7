"""Makes texts of code, documentation and prose from what is on every machine: to train draft heads, and to measure on.

Code is Python's own, documentation Python's help topics and the docstrings of packages, in the order of their files;
prose is two novels. Nothing that heads are trained on is in a text to measure on. Prints the size and the hash of each.

    python scripts/make_texts.py OUT --novels news_from_nowhere.txt american_adventures.txt
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sysconfig
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from ridgeplan.validate.prompts import sample_text

CODE = ("asyncio", "email", "http", "unittest")
CODE_TO_TRAIN = ("concurrent", "ctypes", "importlib", "json", "logging", "multiprocessing", "wsgiref", "xml")
DOCS, DOCS_TO_TRAIN = ("numpy", "scipy"), ("torch",)  # whose docstrings follow the help topics, or stand alone
SKIPPED = ("test", "tests", "testing")  # folders
MOST_CHARACTERS = 3_000_000  # of a text


def sources(folder: Path) -> list[str]:
    """The Python files of a folder and of those in it, but tests, in the order of their paths."""
    files = (path for path in folder.rglob("*.py") if not {*path.relative_to(folder).parts} & {*SKIPPED})
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(files)]


def code(packages: Sequence[str]) -> str:
    """The source of packages of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    return "".join(text for package in packages for text in sources(library / package))


def docstrings(packages: Sequence[str]) -> Iterator[str]:
    """The docstrings of installed packages, each cleaned of its indentation."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise SystemExit(f"{package!r} is not installed; allowed: with {', '.join(DOCS + DOCS_TO_TRAIN)}")
        for text in sources(Path(spec.origin).parent):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, documented) and (doc := ast.get_docstring(node)):
                    yield f"{doc}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder")
    parser.add_argument("--novels", type=Path, nargs=2, required=True, help="to train on, and to measure on")
    chosen = parser.parse_args()
    train, measure = (path.read_text(encoding="utf-8") for path in chosen.novels)
    texts = {"code": code(CODE), "docs": sample_text() + "".join(docstrings(DOCS)), "prose": measure}
    to_train = code(CODE_TO_TRAIN), "".join(docstrings(DOCS_TO_TRAIN)), train
    texts = {name: text[:MOST_CHARACTERS] for name, text in texts.items()}
    shortest = min(map(len, to_train))
    texts["train"] = "".join(text[:shortest] for text in to_train)
    chosen.output.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (chosen.output / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}: {len(text)} characters, sha256 {sha256(text.encode()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
