"""Draws the code in Mermaid: packages as floors, folders as rooms, imports as arrows.

python scripts/draw_house.py [ROOT]
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

FLOORS = ("dashboards", "validate", "runtime", "kernels", "planner", "roofline")


def draw_house(root: Path) -> str:
    """Mermaid text: each folder with its number of files, arrows between rooms of a floor, and between floors.

    An arrow between floors carries the number of import statements.
    """
    rooms = {path: room_of(path.relative_to(root)) for floor in FLOORS for path in (root / floor).rglob("*.py")}
    files = Counter(rooms.values())
    arrows: Counter[tuple[str, str]] = Counter()
    for path, source in rooms.items():
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("ridgeplan."):
                target = target_of(str(statement.module).split(".")[1:], files)
                if floor_of(source) != floor_of(target):
                    source_end, target_end = floor_of(source), floor_of(target)
                    arrows[f"{source_end}_floor", f"{target_end}_floor"] += 1
                elif source != target:
                    arrows[source.replace(".", "_"), target.replace(".", "_")] += 1
    lines = ["flowchart TB"]
    for floor in FLOORS:
        names = sorted(room for room in files if floor_of(room) == floor)
        boxes = [f'    {name.replace(".", "_")}["{name.split(".")[-1]} ({files[name]})"]' for name in names]
        lines += [f'  subgraph {floor}_floor["{floor}"]', *boxes, "  end"]
    for (source, target), count in sorted(arrows.items()):
        label = f"|{count}|" if source.endswith("_floor") else ""
        lines.append(f"  {source} -->{label} {target}")
    return "\n".join(lines)


def room_of(path: Path) -> str:
    """`planner/queries/fit.py` -> `planner.queries`; deeper folders belong to the room above them."""
    return ".".join(path.parent.parts[:2])


def floor_of(room: str) -> str:
    """`planner.queries` -> `planner`."""
    return room.partition(".")[0]


def target_of(parts: list[str], files: Counter[str]) -> str:
    """The room of an imported module."""
    room = ".".join(parts[:2])
    return room if room in files else parts[0]


if __name__ == "__main__":
    print(draw_house(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
