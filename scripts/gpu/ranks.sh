#!/usr/bin/env bash
# Several GPUs of one box against one: builds both artifacts at the 1.3B model's size with random weights, side by side,
# verifies each, and measures a step of one GPU divided by a step of all. Rows go to $SEKO_ROWS.
#     SEKO_PYTHON=/path/to/python bash scripts/gpu/ranks.sh [RANKS]                  default 2
# SEKO_PRESET, SEKO_OPTIONS: another model, further options of both builds. $SEKO_WORK: where artifacts and logs go.
set -uo pipefail
cd "$(dirname "$0")/../.."
source scripts/venv.sh
export CXX=${SEKO_CXX:-/usr/bin/g++} PYTHONUNBUFFERED=1
seko_make_venv dev || exit
seko_need_gpu measure || exit
ranks=${1:-2} preset=${SEKO_PRESET:-self-forcing-1.3b} work=${SEKO_WORK:-/tmp/seko-ranks}
rows=${SEKO_ROWS:-docs/benchmarks/h200.jsonl}
read -ra options <<<"${SEKO_OPTIONS:---kernels plain --kv bf16}"
[ "$SEKO_GPUS" -ge "$ranks" ] || { echo "$ranks ranks take as many GPUs, there are $SEKO_GPUS" >&2 && exit 5; }
mkdir -p "$work"
checkpoint=$work/$preset.pt
began=$SECONDS
[ -e "$checkpoint" ] || "$PYTHON" scripts/make_checkpoint.py --preset "$preset" --format self-forcing --device cuda -o "$checkpoint" || exit
echo "== checkpoint: $((SECONDS - began)) s"

build() { # NAME OPTIONS...
    "$PYTHON" -m seko_export build "$checkpoint" --preset "$preset" "${options[@]}" "${@:2}" -o "$work/$1" --force --json >"$work/$1.log" 2>&1
    local code=$?
    echo "== $1: exit $code"
    tail -n 2 "$work/$1.log" | cut -c1-1500
    return "$code"
}

# The last GPU is the first of the build for several: the two builds record their goldens on different ones.
CUDA_VISIBLE_DEVICES=0 build one &
first=$!
CUDA_VISIBLE_DEVICES=$(seq -s, $((ranks - 1)) -1 0) build several --ranks "$ranks"
code=$?
wait "$first" && [ "$code" -eq 0 ] || exit 1
echo "== both built: $((SECONDS - began)) s"
"$PYTHON" scripts/bench/ranks.py "$work/one" "$work/several" --rows "$rows" --busy "${SEKO_BUSY:-0}"
code=$?
echo "== done: exit $code after $((SECONDS - began)) s"
exit "$code"
