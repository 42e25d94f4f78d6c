#!/usr/bin/env bash
# Trains the sample or the world on one GPU, on a GPU box with its own torch; call it again to go on where it was stopped.
#     SEKO_PYTHON=/path/to/python bash scripts/gpu/train.sh sample|world RUNS       `python -m scripts.train_sample --help`
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/venv.sh
export CXX=${SEKO_CXX:-/usr/bin/g++} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
seko_make_venv dev
seko_need_gpu train
exec "$PYTHON" -m scripts.train_sample "$@"
