#!/bin/sh
# Measures on a GPU what targets that read by a selection give up, all selections side by side.
# What is in OUT already is not measured again, but for rows of another head.
# usage: [BUDGETS="512 1024"] measure_selections_gpu.sh MODEL.gguf TEXT HEAD OUT [CONTEXT ...]
set -eu
model=$1 text=$2 head=$3 out=$4
shift 4
contexts=${*:-"16384 32768"}
selections="specontext-resident progressive-target progressive-target-int8 quest clusterkv shadowkv
streamingllm-target oracle-target"

quality() { # tasks, context
    ridgeplan quality $selections --budgets ${BUDGETS:-512 1024 2048 4096} --model "$model" --text "$text" \
        --retrieval-head "$head" --only-solved --samples 3 --passages 3 --batch 18 --tasks $1 --ctx "$2" \
        --output "$out/quality-selections.json"
}

for context in $contexts; do quality none "$context"; done
for context in $contexts; do quality all "$context"; done
