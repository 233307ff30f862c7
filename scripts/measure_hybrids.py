"""Times rounds of hybrids at their true size with random weights, beside what is predicted for the same lengths.

Every model that fits runs each preset at each workload. The file is written after every plan, and plans that it has
already are not measured again.
usage: python scripts/measure_hybrids.py RESULTS.json [MODEL ...]
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ridgeplan.planner.resolution import this_machine
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.plan.support import only_estimated
from ridgeplan.validate.random_model import BusyMachine, RandomModel, measured_round
from ridgeplan.validate.suite.sections import case_text, rows_of

MODELS = ("Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.5-35B-A3B")
PRESETS = ("autoregressive", "int8-weights", "int4-weights", "quantspec", "quantspec-weights", "quantspec-int8")
WORKLOADS = ((32768, 1), (120000, 1), (32768, 8))  # context and batch
NEW_TOKENS = 256


def measure(path: Path, names: tuple[str, ...]) -> None:
    """Adds the rows of every model to the file at `path`."""
    rows = json.loads(path.read_text()) if path.exists() else []
    profile, device = this_machine(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in names:
        shape = load_shape(name)
        model = RandomModel.build(shape, device, Machine.of(profile))
        for context, batch in WORKLOADS:
            for chosen in PRESETS:
                plan = preset(chosen, Workload(shape.name, profile.hardware.name, context, NEW_TOKENS, batch))
                known = any((row["model"], row["case"]) == (shape.name, case_text(plan)) for row in rows)
                if known or only_estimated(plan, shape) or not model.fits(plan):
                    continue
                try:
                    rows += map(asdict, rows_of(plan, model, profile, measured_round(model, plan)))
                except BusyMachine as error:
                    print(f"{shape.name}, {case_text(plan)}: {error}", flush=True)
                    continue
                path.write_text(json.dumps(rows, indent=1) + "\n")
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    measure(Path(sys.argv[1]), tuple(sys.argv[2:]) or MODELS)
