#!/usr/bin/env bash
# Teaches the shipped sample to follow a prompt that changes during a stream: on one GPU in six and a half minutes,
# judging before and after included, on a GPU box with its own torch; further arguments go to
# scripts/train_sample/train_switch.py.
#     SEKO_PYTHON=/path/to/python OUT=out/switch bash scripts/gpu/train_switch.sh [--minutes 6.4]
# $OUT (default out/switch) gets dit.safetensors (rewritten on the way), losses.jsonl, switches.png, sample-sheet.png,
# judged.json, and log.jsonl: a line for each stage, the last a failure's if there was one.
set -uo pipefail
cd "$(dirname "$0")/../.."
source scripts/venv.sh
export CXX=${SEKO_CXX:-/usr/bin/g++} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
seko_make_venv dev || exit
out=${OUT:-out/switch}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
options=(--compile)
[[ " $* " == *" --rehearse "* ]] && options=()
"$PYTHON" -m scripts.train_sample.train_switch --folder "$work/run" --goal "$out" "${options[@]}" "$@" 2>"$out/errors.txt" |
    tee "$out/log.jsonl"
code=${PIPESTATUS[0]}
[ "$code" -eq 0 ] || tail -n 30 "$out/errors.txt" >&2
exit "$code"
