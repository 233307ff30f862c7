"""Product code lines by package, and the budget that they may not exceed: `make lint`.

A code line is not blank, not a comment and not part of a docstring.
"""

import ast
import io
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("roofline", "planner", "kernels", "runtime", "validate", "dashboards", "package")
IGNORED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Lines of a Python source that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in IGNORED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def main() -> None:
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ridgeplan"][
        "code_line_budget"
    ]
    total = 0
    for package in PACKAGES:
        files = sorted((ROOT / package).rglob("*.py"))
        lines = sum(code_lines(path.read_text(encoding="utf-8")) for path in files)
        total += lines
        print(f"{package:11} {len(files):4} files {lines:7,} code lines")
    print(f"{'total':11} {total:26,} of {budget:,}")
    if total > budget:
        sys.exit(f"{total:,} code lines exceed the budget of {budget:,} in pyproject.toml ([tool.ridgeplan])")


if __name__ == "__main__":
    main()
