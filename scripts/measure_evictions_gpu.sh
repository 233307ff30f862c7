#!/bin/sh
# Measures evictions' quality and the study behind DapQ on a GPU. What is in OUT already is not measured again.
# usage: measure_gpu.sh SMOLLM2.gguf QWEN.gguf american_adventures.txt news_from_nowhere.txt OUT [CONTEXT ...]
set -eu
smollm2=$1 qwen=$2 american=$3 news=$4 out=$5
shift 5
contexts=${*:-"4096 16384 32768"}
policies="dapq snapkv pyramidkv h2o streamingllm lacache expected-attention random oracle"

study() { # model, its name, text, its name
    [ -e "$out/study-$2-$4.json" ] || ridgeplan study dapq --model "$1" --text "$3" --ctx 4096 --passages 20 \
        --output "$out/study-$2-$4.json" --html "$out/study-$2-$4.html"
}

study "$smollm2" smollm2 "$american" american
study "$qwen" qwen "$american" american
study "$smollm2" smollm2 "$news" news
study "$qwen" qwen "$news" news
ridgeplan quality $policies int8 int4-weights --budgets 64 128 512 2048 --model "$qwen" --text "$american" \
    --ctx $contexts --only-solved --samples 3 --passages 3 --batch 40 --output "$out/quality.json"
