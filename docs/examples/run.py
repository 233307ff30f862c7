"""Executes the notebooks of this folder: `python docs/examples/run.py`, with --write to keep what they show.

Figures that are kept are SVG, which needs kaleido. A test runs them all without it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SECONDS = 300  # for one cell


def execute(path: Path, renderer: str) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh kernel. Raises CellExecutionError for a cell that fails.

    renderer: plotly's, such as "svg" or "json". What goes to stderr is about the machine, and is left out.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", record_timing=False)
    client.execute(env={**os.environ, "PLOTLY_RENDERER": renderer})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main(arguments: list[str]) -> None:
    """Executes every notebook, and writes its outputs with --write."""
    write = "--write" in arguments
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = execute(path, "svg" if write else "json")
        if write:
            nbformat.write(notebook, path)
        print(f"{'written' if write else 'executed'}: {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
