#!/bin/sh
# Measures on a GPU what targets that read a selection keep of the model's own long output, all side by side: greedy
# agreement with full attention, and recall of what was written. 2k tokens go in, and 8k, 16k or 32k come out.
# What is in OUT already is not measured again, but for rows of another head. HEAD "": the one that ships for the model.
# usage: [BUDGETS="1024 2048"] [OUTPUTS="8192 16384"] [SELECTIONS="quest"] measure_long_outputs_gpu.sh MODEL TEXT HEAD OUT
set -eu
model=$1 text=$2 head=$3 out=$4
budgets=${BUDGETS:-"1024 2048"}
selections=${SELECTIONS:-"specontext-resident progressive-target progressive-target-int8 quest clusterkv shadowkv
streamingllm-target"}

# The same policies where generated tokens compete for the budget.
competing=$(python - "$out" $budgets <<'PYTHON'
import sys
from dataclasses import replace
from pathlib import Path

from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset

folder = Path(sys.argv[1])
for name in ("quest", "clusterkv", "shadowkv"):
    for budget in map(int, sys.argv[2:]):
        plan = preset(name, Workload("any", "any", 1 << 20))
        attention = replace(plan.attention, selection=plan.attention.selection.among_all, budget=budget)
        path = folder / f"{name}-{budget}-competing.json"
        path.write_text(replace(plan, attention=attention).to_json(), encoding="utf-8")
        print(path)
PYTHON
)

for output in ${OUTPUTS:-8192 16384 32768}; do
    ridgeplan quality $selections $competing --budgets $budgets --model "$model" --text "$text" --yarn \
        ${head:+--retrieval-head "$head"} --passages 4 --batch 4 --tasks none --ctx $((2048 + output + 129)) \
        --long-output "$output" --output "$out/quality-long-outputs.json"
done
