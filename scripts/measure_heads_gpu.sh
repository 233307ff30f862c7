#!/bin/sh
# Trains retrieval heads on a GPU and measures what selections choose, with plots. What is in OUT is not made again.
# usage: [STEPS=400] [PASSAGES=20] [CONTEXTS="4096 16384"] measure_heads_gpu.sh SMOLLM2.gguf QWEN.gguf TEST.txt TRAIN.txt OUT
set -eu
smollm2=$1 qwen=$2 test=$3 train=$4 out=$5

head_of() { # model, its name
    [ -e "$out/head-$2.safetensors" ] || ridgeplan distill "$1" --text "$train" --steps ${STEPS:-400} --by-layer \
        --language 0 --queries 256 --checkpoint "$out/run-$2.safetensors" --every 100 --output "$out/head-$2.safetensors"
}

study() { # model, its name, contexts, budgets
    [ -e "$out/retrieval-$2.json" ] || ridgeplan study retrieval --model "$1" --text "$test" \
        --retrieval-head "$out/head-$2.safetensors" --ctx $3 --budgets $4 --tokens 8 --passages ${PASSAGES:-20} \
        --output "$out/retrieval-$2.json" --html "$out/retrieval-$2.html"
}

head_of "$smollm2" smollm2
head_of "$qwen" qwen
study "$smollm2" smollm2 "${CONTEXTS:-4096}" "512 1024 2048"
study "$qwen" qwen "${CONTEXTS:-4096 16384}" "512 1024 2048"
