#!/usr/bin/env bash
# Whether waiting for one session's frames keeps others from running, on a GPU box with its own torch: the sample and the
# 1.3B model with Wan's VAE (random weights), two sessions each. Appends rows to docs/benchmarks/h200.jsonl.
#     SEKO_PYTHON=/path/to/python bash scripts/gpu/reading.sh [WORK_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/venv.sh
export CXX=${SEKO_CXX:-/usr/bin/g++} PYTHONUNBUFFERED=1
seko_make_venv dev
seko_need_gpu measure
work=${1:-/tmp/seko-reading} rows=docs/benchmarks/h200.jsonl
mkdir -p "$work"
"$PYTHON" -m seko_export build --fp4-kv --sessions 2 --batch 1 -o "$work/sample" --force --json
"$PYTHON" scripts/bench/pool.py "$work/sample" --figures reading --rows "$rows"
