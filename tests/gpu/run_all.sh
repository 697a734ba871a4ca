#!/usr/bin/env bash
# Everything that one GPU can tell, in one go: run_all.sh [OUT]     (OUT: tests/data/gpu)
#   PYTHON=python3         an interpreter with vLLM and evenstep's dependencies (pip install .)
#   VISIBLE=0              the GPU
#   STEP_LIMIT_S, PAIR_LIMIT_S   time limits; what a script has not written by then is lost
#   STEP_FLAGS, PAIR_FLAGS further flags, for example '--engine-flags=--attention-backend=FLASH_ATTN',
#                          or '--cpu --shape tiny' and smaller sizes
# Takes about 25 minutes on a GPU of the H200's kind. Not run on a GPU yet.
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
OUT=$(mkdir -p "${1:-$ROOT/tests/data/gpu}" && cd "${1:-$ROOT/tests/data/gpu}" && pwd)
PYTHON=${PYTHON:-python3}
cd "$ROOT" || exit
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
export CUDA_VISIBLE_DEVICES=${VISIBLE:-${CUDA_VISIBLE_DEVICES:-0}}
# The sampler of FlashInfer is vLLM's default, and not everywhere installed.
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

failed=0
# shellcheck disable=SC2086
timeout --kill-after=30 "${STEP_LIMIT_S:-900}" \
    "$PYTHON" tests/gpu/step_time.py --out "$OUT/step_time.json" ${STEP_FLAGS:-} || failed=1
# shellcheck disable=SC2086
timeout --kill-after=30 "${PAIR_LIMIT_S:-900}" \
    "$PYTHON" tests/gpu/pair.py --out "$OUT/pair.json" ${PAIR_FLAGS:-} || failed=1
if [ -s "$OUT/step_time.json" ]; then
    "$PYTHON" -m router.cli simulate decode --policy bfio --step-time "$OUT/step_time.json" || failed=1
fi
exit "$failed"
