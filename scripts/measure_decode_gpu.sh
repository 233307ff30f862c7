#!/bin/sh
# Decodes at the size of Llama-3.1-8B on a GPU: a run of `ridgeplan bench suite` for each file of results, with plain
# decoding in every one. A file that is in OUT already is not made again; an interrupted run leaves its rows in part_*.
# usage: measure_decode_gpu.sh MODEL.gguf TEXT CALIBRATION_TEXT OUT [NAME ...]
set -eu
model=$1 text=$2 calibration=$3 out=$4
shift 4
names=${*:-"drafts gammas specattn weights evictions batches lossy random"}

suite() { # name, its options
    name=$1
    shift
    [ -e "$out/decode_$name.json" ] && return
    ridgeplan bench suite --model-shape meta-llama/Llama-3.1-8B --model "$model" --calibration "$calibration" \
        --new-tokens "${TOKENS:-512}" --output "$out/part_$name.json" "$@"
    mv "$out/part_$name.json" "$out/decode_$name.json"
}

cases() { # presets with a share or a gamma, workloads
    for workload in $2; do
        for one in $1; do printf -- '--case %s:%s%s ' "${one%:*}" "$workload" "$(echo "$one" | sed 's/^[^:]*//')"; done
    done
}

for name in $names; do
    case $name in
    drafts) suite "$name" --prompt-file "$text" $(cases "quantspec:3 progressive:3 specattn-int4:3" "32768x8 131072x1 131072x4") ;;
    # QuantSpec, Fig 9: its drafts and two baselines over gamma.
    gammas)
        gammas=$(for gamma in 1 2 3 4 5 6; do echo quantspec:$gamma magicdec-streaming:$gamma magicdec-snapkv:$gamma; done)
        suite "$name" --prompt-file "$text" $(cases "$gammas" 32768x1)
        ;;
    specattn) suite "$name" --prompt-file "$text" $(cases "specattn:4" "32768x8 131072x4") ;;
    weights) suite "$name" --prompt-file "$text" $(cases "quantspec-int8:3 progressive-int8:3" "32768x8 131072x1 131072x4") ;;
    evictions) suite "$name" --prompt-file "$text" $(cases "dapq@0.25 snapkv@0.25 dapq-quantspec@0.25:3" "32768x8 131072x4") ;;
    # DapQ, Tables 3 and 7: prompts of 8k, 150 new tokens, 256 tokens kept.
    batches) TOKENS=150 suite "$name" --prompt-file "$text" $(cases "snapkv@0.03125 dapq@0.03125" "8192x1 8192x8 8192x16 8192x32") ;;
    lossy)
        ridgeplan plan Llama-3.1-8B --gpu h200 --ctx 128k --quality lossy --memory-limit 24GB -o "$out/lossy.json"
        suite "$name" --prompt-file "$text" --plan "$out/lossy.json"
        ;;
    random) suite "$name" --random-tokens $(cases "quantspec-kv:0-4 specattn:0-4" "4096x1 131072x1") ;;
    *) echo "unknown: $name; allowed: drafts gammas specattn weights evictions batches lossy random" >&2 && exit 2 ;;
    esac
done
