"""Extracts the arguments of an engine's serve command from its wheel, without importing it.

    pip download --no-deps --dest /tmp/wheels vllm==0.33.0
    python -m ridgeplan.validate.engine_arguments.extract wheels/vllm-0.33.0-*.whl

writes planner/export/schemas/vllm-0.33.0.json, which exported commands are checked against.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ridgeplan.planner.export.schema import FOLDER
from ridgeplan.validate.engine_arguments import sglang, vllm
from ridgeplan.validate.engine_arguments.kinds import of_field
from ridgeplan.validate.engine_arguments.syntax import Sources

ENGINES = {"vllm": vllm, "sglang": sglang}
# Objects whose fields are recorded too: what exports write into JSON arguments.
OBJECTS = ("SpeculativeConfig",)


def extract(wheel: Path) -> dict[str, Any]:
    """The arguments of the engine in a wheel, as plain JSON values."""
    name, version = wheel.name.split("-")[:2]
    engine = ENGINES[name]
    sources = Sources.of_wheel(wheel, engine.PREFIXES)
    return {
        "engine": name,
        "version": version,
        "source": f"PyPI, {wheel.name}",
        "arguments": _merged(engine.arguments(sources)),
        "objects": {
            one: {field: of_field(sources, item) for field, item in sources.fields(one).items()}
            for one in OBJECTS
            if one in sources.classes
        },
    }


def _merged(arguments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each argument once: where it is registered twice (`--model`), the last one counts, as in argparse."""
    by_name = {argument["names"][0]: argument for argument in arguments}
    return [by_name[name] for name in sorted(by_name)]


def to_text(found: dict[str, Any]) -> str:
    """JSON with one argument a line."""
    lines = ",\n".join(f"  {json.dumps(argument)}" for argument in found["arguments"])
    head = {key: value for key, value in found.items() if key not in ("arguments", "objects")}
    objects = json.dumps(found["objects"], indent=1)
    return f'{json.dumps(head)[:-1]},\n"objects": {objects},\n"arguments": [\n{lines}\n]}}\n'


def main() -> None:
    """Extracts the wheels that are named as arguments."""
    for name in sys.argv[1:]:
        found = extract(Path(name))
        target = FOLDER / f"{found['engine']}-{found['version']}.json"
        target.write_text(to_text(found), encoding="utf-8")
        print(f"{target}: {len(found['arguments'])} arguments")


if __name__ == "__main__":
    main()
