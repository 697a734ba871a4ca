#!/usr/bin/env bash
# What one GPU can tell: run_all.sh [all|grid|plug-in|pair] [OUT]     (OUT: tests/data/gpu)
#
#   grid      step time against resident KV tokens and batch, power against load: OUT/step_time.json
#   plug-in   what the plug-in costs a step: beside it in OUT/step_time.json
#   pair      two engines behind the router, replays: OUT/pair.json
#
# Each of the three is meant for less than ten minutes on a GPU of the H200's kind, the start of its
# engines included; not run on a GPU yet. It is ended after LIMIT_S. Every point, turn and replay is
# in the file as soon as it is measured, and the same command with the same OUT measures what is
# missing there; parts measured with other settings or on another device are refused.
#
# On a bare machine that is lent for half an hour and ends a command after ten minutes, once it has
# vLLM and evenstep's dependencies (pip install .), three commands are enough:
#
#   tests/gpu/run_all.sh grid OUT
#   tests/gpu/run_all.sh plug-in OUT
#   tests/gpu/run_all.sh pair OUT
#
# One that ended early is given again. Where nothing stays from one command to the next, copy OUT
# back after each, and into its place before the next one.
#
#   PYTHON=python3         an interpreter with vLLM and evenstep's dependencies
#   VISIBLE=0              the GPU
#   LIMIT_S=540            for each of the three
#   STEP_FLAGS, PAIR_FLAGS further flags, for example '--engine-flags=--attention-backend=FLASH_ATTN',
#                          or '--cpu --shape tiny' and smaller sizes
set -uo pipefail
WHAT=${1:-all}
case $WHAT in
    all | grid | plug-in | pair) ;;
    *) echo "run_all.sh: $WHAT is none of all, grid, plug-in, pair" >&2; exit 2 ;;
esac
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
OUT=$(mkdir -p "${2:-$ROOT/tests/data/gpu}" && cd "${2:-$ROOT/tests/data/gpu}" && pwd) || exit
PYTHON=${PYTHON:-python3}
cd "$ROOT" || exit
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
export CUDA_VISIBLE_DEVICES=${VISIBLE:-${CUDA_VISIBLE_DEVICES:-0}}
# The sampler of FlashInfer is vLLM's default, and not everywhere installed.
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

failed=0
measure() {  # NAME SCRIPT FLAGS…
    case $WHAT in all | "$1") ;; *) return ;; esac
    timeout --kill-after=30 "${LIMIT_S:-540}" "$PYTHON" "tests/gpu/${@:2}" && return
    case $? in 124 | 137)
        echo "run_all.sh: $1 was ended after ${LIMIT_S:-540} s; give the command again to go on" >&2 ;;
    esac
    failed=1
}
# shellcheck disable=SC2086
{
    measure grid step_time.py --only grid --out "$OUT/step_time.json" ${STEP_FLAGS:-}
    measure plug-in step_time.py --only plug-in --out "$OUT/step_time.json" ${STEP_FLAGS:-}
    measure pair pair.py --out "$OUT/pair.json" ${PAIR_FLAGS:-}
}
case $WHAT in
    all | grid)
        "$PYTHON" -m router.cli simulate decode --policy bfio --step-time "$OUT/step_time.json" || failed=1 ;;
esac
exit "$failed"
