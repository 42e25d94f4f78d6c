#!/usr/bin/env bash
# Everything that only a GPU shows, on a GPU box with its own torch: GPU tests, then a tiny build end to end.
# Results as text in ${OUT:-out}. CXX must link the system's libstdc++.
set -uo pipefail
cd "$(dirname "$0")/../.."
export CXX=${CXX_FOR_SEKO:-/usr/bin/g++} SEKO_PYTHON=${SEKO_PYTHON:-python3} PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD:$PWD/runtime:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
out=${OUT:-out}
mkdir -p "$out"
"$SEKO_PYTHON" -m seko_export doctor --json
"$SEKO_PYTHON" -m pytest -m gpu -q "$@" 2>&1 | tee "$out/gpu-tests.txt"
for options in "--kv bf16" "--fp4-kv" "--fp4-kv --batch 2" "--kv bf16 --backend compile"; do
    # shellcheck disable=SC2086 - options are words
    "$SEKO_PYTHON" -m seko_export build $options -o /tmp/seko-tiny --force --json 2>&1 | tail -n 3
done | tee "$out/gpu-builds.txt"
"$SEKO_PYTHON" -m seko_runtime run /tmp/seko-tiny --chunks 12 --seed 0 -o "$out/tiny.y4m" --json | tail -n 1
