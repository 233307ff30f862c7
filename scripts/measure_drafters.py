"""Times plans with drafters on a GPU beside the best plan without: code, documentation and prose, four workloads.

For every kind of text and workload it plans Llama-3.1-8B with and without drafters, and runs `ridgeplan bench suite`
with a small real model inflated to that shape: acceptance is real, time is the large model's. One command makes the
results file, which has the suite's documents by kind of text and workload:

    python scripts/measure_drafters.py drafters_h200.json --code code.py --docs manual.md --prose novel.txt

The texts need 130k tokens for all workloads; shorter ones leave the long workloads out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ridgeplan import planner
from ridgeplan.roofline.plan.plan import TextKind

RUN = "from ridgeplan.dashboards.cli import main; main()"
SHAPE = "Llama-3.1-8B"
WORKLOADS = ((4096, 1), (32768, 1), (32768, 8), (122880, 1))
NEW_TOKENS = 512


def plans(context: int, batch: int, kind: str, gpu: str, folder: Path) -> list[Path]:
    """Files of the best plan with a drafter, its adaptive form, the cascade, and the best plan without."""
    ask = {"batch": batch, "new_tokens": NEW_TOKENS, "yarn": True}
    best = planner.recommend(SHAPE, gpu, context, text=kind, **ask)
    cascade = planner.estimate(SHAPE, gpu, context, preset="cascade", text=kind, **ask)
    chosen = {"best": best.plan, "adaptive": best.adaptive, "cascade": cascade.plan}
    chosen["without"] = planner.recommend(SHAPE, gpu, context, **ask).plan
    paths = []
    for name, plan in chosen.items():
        if plan is not None:
            paths.append(folder / f"{kind}_{context}x{batch}_{name}.json")
            paths[-1].write_text(plan.to_json())
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", help="small model that computes the tokens")
    for kind in TextKind:
        parser.add_argument(f"--{kind}", type=Path)
    chosen, document, failed = parser.parse_args(arguments), {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in TextKind:
            text = getattr(chosen, kind)
            for context, batch in WORKLOADS if text else ():
                files, result = plans(context, batch, kind, chosen.gpu, Path(folder)), Path(folder) / "rows.json"
                command = [sys.executable, "-c", RUN, "bench", "suite", "--model-shape", SHAPE]
                command += ["--prompt-file", str(text), "--new-tokens", str(NEW_TOKENS), "--output", str(result)]
                command += ["--model", chosen.model] if chosen.model else []
                command += [word for path in files for word in ("--plan", str(path))]
                if subprocess.run(command, check=False).returncode == 0:
                    document[f"{kind} {context}x{batch}"] = json.loads(result.read_text())
                    chosen.output.write_text(json.dumps(document, indent=1) + "\n")
                else:
                    failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
