#!/bin/sh
# Trains retrieval heads and measures what selections choose, and what targets that read by them give up, on a GPU.
# What is in OUT already is not measured again; delete the quality file to measure with another head.
# usage: measure_selections_gpu.sh SMOLLM2.gguf QWEN.gguf american_adventures.txt news_from_nowhere.txt OUT [CONTEXT ...]
set -eu
smollm2=$1 qwen=$2 american=$3 news=$4 out=$5
shift 5
contexts=${*:-"16384 32768"}
selections="specontext-resident progressive-target progressive-target-int8 quest clusterkv shadowkv
streamingllm-target oracle-target"

head_of() { # model, its name
    [ -e "$out/head-$2.safetensors" ] || ridgeplan distill "$1" --text "$news" --steps 400 --by-layer --queries 256 \
        --checkpoint "$out/run-$2.safetensors" --every 100 --output "$out/head-$2.safetensors"
}

study() { # model, its name, contexts, budgets
    [ -e "$out/retrieval-$2.json" ] || ridgeplan study retrieval --model "$1" --text "$american" \
        --retrieval-head "$out/head-$2.safetensors" --ctx $3 --budgets $4 --tokens 8 --passages 20 \
        --output "$out/retrieval-$2.json" --html "$out/retrieval-$2.html"
}

head_of "$smollm2" smollm2
head_of "$qwen" qwen
study "$smollm2" smollm2 "4096" "512 1024 2048"
study "$qwen" qwen "4096 16384" "512 1024 2048"
quality() { # context, tasks
    ridgeplan quality $selections --budgets 512 1024 2048 4096 --model "$qwen" --text "$american" --ctx "$1" \
        --retrieval-head "$out/head-qwen.safetensors" --only-solved --samples 3 --passages 3 --batch 12 --tasks $2 \
        --output "$out/quality-selections.json"
}

for context in $contexts; do quality "$context" none; done
for context in $contexts; do quality "$context" all; done
