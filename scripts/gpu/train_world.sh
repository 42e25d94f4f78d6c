#!/usr/bin/env bash
# Trains the world sample on one GPU in about four minutes, on a GPU box with its own torch; further arguments go to
# scripts/train_sample/train_world.py (--begin CHECKPOINT goes on from an earlier run's).
#     SEKO_PYTHON=/path/to/python OUT=out/world bash scripts/gpu/train_world.sh [--seconds 225]
# $OUT (default out/world) gets dit.safetensors and config.json, losses.jsonl, walks.png (what was to be seen, above what
# the model shows), judged.json, and log.jsonl: a line for each stage, the last a failure's if there was one.
set -uo pipefail
cd "$(dirname "$0")/../.."
source scripts/venv.sh
export CXX=${SEKO_CXX:-/usr/bin/g++} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
seko_make_venv dev || exit
out=${OUT:-out/world}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
options=(--compile)
[[ " $* " == *" --rehearse "* ]] && options=()
"$PYTHON" -m scripts.train_sample.train_world --folder "$work/run" --goal "$out" "${options[@]}" "$@" 2>"$out/errors.txt" |
    tee "$out/log.jsonl"
code=${PIPESTATUS[0]}
[ "$code" -eq 0 ] || tail -n 30 "$out/errors.txt" >&2
exit "$code"
