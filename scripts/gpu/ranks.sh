#!/usr/bin/env bash
# Several GPUs of one box against one. Exact: builds both artifacts of the 1.3B model's size with random weights, side by
# side, verifies each, measures a step of one GPU divided by a step of all, and where the rest goes. Quantised: the 14B
# model's engines (FP4 cache, fused layers, fp8, 8-bit attention, resident window), random weights, no artifact. Decoding:
# the VAE's engines at full size, random weights.
#     SEKO_PYTHON=/path/to/python bash scripts/gpu/ranks.sh [RANKS]                  default 2
# SEKO_PRESET, SEKO_OPTIONS: another exact model, further options of its builds.
# SEKO_QUANTISED: another preset, or empty for none; SEKO_LAYERS: fewer of its layers.
# SEKO_DECODE: empty for no decoding. SEKO_STREAMS: streams of frames with Wan's VAE, of `video` (the 14B model), `lingbot`
# and `talk`; default: none. SEKO_BUSY: chunks beside busy cores. $SEKO_WORK: where artifacts and logs go.
# Rows go to $SEKO_ROWS as they come; what fails is told, and the exit code counts it.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
source scripts/venv.sh
export CXX=${SEKO_CXX:-/usr/bin/g++} PYTHONUNBUFFERED=1
seko_make_venv dev || exit
seko_need_gpu measure || exit
ranks=${1:-2} preset=${SEKO_PRESET:-self-forcing-1.3b} work=${SEKO_WORK:-/tmp/seko-ranks}
quantised=${SEKO_QUANTISED-wan-14b} decode=${SEKO_DECODE-1} rows=${SEKO_ROWS:-docs/benchmarks/h200.jsonl}
read -ra options <<<"${SEKO_OPTIONS:---kernels plain --kv bf16}"
[ "$SEKO_GPUS" -ge "$ranks" ] || { echo "$ranks ranks take as many GPUs, there are $SEKO_GPUS" >&2 && exit 5; }
mkdir -p "$work/ranks"
began=$SECONDS failed=0

build() { # NAME OPTIONS...
    "$PYTHON" -m seko_export build "$checkpoint" --preset "$preset" "${options[@]}" "${@:2}" -o "$work/ranks/$1" --force --json >"$work/$1.log" 2>&1
    local code=$?
    echo "== $1: exit $code after $((SECONDS - began)) s"
    tail -n 2 "$work/$1.log" | cut -c1-1500
    return "$code"
}

measured() { # CASE OPTIONS...
    SEKO_RANKS=$ranks SEKO_PRESET=$quantised "$PYTHON" -m scripts.bench "$1" --work "$work" --rows "$rows" "${@:2}"
}

stream() { # NAME OPTIONS...
    SEKO_RANKS=$ranks SEKO_PRESET="" SEKO_LAYERS="" "$PYTHON" -m scripts.bench "ranks_$1" --work "$work" --rows "$rows" "${@:2}"
}

if [ -n "$quantised" ]; then
    measured ranks_drawn --prepare >"$work/compile.log" 2>&1 &
    compile=$!
fi
if [ -n "$decode" ]; then
    measured ranks_decode --prepare >"$work/compile-vae.log" 2>&1 &
    compile_vae=$!
fi
declare -A compile_stream
for name in ${SEKO_STREAMS-}; do
    stream "$name" --prepare >"$work/compile-$name.log" 2>&1 &
    compile_stream[$name]=$!
done
checkpoint=$work/$preset.pt
[ -e "$checkpoint" ] || "$PYTHON" scripts/make_checkpoint.py --preset "$preset" --format self-forcing --device cuda -o "$checkpoint" || exit
echo "== checkpoint: $((SECONDS - began)) s"
# The last GPU is the first of the build for several: the two builds record their goldens on different ones.
CUDA_VISIBLE_DEVICES=0 build one &
first=$!
CUDA_VISIBLE_DEVICES=$(seq -s, $((ranks - 1)) -1 0) build several --ranks "$ranks"
several=$?
wait "$first" && built=$several || built=1
if [ -n "$quantised" ]; then
    wait "$compile" || { failed=$((failed + 1)) quantised="" && tail -n 20 "$work/compile.log"; }
fi
if [ -n "$decode" ]; then
    wait "$compile_vae" || { failed=$((failed + 1)) decode="" && tail -n 20 "$work/compile-vae.log"; }
fi
for name in "${!compile_stream[@]}"; do
    wait "${compile_stream[$name]}" || { failed=$((failed + 1)) && unset "compile_stream[$name]" && tail -n 20 "$work/compile-$name.log"; }
done
echo "== built: $((SECONDS - began)) s"
if [ "$built" -eq 0 ]; then
    measured ranks || failed=$((failed + 1))
    echo "== exact: $((SECONDS - began)) s"
else
    failed=$((failed + 1))
fi
if [ -n "$decode" ]; then
    measured ranks_decode || failed=$((failed + 1))
    echo "== decoding: $((SECONDS - began)) s"
fi
if [ -n "$quantised" ]; then
    measured ranks_drawn || failed=$((failed + 1))
fi
for name in "${!compile_stream[@]}"; do
    stream "$name" || failed=$((failed + 1))
    echo "== $name: $((SECONDS - began)) s"
done
echo "== done: $failed failed after $((SECONDS - began)) s"
exit "$failed"
