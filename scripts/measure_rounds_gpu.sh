#!/bin/sh
# Measures sparse drafts in real rounds on a GPU, and tunes SpecAttn's and SpecExtend's plans by measured generations.
# Rows that OUT has already are not measured again. Each context takes a few minutes, so that PARTS may be split.
# usage: [PASSAGES=8] [PARTS="4096 30720 122880 tune"] measure_rounds_gpu.sh MODEL NAME TEXT OUT
set -eu
model=$1 name=$2 text=$3 out=$4

study() { # context
    for verification in sampled teacher-forced; do
        ridgeplan study drafts --model "$model" --text "$text" --ctx "$1" --ratios 0.07 --formats bf16 --yarn \
            --policies streamingllm specextend specextend-last specattn specattn-eq2 specattn-accepted specattn-weights \
            --tokens 128 --passages "${PASSAGES:-8}" --verification "$verification" \
            --output "$out/rounds-$name-$verification.json" --resume
    done
}

tune() { # preset
    [ -e "$out/tune-$name-$1.json" ] && return
    ridgeplan estimate "$model" --gpu h200 --ctx 32768 --batch 8 --new-tokens 256 --preset "$1" --yarn \
        --output "$out/plan-$name-$1.json" > "$out/plan-$name-$1.txt"
    ridgeplan tune "$out/plan-$name-$1.json" --model "$model" --text "$text" --gamma 9 --tokens 256 \
        --rows "$out/rows-$name.json" --json > "$out/part-tune.json"
    mv "$out/part-tune.json" "$out/tune-$name-$1.json"
}

for part in ${PARTS:-4096 30720 122880 tune}; do
    case $part in
    tune) tune specattn && tune specextend ;;
    *) study "$part" ;;
    esac
done
