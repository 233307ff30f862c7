#!/bin/sh
# Measures the rows of planner/acceptance/measured/ that need a GPU: two small models, two novels, 4k to 120k tokens.
# usage: measure_gpu.sh SMOLLM2.gguf QWEN.gguf american_adventures.txt news_from_nowhere.txt ROWS.json
set -eu
smollm2=$1 qwen=$2 american=$3 news=$4 rows=$5

measure() { # model, text, its name, contexts
    ridgeplan acceptance "$1" --text "$2" --text-name "$3" --ctx $4 --yarn --tokens 512 \
        --drafts kv8 kv4 w4 w4kv4 streamingllm:0.25 streamingllm:0.07 --output "$rows"
}

# Contexts just below 8k and 32k stay within the models' limits; beyond them positions are stretched by YaRN.
measure "$smollm2" "$american" "American Adventures" "4096 7680 32000"
measure "$smollm2" "$news" "News from Nowhere" "4096 7680 32000"
measure "$qwen" "$american" "American Adventures" "4096 16384 32000 122880"
measure "$qwen" "$news" "News from Nowhere" "4096 16384 32000 98304"
